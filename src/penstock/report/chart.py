"""Small charts as SVG text: lines and stacked areas, styled by the page's classes c0 ... c7 and a0 ... a5."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 400, 236
_RIGHT, _TOP, _BOTTOM = 12, 20, 24
_CHAR = 6.6  # about the width of a letter of a label
_LINE_STYLES = 8

Format = Callable[[float], str]


def number(value: float) -> str:
    """Three significant digits with k, M, G: 1.25k, 40, 0.5."""
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{_three(value / unit)}{name}"
    return _three(value)


def seconds(value: float) -> str:
    """A duration for people: 250 µs, 12 ms, 1.5 s, 3.2 min, 2 h."""
    size = abs(value)
    if size == 0:
        return "0 s"
    for limit, unit, name in ((1e-3, 1e-6, "µs"), (0.9995, 1e-3, "ms"), (120, 1.0, "s"), (7200, 60.0, "min")):
        if size < limit:
            return f"{_three(value / unit)} {name}"
    return f"{_three(value / 3600)} h"


def percent(value: float) -> str:
    return f"{_three(value * 100)} %"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def linear_ticks(low: float, high: float, n: int = 5) -> list[float]:
    """About `n` round numbers (1, 2, 2.5 or 5 times a power of ten) within [low, high]."""
    raw = (high - low) / max(1, n)
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Durations within [low, high] that are round for people: decades up to 10 s, then minutes and hours; with steps
    between them if there would be fewer than three.
    """
    wholes = [10.0**d for d in range(-9, 2)]
    longer = {
        1: (60.0, 600.0, 3600.0, 36000.0),
        2: (60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 18000.0, 36000.0),
    }
    ticks: list[float] = []
    for factors, long in (((1,), longer[1]), ((1, 3), longer[2]), ((1, 2, 5), longer[2])):
        every = sorted(
            {*(m * w for w in wholes for m in factors if m * w < 60), *long, *(36e4 * 10**k for k in range(9))}
        )
        ticks = [v for v in every if low * 0.999 <= v <= high * 1.001]
        if len(ticks) >= 3:
            break
    return ticks[:: 1 + len(ticks) // 7]


@dataclass(frozen=True)
class Line:
    """`style` counts the runs. `dots`: marked points (x, y, text beside them)."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: int = 0
    dots: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True)
class Area:
    """One layer of a stack: heights, not sums. `style` picks the fill."""

    label: str
    ys: Sequence[float]
    style: int


@dataclass
class Chart:
    """`note` goes under the title. `areas` are stacked over the common `area_xs`. `marks`: vertical lines."""

    title: str
    x_format: Format = number
    y_format: Format = number
    log_x: bool = False
    y_max: float | None = None
    lines: list[Line] = field(default_factory=list)
    area_xs: Sequence[float] = ()
    areas: list[Area] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    note: str = ""
    tick_unit: float = 1.0
    """What round numbers on the x axis are round in (60 for minutes)."""
    _left: int = 46

    def svg(self) -> str:
        """The drawing, without title and legend."""
        low, high, top = self._ranges()
        y_ticks = self._y_ticks(top)
        self._left = 10 + round(_CHAR * max(len(self.y_format(v)) for v in y_ticks))
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title, quote=True)}">',
            f"<title>{escape(self.title)}</title>",
        ]
        x, y = self._x_scale(low, high), self._y_scale(top)
        parts += self._grid(low, high, y_ticks, x, y)
        parts += self._stack(x, y)
        for at, text in self.marks:
            if low <= at <= high:
                parts.append(
                    f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
                )
                parts.append(
                    f'<text class="small" x="{_within(x(at), text):.1f}" y="{_TOP - 6}" text-anchor="middle">'
                    f"{escape(text)}</text>"
                )
        for line in self.lines:
            parts += self._line(line, low, high, x, y)
        parts.append("</svg>")
        return "".join(parts)

    def _ranges(self) -> tuple[float, float, float]:
        xs = [v for line in self.lines for v in line.xs] + list(self.area_xs)
        if not xs:
            return (1.0, 10.0, 1.0) if self.log_x else (0.0, 1.0, 1.0)
        low, high = min(xs), max(xs)
        if self.log_x:
            low = max(low, high * 1e-7, 1e-9)
            high = max(high, low * 1.5)
        elif high <= low:
            high = low + 1.0
        stacked = [sum(area.ys[k] for area in self.areas) for k in range(len(self.area_xs))] if self.areas else []
        peak = max([v for line in self.lines for v in line.ys] + stacked, default=0.0)
        top = self.y_max if self.y_max is not None else (peak * 1.06 or 1.0)
        return low, high, top

    def _x_scale(self, low: float, high: float) -> Callable[[float], float]:
        width = WIDTH - self._left - _RIGHT
        if self.log_x:
            base, span = math.log10(low), math.log10(high) - math.log10(low)
            return lambda v: self._left + width * (math.log10(max(v, low)) - base) / span
        return lambda v: self._left + width * (v - low) / (high - low)

    @staticmethod
    def _y_scale(top: float) -> Callable[[float], float]:
        height = HEIGHT - _TOP - _BOTTOM
        return lambda v: _TOP + height * (1 - min(v, top) / top)

    def _y_ticks(self, top: float) -> list[float]:
        unit = (3600.0 if top > 7200 else 60.0 if top > 120 else 1.0) if self.y_format is seconds else 1.0
        return [v * unit for v in linear_ticks(0.0, top / unit, 4)]

    def _grid(
        self, low: float, high: float, y_ticks: list[float], x: Callable[[float], float], y: Callable[[float], float]
    ) -> list[str]:
        out = []
        for v in y_ticks:
            out.append(f'<line class="grid" x1="{self._left}" x2="{WIDTH - _RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>')
            out.append(
                f'<text x="{self._left - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{escape(self.y_format(v))}</text>'
            )
        unit = self.tick_unit
        ticks = log_ticks(low, high) if self.log_x else [v * unit for v in linear_ticks(low / unit, high / unit, 5)]
        bottom = HEIGHT - _BOTTOM
        for v in ticks:
            out.append(f'<line class="grid" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{_TOP}" y2="{bottom}"/>')
            text = self.x_format(v)
            out.append(
                f'<text x="{_within(x(v), text):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(text)}</text>'
            )
        out.append(f'<line class="axis" x1="{self._left}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        return out

    def _stack(self, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
        out = []
        below = [0.0] * len(self.area_xs)
        for area in self.areas:
            above = [a + b for a, b in zip(below, area.ys, strict=True)]
            there = [f"{x(v):.1f},{y(h):.1f}" for v, h in zip(self.area_xs, above, strict=True)]
            back = [f"{x(v):.1f},{y(h):.1f}" for v, h in zip(self.area_xs, below, strict=True)]
            out.append(f'<polygon class="a{area.style}" points="{" ".join(there + back[::-1])}"/>')
            below = above
        return out

    def _line(
        self, line: Line, low: float, high: float, x: Callable[[float], float], y: Callable[[float], float]
    ) -> list[str]:
        style = line.style % _LINE_STYLES
        points = " ".join(
            f"{x(v):.1f},{y(h):.1f}" for v, h in zip(line.xs, line.ys, strict=True) if low * 0.999999 <= v or self.log_x
        )
        out = [f'<polyline class="line c{style}" points="{points}"><title>{escape(line.label)}</title></polyline>']
        for at, height, text in line.dots:
            out.append(f'<circle class="dot c{style}" cx="{x(at):.1f}" cy="{y(height):.1f}" r="3.5"/>')
            if text:
                # Right below and left above a cumulative curve there is room.
                if x(at) + 7 + 1.12 * _CHAR * len(text) < WIDTH:
                    place = f'x="{x(at) + 7:.1f}" y="{y(height) + 16:.1f}"'
                else:
                    place = f'x="{x(at) - 7:.1f}" y="{y(height) - 6:.1f}" text-anchor="end"'
                out.append(f'<text class="label" {place}>{escape(text)}</text>')
        return out


def _within(x: float, text: str) -> float:
    """The middle of a text that is to stand at x, moved so that none of it is outside."""
    half = len(text) * _CHAR / 2
    return min(max(x, half), WIDTH - 1 - half)
