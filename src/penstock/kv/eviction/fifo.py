"""First in, first out: the cheapest order, and the baseline that LRU has to beat."""

from __future__ import annotations

from typing import Any


class FIFO:
    """Orders entries by the tick at which they were inserted; hits change nothing."""

    name = "fifo"
    request_priority = 0

    def on_insert(self, entry: Any, tick: int) -> None:
        entry.tick = tick

    def on_hit(self, entry: Any, tick: int) -> None:
        pass

    def key(self, entry: Any) -> int:
        return int(entry.tick)
