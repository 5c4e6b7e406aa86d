"""An evaluation as one page: figures with intervals, maps, curves, some wrong answers. No scripts, nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.eval_tables import ENDS, between, p_of, shown, signed, spread_of, tag_text, warned
from penstock.report.chart import Chart, Line
from penstock.report.numbers import percent
from penstock.report.page import Cell, part, render

if TYPE_CHECKING:
    from penstock.eval.gate import Verdict
    from penstock.eval.paired import Difference
    from penstock.eval.result import MetricValue, Result, TaskResult
    from penstock.eval.tasks.base import Tag

_WRONG = 5
_SAID = 400
Cells = Sequence[object]


def html_page(
    result: Result, changed: Sequence[Difference], judged: Sequence[Verdict], baseline: Result | None = None
) -> str:
    """One file. Texts of models and data sets may hold anything."""
    told = [f"{len(result.tasks)} tasks", f"examples of seed {result.seed}", "chat" if result.chat else "plain text"]
    told += [f"{name} {value}" for name, value in result.settings.items()]
    wrong = [(task.name, _wrong(task)) for task in result.tasks]
    calibrated = [(task, v.name) for task in result.tasks for v in task.values if v.kind == "calibration"]
    return render(
        "evaluation.html", title=f"Evaluation of {result.model}", about=", ".join(told),
        warnings=[f"{where}{w.task}: {w.why}" for where, w in warned(result, baseline)],
        judged=len(judged), broken=[v.why for v in judged if not v.passed],
        figures=[cells for task in result.tasks for cells in _figures(task)],
        answers_head=("task", "n", *(head for head, _ in ENDS)),
        answers=[(task.name, f"{task.answers.n:,}", *(f"{getattr(task.answers, field):.0%}" for _, field in ENDS))
                 for task in result.tasks if task.answers is not None],
        changed=[_changed(d) for d in changed], maps=[_map(task) for task in result.tasks if len(task.axes) == 2],
        curves=[*(_curve(task) for task in result.tasks if len(task.axes) == 1), *map(_reliability, calibrated)],
        wrong=[(name, rows) for name, rows in wrong if rows],
    )  # fmt: skip


def _figures(task: TaskResult) -> list[Cells]:
    left = f"{task.left_out} left out: longer than the context" if task.left_out else ""
    head = Cell(part("named", task.name, left), title=task.source)
    return [
        (head if i == 0 else "", v.name, shown(v.value, v.kind), between(v), f"{v.n:,}", Cell(_gauge(v), "gauge"))
        for i, v in enumerate(task.values)
    ]


def _gauge(v: MetricValue) -> str:
    """The value as a mark on its interval; nothing for what is no share."""
    return part("gauge", *(v.interval or (v.value, v.value)), v.value) if v.kind in ("rate", "mean") else ""


def _changed(d: Difference) -> Cells:
    kind = d.metric.kind
    return (
        d.task, d.metric.name, shown(d.before.value, kind), shown(d.metric.value, kind),
        Cell(signed(d.value, kind), "bad" if d.surely_worse_by > 0 else ""), spread_of(d), p_of(d),
    )  # fmt: skip


def _map(task: TaskResult) -> tuple[str, Cells, list[Cells]]:
    down, across = task.axes
    return f"{task.name}: {task.values[0].name}, {down} (down) by {across} (across)", *heat_map(task)


def heat_map(task: TaskResult, columns: Sequence[Tag] = ()) -> tuple[Cells, list[Cells]]:
    """Head and rows of a table: the headline metric by the task's two axes. `columns`: values of the second one, where
    they are to be the same on several maps."""
    from penstock.eval.result import grouped

    cells = grouped(task, task.values[0].name, task.axes)
    down = dict.fromkeys(key[0] for key in cells)
    across = list(columns) or sorted({key[1] for key in cells}, key=lambda tag: (isinstance(tag, str), tag))
    return (
        ["", *(tag_text(task.axes[1], tag) for tag in across)],
        [[tag_text(task.axes[0], row), *(_cell(cells.get((row, column))) for column in across)] for row in down],
    )


def _cell(v: MetricValue | None) -> object:
    """Red is 0 %, green 100 %; half transparent, so that it stands on a light and on a dark page."""
    if v is None:
        return ""
    hue = round(120 * min(1.0, max(0.0, v.value)))
    return Cell(f"{v.value:.0%}", "cell", f"{between(v)}, n {v.n}", f"background:hsl({hue} 70% 45% / 0.45)")


def _curve(task: TaskResult) -> tuple[Chart, list[Cells]]:
    """A line over numbers, with its interval as two thin ones; rows with bars over names."""
    from penstock.eval.result import grouped

    head, axis = task.values[0], task.axes[0]
    cells = {key[0]: value for key, value in grouped(task, head.name, [axis]).items()}
    x_format = percent if axis in ("position", "depth") else "{:g}".format
    chart = Chart(f"{task.name}: {head.name}", x_format=x_format, y_format=percent, y_max=1.0)
    chart.note = f"by {axis}; n {sum(v.n for v in cells.values())}"
    if any(isinstance(tag, str) for tag in cells) or len(cells) < 2:
        rows = ((str(tag), shown(v.value, v.kind), str(v.n), Cell(_gauge(v), "gauge")) for tag, v in cells.items())
        return chart, list(rows)
    xs, values = [float(tag) for tag in cells], list(cells.values())
    ends = [v.interval or (v.value, v.value) for v in values]
    chart.lines = [
        Line("95 %, low", xs, [low for low, _ in ends], 7), Line("95 %, high", xs, [high for _, high in ends], 7),
        Line(head.name, xs, [v.value for v in values], 0, [(x, v.value, "") for x, v in zip(xs, values, strict=True)]),
    ]  # fmt: skip
    chart.note += "; the outer lines are the interval of 95 %"
    return chart, []


def _reliability(calibrated: tuple[TaskResult, str]) -> tuple[Chart, list[Cells]]:
    """How often answers are right over how sure they are; the straight line is where both are the same."""
    from penstock.eval.calibration import reliability

    task, metric = calibrated
    bins = reliability([e.scores[metric] for e in task.examples])
    chart = Chart(f"{task.name}: right by how sure", x_format=percent, y_format=percent, y_max=1.0)
    xs, ys = [b.sure for b in bins], [b.right for b in bins]
    dots = [(b.sure, b.right, str(b.n)) for b in bins]
    chart.lines = [Line("as sure as right", [0.0, 1.0], [0.0, 1.0], 7), Line("right", xs, ys, 0, dots)]
    chart.note = f"expected calibration error {task.value(metric).value:.3f}; beside the points: how many answers"
    return chart, []


def _wrong(task: TaskResult) -> list[Cells]:
    """The first answers that missed the headline metric."""
    head = task.values[0]
    if task.kind != "generate" or head.kind not in ("rate", "mean"):
        return []
    missed = [e for e in task.examples if e.scores[head.name] < 0.5][:_WRONG]
    return [(e.expected[:_SAID], e.said[:_SAID]) for e in missed]
