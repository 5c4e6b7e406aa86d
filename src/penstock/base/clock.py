"""Where time comes from. Nothing else in Penstock calls `time.*`, so that a simulated clock can take its place."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of the current time. Units: seconds since an arbitrary fixed point."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()
