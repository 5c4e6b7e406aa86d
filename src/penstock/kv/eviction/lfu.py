"""Least frequently used goes first, where old uses count less and less, so that what was hot once does not stay.

Every use adds 1 to an entry's score and all scores halve every `half_life` ticks. Then the order of two untouched
entries never changes, so an entry needs one number, written at its last use: log2 of the sum over its uses of
2 ** (tick of the use / half_life). Ageing costs nothing and happens to all at once.
Source: LRFU, IEEE Transactions on Computers 50(12), 2001, section 2 (combined recency and frequency; LRU and LFU are
its limits).
"""

from __future__ import annotations

from math import exp2, log2
from typing import Any

HALF_LIFE = 256
"""Ticks. A tick is an operation of the cache; a request that finds its prompt there makes about three."""


class LFU:
    """Orders entries by their decayed number of uses.

    Finding an entry and leaving it count as one use each, so all counts are about double. An entry that a radix tree
    splits hands its score to both halves.
    """

    name = "lfu"
    request_priority = 0

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life

    def on_insert(self, entry: Any, tick: int) -> None:
        entry.tick = tick / self._half_life

    def on_hit(self, entry: Any, tick: int) -> None:
        use = tick / self._half_life
        # log2(2 ** score + 2 ** use), without large powers; after about 60 half-lives the past is lost in rounding.
        score = max(entry.tick, use)
        entry.tick = score + log2(1.0 + exp2(min(entry.tick, use) - score))

    def key(self, entry: Any) -> float:
        return float(entry.tick)
