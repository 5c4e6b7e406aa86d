"""Keeps what matters longer: an entry that was used again, or by an important request, is retained for extra ticks.

An entry counts as last used `RETAIN_USE` ticks later per doubling of its uses (at most `MAX_DOUBLINGS`), and
`RETAIN_LEVEL` ticks later (earlier) per level that the best request that used it stands above (below) priority 0. So
rank buys time, not a place for ever: what nobody uses any more goes, however important it was, and a scan of one-time
prompts cannot drive out what is shared.

Entries know nothing of requests. Whoever owns the cache may set `request_priority` (smaller is more important, as in
`Request.priority`) before it finds, inserts or leaves entries for a request; unset, uses and recency decide alone.
Sources: segmented LRU, IEEE Computer 27(3), 1994 (reused entries outlive one-time ones); TensorRT-LLM's KV retention
(priority with a duration).
"""

from __future__ import annotations

from typing import Any

RETAIN_USE = 64
RETAIN_LEVEL = 512
MAX_DOUBLINGS = 6
MAX_LEVELS = 8


class Priority:
    """Orders entries by the tick of their last use plus the ticks for which they are retained.

    `entry.tick` holds (last tick, uses, best request priority). Finding and leaving an entry count as one use each.
    """

    name = "priority"

    def __init__(self) -> None:
        self.request_priority = 0

    def on_insert(self, entry: Any, tick: int) -> None:
        entry.tick = (tick, 1, self.request_priority)

    def on_hit(self, entry: Any, tick: int) -> None:
        state = entry.tick
        if isinstance(state, tuple):
            _, uses, best = state
            entry.tick = (tick, uses + 1, min(best, self.request_priority))
        else:  # a root: it is used, never inserted, never evicted
            self.on_insert(entry, tick)

    def key(self, entry: Any) -> int:
        last, uses, best = entry.tick
        doublings = min(uses.bit_length() - 1, MAX_DOUBLINGS)
        levels = max(-MAX_LEVELS, min(-best, MAX_LEVELS))
        return int(last + RETAIN_USE * doublings + RETAIN_LEVEL * levels)
