"""How much of a machine's processor time its host gave to others meanwhile: measurements in such moments say little."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 7
"""Field of the first line of /proc/stat: proc(5)."""


class StolenTime:
    """From its making on. Only a virtual machine under Linux knows; elsewhere nothing is stolen."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._began, self._began_s = self._ticks(), time.perf_counter()

    def share(self) -> float:
        """Of all processors' time since then, 0 to 1."""
        seconds = (self._ticks() - self._began) / os.sysconf("SC_CLK_TCK")
        spent_s = (time.perf_counter() - self._began_s) * (os.cpu_count() or 1)
        return min(1.0, seconds / spent_s) if spent_s > 0 else 0.0

    def _ticks(self) -> int:
        try:
            return int(self._stat.read_text().split("\n", 1)[0].split()[1 + _STEAL])
        except (OSError, IndexError, ValueError):
            return 0
