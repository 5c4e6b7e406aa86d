"""The highest rate at which something holds, and whether a queue grows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
FASTEST = 2.0**20


class NoLimitError(Exception):
    """It holds at any rate that was tried."""


def highest(keeps: Callable[[float], bool], *, start: float = 1.0, tolerance: float = 0.02) -> float | None:
    """By doubling from `start`, then by halving intervals until they are `tolerance` of themselves wide.

    None if `keeps` is false even at a 2^20th of `start`. Raises NoLimitError if it is true at 2^20 times as much.
    """
    low, high = 0.0, start
    if keeps(start):
        low = start
        while keeps(2 * low):
            low *= 2
            if low > FASTEST * start:
                raise NoLimitError
        high = 2 * low
    else:
        low = start / 2
        while not keeps(low):
            high, low = low, low / 2
            if low < start / FASTEST:
                return None
    while high - low > tolerance * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def backlog_growth(arrival_s: Floats, finish_s: Floats) -> float:
    """What share of the requests that arrive stays behind: 0 at rest, 1 - capacity / rate in an overload.

    The slope of the number of requests in the system over the second half of the arrivals (least squares), times that
    half's length, over its arrivals. NaN in `finish_s`: never finished. 0 for fewer than eight arrivals.
    """
    arrival_s = np.sort(arrival_s)
    half = arrival_s[len(arrival_s) // 2 :]
    span_s = float(half[-1] - half[0]) if len(half) else 0.0
    if len(arrival_s) < 8 or span_s <= 0:
        return 0.0
    ended = np.sort(np.where(np.isnan(finish_s), np.inf, finish_s))
    inside = np.arange(len(arrival_s) // 2, len(arrival_s)) + 1 - np.searchsorted(ended, half, side="right")
    slope = float(np.polyfit(half - half[0], inside.astype(np.float64), 1)[0])
    return slope * span_s / len(half)
