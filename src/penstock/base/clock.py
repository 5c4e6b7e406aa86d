"""Where time comes from. Nothing else in Penstock calls `time.*`, so that a simulated clock can take its place."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of the current time. Units: seconds since an arbitrary fixed point."""

    def now(self) -> float: ...

    def wait_until(self, time_s: float) -> None:
        """Let time pass until `time_s`; at once if it has passed."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - time.perf_counter()))


class VirtualClock:
    """Time that stands still until somebody moves it. Simulations run on it at the speed of their arithmetic."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on by `seconds` >= 0."""
        assert seconds >= 0, f"time would run backwards by {-seconds} s"
        self._now_s += seconds

    def wait_until(self, time_s: float) -> None:
        self.advance_to(time_s)

    def advance_to(self, time_s: float) -> None:
        """Move on to `time_s`; a time that has passed changes nothing."""
        self._now_s = max(self._now_s, time_s)
