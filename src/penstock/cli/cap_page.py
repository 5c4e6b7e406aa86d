"""A CAP board as one page: triangles, accuracy against memory, maps, verdicts. No scripts, nothing loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.cap_tables import (
    conditions_text,
    figure,
    gain,
    kl_text,
    machine_text,
    methods,
    rounds_text,
    trilemma_text,
)
from penstock.cli.eval_page import heat_map
from penstock.report.chart import Chart, Key, Line, points
from penstock.report.numbers import number, percent, size
from penstock.report.page import Cell, part, render

if TYPE_CHECKING:
    from penstock.eval.cap.report import Report, Row
    from penstock.eval.cap.verdict import Measure

Span = tuple[float, float, float]
"""A figure between the ends of its interval."""
_CLASSES = {"improved": "up", "worse": "down", "mixed": "both", "unchanged": "", "not shown": "soft"}

_R, _X, _Y = 92.0, 150.0, 122.0
_ANGLES = {"A": -90.0, "C": 150.0, "P": 30.0}
_TWICE = 2.0
_SHOWN = {"C": "longest context", "A": "mean score of the tasks", "P": "throughput in the memory"}
"""The measure that stands for its axis in a triangle, unless another one decided what is said of the axis."""


def html_page(report: Report) -> str:
    """One file."""
    judged = [row for row in report.rows if row.verdict is not None]
    tasks = ", ".join(task.name for task in report.plain.tasks) or "no task"
    context = report.plain.context.task
    mapped = len(context.axes) == 2
    return render(
        "cap.html", title=f"CAP board of {report.model}", trilemma=trilemma_text(report), command=report.command,
        about=f"{len(judged)} configurations beside the plain one, in {size(report.kv_memory)} of KV memory; accuracy "
        f"of {tasks}",
        verdicts=[_verdict(row) for row in judged], quality=[_quality(row) for row in report.rows],
        speeds=[_speed(row) for row in report.rows], batch=f"{_batch(report)} {rounds_text(report)}".strip(),
        triangles=[triangle(row, report.plain) for row in report.rows[1:]],
        configurations=[Key(row.name, i % 8) for i, row in enumerate(report.rows)],
        curves=[*_against_memory(report), _by_length(report)],
        maps=[(row.name, *_map(row, report.lengths)) for row in report.rows] if mapped else [],
        maps_title=f"{context.task}: {context.axes[0]} (down) by {context.axes[1]} (across)" if mapped else "",
        measures=[(row.name, _measures(row)) for row in judged],
        methods=[" ".join(methods(report)), f"{conditions_text(report)}.",
                 f"Machine: {machine_text(report)}. Penstock {report.version}."],
    )  # fmt: skip


def _verdict(row: Row) -> Sequence[object]:
    v = row.verdict
    assert v is not None
    declared = v.declared + (", exact" if v.exact and v.declared else "")
    label = Cell(v.label, {"confirmed": "up", "not confirmed": "down"}.get(v.label, ""))
    words = (Cell(word, _CLASSES[word]) for word in v.words.values())
    return row.name, Cell(declared or "nothing", title=v.why), *words, label, v.said


def _quality(row: Row) -> Sequence[str]:
    low_high = "" if row.score_low is None or row.score_high is None else f"{row.score_low:.1%} to {row.score_high:.1%}"
    return (
        row.name, f"{row.context.longest:,}", row.context.limited_by, f"{row.context.fits:,}",
        f"{row.score:.1%}" if row.tasks else "", low_high, f"{row.text.value('bits_per_byte').value:.4f}",
        "" if row.kl is None else kl_text(row), "" if row.kl is None else f"{row.kl.same_top:.1%}",
    )  # fmt: skip


def _speed(row: Row) -> Sequence[str]:
    p = row.performance
    return (
        row.name, figure(p.ttft_s, "s"), figure(p.tpot_s, "s"), f"{p.tokens_per_s:,.0f}", size(p.kv_prefill_bytes),
        size(p.kv_end_bytes), str(p.peak_running), str(p.preempted),
    )  # fmt: skip


def _batch(report: Report) -> str:
    c = report.conditions
    return (
        f"Medians of single requests of {c['input len']} + {c['output len']} tokens; tokens per second, prompts "
        f"included, of batches of {c['requests']} such requests in {size(report.kv_memory)} of KV memory. KV memory is "
        "read from the allocator."
    )


def _against_memory(report: Report) -> list[Chart]:
    """Score and KL over the KV memory that one request holds; what differs in its budget only is joined."""
    charts = []
    held = [float(row.performance.kv_end_bytes) for row in report.rows]
    if report.plain.tasks:
        spans = [_span(r.score_low, r.score, r.score_high) for r in report.rows]
        note = "mean score of the tasks; bars: 95 %"
        charts.append(_bars(note, held, spans, report, Chart("Score", x_format=size, y_format=percent, y_max=1.0)))
    kls = [_span(0.0, 0.0, 0.0) if r.kl is None else _span(r.kl.low, r.kl.kl, r.kl.high) for r in report.rows]
    note = "nats per token, less is better; bars: 95 %"
    chart = Chart("KL from the plain one", x_format=size, y_format=number)
    charts.append(_bars(note, held, kls, report, chart))
    return charts


def _span(low: float | None, value: float, high: float | None) -> Span:
    return (value if low is None else low), value, (value if high is None else high)


def _bars(note: str, xs: Sequence[float], spans: Sequence[Span], report: Report, chart: Chart) -> Chart:
    for family in _families(report):
        ordered = sorted(family, key=lambda i: xs[i])
        if len(ordered) > 1:
            chart.lines.append(Line("", [xs[i] for i in ordered], [spans[i][1] for i in ordered], 7))
    for i, (at, (low, value, high)) in enumerate(zip(xs, spans, strict=True)):
        x = at + (i - (len(xs) - 1) / 2) * 0.008 * max(xs)  # side by side, where several hold as much
        chart.lines.append(Line(report.rows[i].name, [x, x], [low, high], i, [(x, value, "")]))
    chart.area_xs = (0.0, 1.08 * max(xs))  # room on both sides of the outermost points
    chart.tick_unit = float(1 << 10 if max(xs) < 1 << 21 else 1 << 20)
    chart.note = f"over the KV memory of one request; {note}"
    return chart


def _families(report: Report) -> list[list[int]]:
    """Rows that differ in nothing but kv_budget."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(report.rows):
        if "kv_budget" in row.settings:
            rest = str(sorted((k, v) for k, v in row.settings.items() if k != "kv_budget"))
            found.setdefault(rest, []).append(i)
    return list(found.values())


