"""What a stretch of time went to, part by part: the start of an engine, told to whoever waits for it."""

from __future__ import annotations

import os
import time


class Spans:
    """Parts that follow each other without gaps.

    Attributes:
        parts: (name, seconds), in order. `began_s`: when the first one began, on the monotonic clock.
    """

    def __init__(self, began_s: float | None = None) -> None:
        self.began_s = self._last_s = time.monotonic() if began_s is None else began_s
        self.parts: list[tuple[str, float]] = []

    def end(self, name: str) -> None:
        """What has passed since the last part was `name`'s."""
        now = time.monotonic()
        self.parts.append((name, now - self._last_s))
        self._last_s = now

    @property
    def total_s(self) -> float:
        return self._last_s - self.began_s


def process_began_s() -> float:
    """When this process was made, on the monotonic clock (to a hundredth of a second, as Linux counts); now, where the
    system does not say."""
    now = time.monotonic()
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError, IndexError):
        return now


def told(parts: list[tuple[str, float]]) -> str:
    """In one line: `imports 0.31 s, weights 0.10 s`."""
    return ", ".join(f"{name} {took_s:.2f} s" for name, took_s in parts)
