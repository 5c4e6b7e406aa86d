"""Numbers as Prometheus histograms want them, and the bounds that vLLM has for them. Units: seconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# fmt: off
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
          2560)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
          40, 80)
REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
            7680)
# fmt: on
SHARE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


class Distribution:
    """Counts of values up to each of `bounds`, as a Prometheus histogram wants them."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, tuple[str, float, float]] = {}
        """By bucket: a trace, its value and its time since 1970, of one that was observed lately."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def exemplify(self, value: float, trace_id: str, unix_s: float) -> None:
        """Name a trace for the bucket of `value`, which was observed."""
        self.exemplars[bisect_left(self.bounds, value)] = (trace_id, value, unix_s)

    @property
    def num(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), "+Inf" last."""
        found, so_far = [], 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found


def steps(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    found = [m * 10.0**e for e in range(len(str(max(1, largest)))) for m in (1, 2, 5)]
    return tuple(v for v in found if v <= largest) or (1.0,)
