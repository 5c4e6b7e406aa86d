"""How often an engine has died lately, and what that means for the next one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

_BACKOFF_S = (0.0, 0.1, 0.3, 1.0, 3.0)
_MINUTE_S = 60.0


class Crashes:
    """Of one link's engines. Those that a guilty request explains do not count. `most`: one more within a minute is too
    many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: deque[tuple[float, int]] = deque()
        """(when, which engine)"""

    def add(self, engine: int, explained: Collection[int]) -> None:
        """Engine number `engine` has died now. `explained`: those that are somebody's fault, by number."""
        now = time.monotonic()
        crashes = [*self._recent, (now, engine)]
        self._recent = deque(c for c in crashes if c[0] >= now - _MINUTE_S and c[1] not in explained)

    @property
    def too_many(self) -> bool:
        return len(self._recent) > self._most

    @property
    def pause_s(self) -> float:
        """Before the next one is started."""
        return _BACKOFF_S[min(max(1, len(self._recent)), len(_BACKOFF_S)) - 1]
