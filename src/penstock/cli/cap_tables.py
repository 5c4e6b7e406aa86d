"""A CAP board for people in a terminal: figures, what the data say of each label, how it was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.report.numbers import size
from penstock.report.tables import table

if TYPE_CHECKING:
    from penstock.eval.cap.report import Report, Row
    from penstock.eval.cap.verdict import Measure

COLOURS = {"improved": "green", "worse": "red", "mixed": "yellow", "unchanged": "", "not shown": "dim"}


def figure(value: float, unit: str) -> str:
    """In its unit: ms for times, points for shares."""
    if unit == "s":
        return f"{1e3 * value:.3g} ms"
    if unit == "bytes":
        return size(value)
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:.4f}" if unit == "bits" else f"{value:,.0f}"


def gain(m: Measure) -> str:
    """`+12 % (8 to 16)`; of scores in points."""
    unit = " points" if m.unit == "share" else " %"
    text = f"{100 * m.gain:+.1f}{unit}"
    if m.low is None or m.high is None:
        return text
    return text if m.low == m.high else f"{text} ({100 * m.low:+.1f} to {100 * m.high:+.1f})"


def kl_text(row: Row) -> str:
    if row.kl is None:
        return "0, by definition"
    if row.kl.low is None or row.kl.high is None:
        return f"{row.kl.kl:.2g}"
    return f"{row.kl.kl:.2g} ({row.kl.low:.2g} to {row.kl.high:.2g})"


def context_text(row: Row) -> str:
    if row.context.longest == 0:
        return f"none (limit: {row.context.limited_by})"
    return f"{row.context.longest:,} (limit: {row.context.limited_by})"


def methods(report: Report) -> list[str]:
    """How KL was taken, one sentence per method."""
    found: dict[str, list[str]] = {}
    for row in report.rows:
        if row.kl is not None:
            found.setdefault(row.kl.method, []).append(row.name)
    return [f"KL of {', '.join(names)}: {method}." for method, names in found.items()]


def conditions_text(report: Report) -> str:
    said = [f"{k}: {', '.join(v) if isinstance(v, list) else v}" for k, v in report.conditions.items()]
    return "; ".join(said)


def machine_text(report: Report) -> str:
    m = report.machine
    return " ".join([f"{m['cores']} cores, {size(m['memory_bytes'])}, {m['arch']}", *m["flags"]])


BUSY = 0.1
"""Share of the processors' time for other programs from which on speeds are told to be doubtful."""


def rounds_text(report: Report) -> str:
    """How long speed was measured, and beside what; empty for reports that do not say."""
    r = report.rounds
    if r is None:
        return ""
    said = f"Speed: {r.number} rounds in {r.seconds:.0f} s; {r.why}."
    if r.busy is not None and r.busy > BUSY:
        said += (
            f" Other programs took {r.busy:.0%} of the processors' time meanwhile: measure on an idle machine before "
            "you rely on times."
        )
    return said


def trilemma_text(report: Report) -> str:
    """Whether any configuration improved all three."""
    judged = [row for row in report.rows if row.verdict is not None]
    broken = [row.name for row in judged if row.verdict is not None and not row.verdict.trilemma]
    if broken:
        return f"The trilemma did not hold here: all three axes improved with {', '.join(broken)}."
    return f"The trilemma held: none of {len(judged)} configurations improved all three axes."


def print_report(report: Report) -> None:
    from rich.console import Console

    console = Console()
    made = table(
        ("configuration", "C: tokens", "A: score", "bits/byte", "KL, nats", "TTFT", "TPOT", "tokens/s", "KV of one",
         "at once"), title=f"{report.model} in {size(report.kv_memory)} of KV memory",
    )  # fmt: skip
    for row in report.rows:
        p = row.performance
        made.add_row(
            row.name, f"{row.context.longest:,}", f"{row.score:.1%}" if row.tasks else "",
            f"{row.text.value('bits_per_byte').value:.4f}", "" if row.kl is None else f"{row.kl.kl:.2g}",
            figure(p.ttft_s, "s"), figure(p.tpot_s, "s"), f"{p.tokens_per_s:,.0f}", size(p.kv_end_bytes),
            str(p.peak_running),
        )  # fmt: skip
    console.print(made)
    judged = table(
        ("configuration", "declared", "C", "A", "P", "label", "why"), left=7, title="\nAgainst the plain one"
    )
    for row in report.rows:
        if row.verdict is not None:
            words = [f"[{COLOURS[w]}]{w}[/]" if COLOURS[w] else w for w in row.verdict.words.values()]
            judged.add_row(row.name, row.verdict.declared or "-", *words, row.verdict.label, row.verdict.said)
    console.print(judged)
    for row in report.rows[1:]:
        console.print(f"\n{row.name}", style="italic", highlight=False)
        detail = (
            (m.axis, m.name, figure(m.before, m.unit), figure(m.after, m.unit), gain(m), m.word) for m in row.measures
        )
        console.print(table(("",) * 6, detail, left=6, head=False))
        console.print(f"C stops at {context_text(row)}; KL {kl_text(row)}", style="dim", highlight=False)
    console.print(f"\n{trilemma_text(report)}")
    for line in (
        *methods(report),
        rounds_text(report),
        f"Conditions: {conditions_text(report)}.",
        f"Machine: {machine_text(report)}.",
    ):
        console.print(line, style="dim", highlight=False)
