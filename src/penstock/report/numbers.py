"""Numbers for people: durations, shares and sizes in units that fit them."""

from __future__ import annotations

import math


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


def size(num_bytes: float) -> str:
    """4.5 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
