"""An evaluation for people in a terminal: figures with intervals, maps, curves, what changed, the gate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.report.tables import table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.eval.gate import Verdict
    from penstock.eval.paired import Difference, Speed
    from penstock.eval.result import HealthWarning, MetricValue, Result, TaskResult
    from penstock.eval.tasks.base import Tag

_BAR = 24


def shown(value: float, kind: str) -> str:
    """A share as a percentage, anything else as a number."""
    return f"{value:.1%}" if kind in ("rate", "mean") else f"{value:,.3f}"


def between(value: MetricValue) -> str:
    if value.interval is None:
        return ""
    return f"{shown(value.interval[0], value.kind)} to {shown(value.interval[1], value.kind)}"


def tag_text(axis: str, tag: Tag) -> str:
    return f"{tag:.0%}" if axis in ("depth", "position") and isinstance(tag, float) else str(tag)


def print_tasks() -> None:
    """All names, with what they measure."""
    from rich.console import Console

    from penstock.eval.tasks import DEFAULT, FILES, RUNS_CODE, TASKS

    shown = table(("task", "asked if none is named", "file, in the folder of --data"), title="Tasks", left=3)
    with_file = ("longbench", "ruler")
    for name in TASKS:
        file = FILES.get(name, "named as NAME:FILE" if name in with_file else "")
        code = " (runs code)" if name in RUNS_CODE else ""
        shown.add_row(name, "yes" if name in DEFAULT else "", file + code)
    Console().print(shown)


def print_result(result: Result) -> None:
    from rich.console import Console

    console = Console()
    rows = (
        ("" if i else task.name, value.name, shown(value.value, value.kind), between(value), f"{value.n:,}")
        for task in result.tasks
        for i, value in enumerate(task.values)
    )
    console.print(table(("task", "metric", "value", "95 %", "n"), rows, title=result.model, left=2))
    _print_answers(console, result)
    for task in result.tasks:
        _print_reliability(console, task)
        if len(task.axes) == 2:
            _print_map(console, task)
        elif len(task.axes) == 1:
            _print_curve(console, task)
        if task.left_out:
            console.print(
                f"{task.name}: {task.left_out} examples do not fit the context and were left out", style="dim"
            )
    console.print()
    how = [f"examples of seed {result.seed}", "greedy", "as chat" if result.chat else "as plain text"]
    how += [f"{name} {value}" for name, value in result.settings.items()]
    console.print(
        f"Conditions: {', '.join(how)}. Intervals: rates Wilson's, others bootstrap over examples.", style="dim"
    )


ENDS = (("cut at the limit", "cut"), ("stopped", "stopped"), ("empty", "empty"), ("no answer found", "unfound"))
"""What of the answers a report tells: heading, field of `Answers`."""


def _print_answers(console: Console, result: Result) -> None:
    """How answers ended, and whether they were answers; tasks that generate nothing are left out."""
    rows = [
        (task.name, f"{task.answers.n:,}", *(f"{getattr(task.answers, field):.0%}" for _, field in ENDS))
        for task in result.tasks
        if task.answers is not None
    ]
    if rows:
        console.print()
        console.print(table(("task", "n", *(head for head, _ in ENDS)), rows, title="Answers"))


def _print_reliability(console: Console, task: TaskResult) -> None:
    """How often answers are right, by how sure they are, where that was asked."""
    from penstock.eval.calibration import reliability

    for value in task.values:
        if value.kind == "calibration":
            made = table(("how sure", "", "sure on average", "right", "n"), left=0)
            made.columns[1].justify = "left"
            for found in reliability([e.scores[value.name] for e in task.examples]):
                ends = f"{found.low:.0%} to {found.high:.0%}"
                made.add_row(
                    ends, "█" * round(_BAR * found.right), f"{found.sure:.1%}", f"{found.right:.1%}", str(found.n)
                )
            console.print(f"\n{task.name}: how often answers are right, by how sure they are", style="italic")
            console.print(made)


def print_warnings(result: Result, baseline: Result | None = None) -> None:
    """On stderr, one line each, whatever stands on stdout: figures of a measurement that went wrong are no figures."""
    for where, found in warned(result, baseline):
        print(f"penstock: warning: {where}{found.task}: {found.why}", file=sys.stderr)


def warned(result: Result, baseline: Result | None) -> list[tuple[str, HealthWarning]]:
    """Of the result, and of those tasks of the baseline that it has, too."""
    names = {task.name for task in result.tasks}
    before = [] if baseline is None else [found for found in baseline.warnings if found.task in names]
    return [*(("", found) for found in result.warnings), *(("the baseline's ", found) for found in before)]


def _print_map(console: Console, task: TaskResult) -> None:
    from penstock.eval.result import grouped

    head = task.values[0]
    cells = grouped(task, head.name, task.axes)
    down, across = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    across.sort(key=lambda tag: (isinstance(tag, str), tag))
    console.print(f"\n{task.name}: {head.name}, {task.axes[0]} by {task.axes[1]}", style="italic")
    made = table((task.axes[0], *(tag_text(task.axes[1], tag) for tag in across)), left=0)
    for row in down:
        found = [cells.get((row, column)) for column in across]
        texts = ["" if v is None else f"[{_colour(v.value)}]{v.value:.0%}[/]" for v in found]
        made.add_row(tag_text(task.axes[0], row), *texts)
    console.print(made)


def _colour(share: float) -> str:
    return "green" if share >= 0.9 else "yellow" if share >= 0.5 else "red"


def _print_curve(console: Console, task: TaskResult) -> None:
    from penstock.eval.result import grouped

    head, axis = task.values[0], task.axes[0]
    console.print(f"\n{task.name}: {head.name} by {axis}", style="italic")
    made = table((axis, "", head.name, "95 %", "n"), left=0)
    made.columns[1].justify = "left"
    for (tag,), value in grouped(task, head.name, [axis]).items():
        bar = "█" * round(_BAR * min(1.0, value.value)) if head.kind in ("rate", "mean") else ""
        made.add_row(tag_text(axis, tag), bar, shown(value.value, value.kind), between(value), str(value.n))
    console.print(made)


def print_baseline(changed: Sequence[Difference], timed: Sequence[Speed]) -> None:
    from rich.console import Console

    console = Console()
    made = table(
        ("task", "metric", "before", "now", "difference", "95 %", "p"), left=2,
        title="Against the baseline, in pairs of examples",
    )  # fmt: skip
    for d in changed:
        now, before = shown(d.metric.value, d.metric.kind), shown(d.before.value, d.metric.kind)
        made.add_row(d.task, d.metric.name, before, now, signed(d.value, d.metric.kind), spread_of(d), p_of(d))
    console.print(made)
    for speed in timed:
        if speed.ratio is None:
            console.print(f"{speed.task}: {speed.refused}", style="yellow")
        else:
            console.print(
                f"{speed.task}: {speed.same} of {speed.n} answers are the same tokens; {speed.ratio:.2f} times the "
                "baseline's speed (two runs at different times: an indication)",
                style="dim",
            )


def signed(value: float, kind: str) -> str:
    return f"{100 * value:+.1f} points" if kind in ("rate", "mean") else f"{value:+.3f}"


def spread_of(d: Difference) -> str:
    if d.interval is None:
        return ""
    low, high = d.interval
    if d.metric.kind in ("rate", "mean"):
        return f"{100 * low:+.1f} to {100 * high:+.1f}"
    return f"{low:+.3f} to {high:+.3f}"


def p_of(d: Difference) -> str:
    return "" if d.p is None else f"{d.p:.3f}" if d.p >= 0.001 else "<0.001"


def print_gate(judged: Sequence[Verdict], *, quiet: bool) -> None:
    """One line on stderr for each rule that does not hold; `quiet`: nothing else on stdout."""
    for verdict in judged:
        if not verdict.passed:
            print(f"penstock: gate: {verdict.why}", file=sys.stderr)
    if judged and not quiet and all(v.passed for v in judged):
        print(f"Gate: all {len(judged)} rules hold.")
