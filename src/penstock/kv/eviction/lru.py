"""Least recently used goes first. Source: SGLang, arXiv 2312.07104, section 3 (leaf LRU)."""

from __future__ import annotations

from typing import Any


class LRU:
    """Orders entries by the tick of their last use."""

    name = "lru"
    request_priority = 0

    def on_insert(self, entry: Any, tick: int) -> None:
        entry.tick = tick

    def on_hit(self, entry: Any, tick: int) -> None:
        entry.tick = tick

    def key(self, entry: Any) -> int:
        return int(entry.tick)
