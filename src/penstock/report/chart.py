"""Small charts: lines and stacked areas as SVG, styled by the page's classes c0 ... c7 and a0 ... a5."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.report.numbers import number, seconds
from penstock.report.page import render

WIDTH, HEIGHT = 400, 236
_RIGHT, _TOP, _BOTTOM = 12, 20, 24
_CHAR = 6.6  # about the width of a letter of a label
_LINE_STYLES = 8

Format = Callable[[float], str]
Scale = Callable[[float], float]


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


class Key(NamedTuple):
    """An entry of a legend."""

    label: str
    style: int
    area: bool = False


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

    @property
    def key(self) -> list[Key]:
        """What its colours mean; nothing if there is but one."""
        if self.areas:
            return [Key(area.label, area.style, True) for area in self.areas]
        styles = {line.label: line.style % _LINE_STYLES for line in self.lines if line.label}
        return [Key(*entry) for entry in styles.items()] if len(styles) > 1 else []

    def svg(self) -> str:
        """The drawing, without title and legend."""
        low, high, top = self._ranges()
        unit = (3600.0 if top > 7200 else 60.0 if top > 120 else 1.0) if self.y_format is seconds else 1.0
        y_ticks = [v * unit for v in linear_ticks(0.0, top / unit, 4)]
        self._left = 10 + round(_CHAR * max(len(self.y_format(v)) for v in y_ticks))
        x, y = self._x_scale(low, high), self._y_scale(top)
        unit = self.tick_unit
        x_ticks = log_ticks(low, high) if self.log_x else [v * unit for v in linear_ticks(low / unit, high / unit, 5)]
        return render(
            "chart.svg", title=self.title, width=WIDTH, height=HEIGHT, left=self._left, right=WIDTH - _RIGHT, top=_TOP,
            bottom=HEIGHT - _BOTTOM, rows=[(y(v), self.y_format(v)) for v in y_ticks],
            columns=[_placed(x(v), self.x_format(v)) for v in x_ticks], areas=self._stack(x, y),
            marks=[_placed(x(v), text) for v, text in self.marks if low <= v <= high],
            lines=[self._line(line, low, x, y) for line in self.lines],
        )  # fmt: skip

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

    def _x_scale(self, low: float, high: float) -> Scale:
        width = WIDTH - self._left - _RIGHT
        if self.log_x:
            base, span = math.log10(low), math.log10(high) - math.log10(low)
            return lambda v: self._left + width * (math.log10(max(v, low)) - base) / span
        return lambda v: self._left + width * (v - low) / (high - low)

    @staticmethod
    def _y_scale(top: float) -> Scale:
        height = HEIGHT - _TOP - _BOTTOM
        return lambda v: _TOP + height * (1 - min(v, top) / top)

    def _stack(self, x: Scale, y: Scale) -> list[tuple[int, str]]:
        """(style, points) of each area."""
        out = []
        below = [0.0] * len(self.area_xs)
        for area in self.areas:
            above = [a + b for a, b in zip(below, area.ys, strict=True)]
            there, back = ([(x(v), y(h)) for v, h in zip(self.area_xs, hs, strict=True)] for hs in (above, below))
            out.append((area.style, points(there + back[::-1])))
            below = above
        return out

    def _line(self, line: Line, low: float, x: Scale, y: Scale) -> dict[str, object]:
        shown = [(x(v), y(h)) for v, h in zip(line.xs, line.ys, strict=True) if low * 0.999999 <= v or self.log_x]
        # Right below and left above a cumulative curve there is room.
        dots = [
            (x(at), y(height), text, x(at) + 7 + 1.12 * _CHAR * len(text) < WIDTH) for at, height, text in line.dots
        ]
        return {"label": line.label, "style": line.style % _LINE_STYLES, "points": points(shown), "dots": dots}


def points(pairs: Iterable[tuple[float, float]]) -> str:
    """As SVG has them: "x,y x,y"."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _placed(x: float, text: str) -> tuple[float, float, str]:
    """x, and the middle of a text that is to stand there, moved so that none of it is outside."""
    half = len(text) * _CHAR / 2
    return x, min(max(x, half), WIDTH - 1 - half), text
