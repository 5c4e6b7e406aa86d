"""What happened over time in bounded memory: equal buckets that double in width when time runs past the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Series:
    """Bucket k is the time [k, k + 1) * `width_s` from the start.

    levels [buckets, levels]: time-weighted means (of the covered part of a bucket). counts [buckets, counters]: sums.
    """

    width_s: float
    levels: npt.NDArray[np.float64]
    counts: npt.NDArray[np.float64]


class Timeline:
    """Accumulates levels (true over an interval) and counts (at a moment). Units: seconds from the start."""

    def __init__(self, num_levels: int, num_counts: int, *, num_buckets: int = 512, width_s: float = 1 / 64) -> None:
        assert num_buckets % 2 == 0
        self.width_s = width_s
        self._num_buckets = num_buckets
        self._levels = [[0.0] * (num_levels + 1) for _ in range(num_buckets)]  # the last column: time covered
        self._counts = [[0.0] * num_counts for _ in range(num_buckets)]
        self._used = 0

    def level(self, start_s: float, end_s: float, values: Sequence[float]) -> None:
        """`values` held from `start_s` to `end_s`. Mutates only the timeline."""
        if end_s <= start_s:
            return
        last = self._bucket(end_s)
        first = int(start_s / self.width_s)
        for bucket in range(first, last + 1):
            width = self.width_s
            covered = (
                min(end_s, (bucket + 1) * width) - max(start_s, bucket * width) if first != last else end_s - start_s
            )
            if covered <= 0:
                continue
            sums = self._levels[bucket]
            for i, value in enumerate(values):
                sums[i] += value * covered
            sums[-1] += covered

    def count(self, time_s: float, values: Sequence[float]) -> None:
        """Add `values` to the counters at `time_s`."""
        sums = self._counts[self._bucket(time_s)]
        for i, value in enumerate(values):
            sums[i] += value

    def _bucket(self, time_s: float) -> int:
        bucket = int(time_s / self.width_s)
        while bucket >= self._num_buckets:
            self._halve(self._levels)
            self._halve(self._counts)
            self.width_s *= 2
            self._used = (self._used + 1) // 2
            bucket = int(time_s / self.width_s)
        self._used = max(self._used, bucket + 1)
        return bucket

    def _halve(self, rows: list[list[float]]) -> None:
        half = self._num_buckets // 2
        for k in range(half):
            rows[k] = [a + b for a, b in zip(rows[2 * k], rows[2 * k + 1], strict=True)]
        for k in range(half, self._num_buckets):
            rows[k] = [0.0] * len(rows[k])

    def mean_levels(self) -> list[float]:
        """Time-weighted means over everything covered."""
        total = [sum(column) for column in zip(*self._levels, strict=True)]
        return [value / total[-1] if total[-1] else 0.0 for value in total[:-1]]

    def series(self) -> Series:
        levels = np.array(self._levels)[: self._used]
        covered = levels[:, -1:]
        means = np.divide(levels[:, :-1], covered, out=np.zeros_like(levels[:, :-1]), where=covered > 0)
        return Series(self.width_s, means, np.array(self._counts)[: self._used])
