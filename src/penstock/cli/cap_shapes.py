"""The drawings of a CAP board that are not charts: a triangle per configuration, and the legend of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.eval.cap.report import Row
    from penstock.eval.cap.verdict import Measure

_R, _X, _Y = 92.0, 150.0, 122.0
_ANGLES = {"A": -90.0, "C": 150.0, "P": 30.0}
_TWICE = 2.0
_SHOWN = {"C": "longest context", "A": "mean score of the tasks", "P": "throughput in the memory"}
"""The measure that stands for its axis in a triangle, unless another one decided what is said of the axis."""


def shown(row: Row, axis: str) -> Measure | None:
    """The measure at a corner: a triangle must not show a throughput that is as before where memory was improved."""
    usual = next((m for m in row.measures if m.name == _SHOWN[axis]), None)
    word = None if row.verdict is None else row.verdict.words[axis]
    if word not in ("improved", "worse") or (usual is not None and usual.word == word):
        return usual
    return next((m for m in row.measures if m.axis == axis and m.word == word), usual)


def triangle(row: Row, plain: Row) -> str:
    """C, A and P over the plain configuration's, with intervals along the axes."""
    points, spans, tips = [], [], []
    for axis in _ANGLES:
        measure = shown(row, axis)
        ratio = _ratio(measure)
        at = _at(axis, ratio)
        points.append(at)
        if measure is not None and measure.low is not None and measure.high is not None and measure.low < measure.high:
            ends = [_at(axis, _of(measure, gain)) for gain in (measure.low, measure.high)]
            spans.append(_line("sure", *ends))
        told = row.verdict is None or row.verdict.words[axis] not in ("not shown", "mixed")
        tips.append(f'<circle class="tip{"" if told else " open"}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3.5"/>')
    label = f"C, A and P of {row.name} over {plain.name}"
    body = [_polygon("ring", [_at(axis, r) for axis in _ANGLES]) for r in (0.5, 1.5, 2.0)]
    body += [_line("spoke", (_X, _Y), _at(axis, _TWICE)) for axis in _ANGLES]
    body += [_polygon("shape", points), *spans, _polygon("plain", [_at(axis, 1.0) for axis in _ANGLES]), *tips]
    body += [_text(axis, shown(row, axis), row) for axis in _ANGLES]
    said = "" if row.verdict is None else f"declared {row.verdict.declared or 'nothing'}: {row.verdict.label}"
    return (
        f"<figure><figcaption><h3>{escape(row.name)}</h3><span>{escape(said)}</span></figcaption>"
        f'<svg viewBox="-6 -8 312 228" role="img" aria-label="{escape(label, quote=True)}">{"".join(body)}</svg>'
        "</figure>"
    )


def _ratio(measure: Measure | None) -> float:
    return 1.0 if measure is None else _of(measure, measure.gain)


def _of(measure: Measure, gain: float) -> float:
    """A gain as a ratio; of scores it is a difference."""
    if measure.unit == "share":
        return 1 + gain / measure.before if measure.before else 1.0
    return 1 + gain


def _at(axis: str, ratio: float) -> tuple[float, float]:
    angle, r = math.radians(_ANGLES[axis]), _R * min(_TWICE, max(0.0, ratio)) / _TWICE
    return _X + r * math.cos(angle), _Y + r * math.sin(angle)


def _text(axis: str, measure: Measure | None, row: Row) -> str:
    """The axis, its figure, the verdict on it in the table's words, and below what the figure is of."""
    x, y = _at(axis, _TWICE)
    dy = -21.0 if axis == "A" else 18.0
    said = axis if measure is None else f"{axis} x{_ratio(measure):.2f}"
    said += "" if row.verdict is None else f", {row.verdict.words[axis]}"
    name = "" if measure is None else measure.name
    return "".join(
        f'<text class="{kind}" x="{x:.1f}" y="{at:.1f}" text-anchor="middle">{escape(line)}</text>'
        for kind, at, line in (("label", y + dy, said), ("of", y + dy + 13, name))
    )


def _line(kind: str, a: tuple[float, float], b: tuple[float, float]) -> str:
    return f'<line class="{kind}" x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}"/>'


def _polygon(kind: str, points: Sequence[tuple[float, float]]) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon class="{kind}" points="{joined}"/>'


def legend(names: Sequence[str]) -> str:
    """Lines as the charts draw them, by name."""
    items = "".join(
        f'<li><svg viewBox="0 0 26 10" aria-hidden="true"><line class="key c{i % 8}" x1="0" x2="26" y1="5" y2="5"/>'
        f"</svg>{escape(name)}</li>"
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'
