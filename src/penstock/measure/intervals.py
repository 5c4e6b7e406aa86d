"""Intervals of ratios over a handful of paired rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
# Student's t, two-sided 95 %, for 1 ... 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def ratio_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, Interval | None]:
    """Gain of pairs where less is better (times): the geometric mean of before / after, minus 1, and its interval.

    Student's t over the logarithms: a handful of rounds is too few to draw from. Needs equal lengths; None for fewer
    than two pairs.
    """
    logs = np.log(np.asarray(before, np.float64) / np.asarray(after, np.float64))
    mean, n = float(logs.mean()), len(logs)
    if n < 2:
        return math.expm1(mean), None
    half = (_T[n - 2] if n - 2 < len(_T) else 1.96) * float(logs.std(ddof=1)) / math.sqrt(n)
    return math.expm1(mean), (math.expm1(mean - half), math.expm1(mean + half))
