"""Pulse: whether an engine process moves, seen from outside, and for how long it has not although it could have.

What counts is the time in which the process could have run. Time in which it was stopped does not count, nor time
that it waited for a processor (the kernel's own figure), nor time in which whoever looks could not run either: a
machine that slept, a container that was frozen.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.engine.blackbox import BlackBox


class Pulse:
    """`look` is to be called every `every_s` seconds or so; a gap of more than twice that counts as twice."""

    def __init__(self, box: BlackBox, pid: int, every_s: float) -> None:
        self._box = box
        self._proc = Path(f"/proc/{pid}")
        self._every_s = every_s
        self._looked_s = time.monotonic()
        self._signs: tuple[int, ...] = ()
        self._waited_s = 0.0
        self._progress = box.signs[1]
        self._progress_s = -math.inf
        self.silent_s = 0.0

    def look(self) -> float:
        """Seconds of silence so far."""
        now_s, signs, waited_s = time.monotonic(), self._read_signs(), self._read_waited_s()
        passed_s = min(now_s - self._looked_s, 2 * self._every_s) - (waited_s - self._waited_s)
        self._looked_s, self._waited_s = now_s, waited_s
        if signs != self._signs:
            self._signs, self.silent_s = signs, 0.0
        elif not self.is_stopped():
            self.silent_s = max(0.0, self.silent_s + passed_s)
        return self.silent_s

    def age_s(self) -> float:
        """Seconds since it moved, by the clock; 0 before it has been loaded. What /ready goes by."""
        beat, progress = self._box.signs
        now_s = time.monotonic()
        if progress != self._progress:
            self._progress, self._progress_s = progress, now_s
        return min(self._box.age_s(), now_s - self._progress_s) if beat else 0.0

    def is_stopped(self) -> bool:
        """Somebody has stopped it (SIGSTOP, a debugger): it will go on when they want."""
        return self._stat()[:1] in (["T"], ["t"])

    def _read_signs(self) -> tuple[int, ...]:
        signs = self._box.signs
        if signs[0]:
            return signs
        # It is being loaded: reading files and packing weights take processor time, whatever part of us they are in.
        stat = self._stat()
        # A rank in a process of its own counts for itself.
        return (*signs, int(stat[11]) + int(stat[12])) if len(stat) > 12 else signs

    def _stat(self) -> list[str]:
        """From the state on; [] where there is no such file."""
        try:
            return (self._proc / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        except OSError:
            return []

    def _read_waited_s(self) -> float:
        """Seconds that its main thread, the one that runs steps, has waited for a processor."""
        try:
            return int((self._proc / "schedstat").read_text("ascii").split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0