def _by_length(report: Report) -> Chart:
    chart = Chart("By length", x_format="{:g}".format, y_format=percent, y_max=1.0)
    for i, row in enumerate(report.rows):
        there = [(float(at.length), at.value.value) for at in row.context.lengths if at.value is not None]
        if there:
            chart.lines.append(Line(row.name, [x for x, _ in there], [y for _, y in there], i,
                                    [(x, y, "") for x, y in there]))  # fmt: skip
    needed = report.plain.context.needed
    chart.lines.append(Line("needed", [report.lengths[0], report.lengths[-1]], [needed, needed], 7))
    task = report.plain.context.task.name
    chart.note = f"{task}; needed: {needed:.0%} (grey). A line ends where the memory does"
    return chart


def _map(row: Row, lengths: Sequence[int]) -> tuple[Sequence[object], Sequence[object]]:
    """Depth by length; nothing where nothing fits."""
    return heat_map(row.context.task, columns=lengths) if row.context.task.examples else ((), ())


def _measures(row: Row) -> list[Sequence[object]]:
    return [
        (m.axis, m.name, figure(m.before, m.unit), figure(m.after, m.unit), gain(m), Cell(m.word, _CLASSES[m.word]))
        for m in row.measures
    ]


def shown(row: Row, axis: str) -> Measure | None:
    """The measure at a corner: a triangle must not show a throughput that is as before where memory was improved."""
    usual = next((m for m in row.measures if m.name == _SHOWN[axis]), None)
    word = None if row.verdict is None else row.verdict.words[axis]
    if word not in ("improved", "worse") or (usual is not None and usual.word == word):
        return usual
    return next((m for m in row.measures if m.axis == axis and m.word == word), usual)


def triangle(row: Row, plain: Row) -> str:
    """C, A and P over the plain configuration's, with intervals along the axes, under the row's name."""
    corners, spans, tips, texts = [], [], [], []
    for axis in _ANGLES:
        measure, word = shown(row, axis), "" if row.verdict is None else row.verdict.words[axis]
        at = _at(axis, 1.0 if measure is None else _of(measure, measure.gain))
        corners.append(at)
        if measure is not None and measure.low is not None and measure.high is not None and measure.low < measure.high:
            spans.append(("sure", *(_at(axis, _of(measure, gain)) for gain in (measure.low, measure.high))))
        tips.append(("tip open" if word in ("not shown", "mixed") else "tip", *at))
        texts.append(_corner(axis, measure, word))
    drawn = render(
        "triangle.svg", label=f"C, A and P of {row.name} over {plain.name}", tips=tips, spans=spans, corners=texts,
        rings=[points(_at(axis, r) for axis in _ANGLES) for r in (0.5, 1.5, _TWICE)], shape=points(corners),
        lines=[("spoke", (_X, _Y), _at(axis, _TWICE)) for axis in _ANGLES],
        plain=points(_at(axis, 1.0) for axis in _ANGLES),
    )  # fmt: skip
    said = "" if row.verdict is None else f"declared {row.verdict.declared or 'nothing'}: {row.verdict.label}"
    return part("figure", row.name, said, drawn)


def _of(measure: Measure, gain: float) -> float:
    """A gain as a ratio; of scores it is a difference."""
    if measure.unit == "share":
        return 1 + gain / measure.before if measure.before else 1.0
    return 1 + gain


def _at(axis: str, ratio: float) -> tuple[float, float]:
    angle, r = math.radians(_ANGLES[axis]), _R * min(_TWICE, max(0.0, ratio)) / _TWICE
    return _X + r * math.cos(angle), _Y + r * math.sin(angle)


def _corner(axis: str, measure: Measure | None, word: str) -> tuple[float, float, str, str]:
    """Where a corner's text stands: the axis, its figure and the verdict on it, and what the figure is of."""
    x, y = _at(axis, _TWICE)
    said = axis if measure is None else f"{axis} x{_of(measure, measure.gain):.2f}"
    return x, y + (-21.0 if axis == "A" else 18.0), f"{said}, {word}" if word else said, measure.name if measure else ""
