"""Counters of the KV manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.kv.window_pool import WindowPool

if TYPE_CHECKING:
    from penstock.core.cache_spec import CacheGroup
    from penstock.core.protocols import PrefixCache
    from penstock.kv.block_pool import BlockPool


@dataclass(frozen=True)
class GroupStats:
    """Slabs of one cache group that are not kept back: total = free + used + evictable + quarantined.

    `evictable`: only the prefix cache has them, and it can give them up now. `used` includes broken slabs, and cached
    blocks that a running sequence (or a step in flight) stands on.
    """

    total: int
    free: int
    used: int
    evictable: int
    quarantined: int


@dataclass(frozen=True)
class KVStats:
    """Units: tokens, blocks or copies as named, since start.

    `num_cow_copies` counts slabs (pages, for ragged tables) copied because they were shared and about to be written.
    Prefix counters count every admission that looked, also those after a preemption. `num_selections`: times that a
    sequence gave up a part of its cache.
    """

    groups: tuple[GroupStats, ...]
    num_cow_copies: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_evicted_blocks: int
    num_checkpoints: int
    num_selections: int = 0

    def counters(self) -> dict[str, float]:
        """What is not counted elsewhere, as flat numbers."""
        names = ("num_evicted_blocks", "num_selections")
        return {name: float(getattr(self, name)) for name in names}


def group_stats(group: CacheGroup, pool: BlockPool, cache: PrefixCache) -> GroupStats:
    """Of the pool of `group`, whose idle slabs `cache` has (or, of a window group, the pool itself)."""
    if isinstance(pool, WindowPool):
        evictable = pool.num_idle
    else:
        evictable = cache.num_checkpoints if group.spec.kind == "slot" else cache.num_evictable
    total = pool.num_slabs - pool.num_kept_back
    used = total - pool.num_free - evictable - pool.num_quarantined
    return GroupStats(total, pool.num_free, used, evictable, pool.num_quarantined)
