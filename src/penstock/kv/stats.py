"""Counters of the KV manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.kv.window_pool import WindowPool

if TYPE_CHECKING:
    from penstock.core.cache_spec import CacheGroup
    from penstock.core.protocols import PrefixCache
    from penstock.kv.adapter_pages import AdapterPages
    from penstock.kv.block_pool import BlockPool
    from penstock.kv.room import Room
    from penstock.kv.selection import KeepAll
    from penstock.kv.stored import StoredBlocks
    from penstock.kv.swap import Swaps


@dataclass(frozen=True)
class GroupStats:
    """Slabs of one cache group that are not kept back: total = free + used + evictable + quarantined.

    `evictable`: only the prefix cache, or an adapter that nobody has, has them, and they can be given up now. `used`
    includes broken slabs, and cached blocks that a running sequence (or a step in flight) stands on.
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
    sequence gave up a part of its cache. `num_aside_blocks`: that one had set aside on the device, and that went to
    host memory (`kv.aside`). `num_offloaded_blocks`, `num_loaded_blocks`: that the prefix cache gave to a
    tier, and had back. `num_layerwise`: admissions with layers away (`kv.layerkv`); `num_layers_back`: layers that
    came back; `num_layer_waits`: decodes that waited a step for theirs. `num_store_query_tokens`,
    `num_store_hit_tokens`: of prompts, looked up in stores outside this process, and found there. `num_module_tokens`,
    `num_module_hit_tokens`, `num_blended_tokens`: of modules, wanted, copied, and computed again (`kv.modules`).
    `num_adapters_held`, `num_adapter_blocks`: now, adapters that lie in blocks of the pool, and these
    (`kv.adapter_pages`). `num_borrowed_blocks`: of another rank than their sequence's home; `num_lent_blocks`: now
    (`kv.placed`).
    """

    groups: tuple[GroupStats, ...]
    num_cow_copies: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_evicted_blocks: int
    num_checkpoints: int
    num_selections: int = 0
    num_aside_blocks: int = 0
    num_offloaded_blocks: int = 0
    num_loaded_blocks: int = 0
    num_layerwise: int = 0
    num_layers_back: int = 0
    num_layer_waits: int = 0
    num_store_query_tokens: int = 0
    num_store_hit_tokens: int = 0
    num_module_tokens: int = 0
    num_module_hit_tokens: int = 0
    num_blended_tokens: int = 0
    num_adapters_held: int = 0
    num_adapter_blocks: int = 0
    num_borrowed_blocks: int = 0
    num_lent_blocks: int = 0

    def counters(self) -> dict[str, float]:
        """What is not counted elsewhere, as flat numbers."""
        names = ("num_evicted_blocks", "num_selections", "num_aside_blocks", "num_offloaded_blocks",
                 "num_loaded_blocks", "num_layerwise", "num_layers_back", "num_layer_waits", "num_store_query_tokens",
                 "num_store_hit_tokens", "num_module_tokens", "num_module_hit_tokens",
                 "num_blended_tokens", "num_adapters_held", "num_adapter_blocks", "num_borrowed_blocks",
                 "num_lent_blocks")  # fmt: skip
        return {name: float(getattr(self, name)) for name in names}


def group_stats(group: CacheGroup, pool: BlockPool, cache: PrefixCache, num_evictable: int) -> GroupStats:
    """Of the pool of `group`, whose idle slabs `cache` has (or, of a window group, the pool itself); of full ones
    `num_evictable`, those of adapters included."""
    if isinstance(pool, WindowPool):
        evictable = pool.num_idle
    else:
        evictable = cache.num_checkpoints if group.spec.kind == "slot" else num_evictable
    total = pool.num_slabs - pool.num_kept_back
    used = total - pool.num_free - evictable - pool.num_quarantined
    return GroupStats(total, pool.num_free, used, evictable, pool.num_quarantined)


def kv_stats(
    groups: Sequence[CacheGroup], pools: Sequence[BlockPool], cache: PrefixCache, room: Room, swaps: Swaps,
    stored: StoredBlocks | None, selections: KeepAll, adapters: AdapterPages | None, *, num_cow_copies: int,
) -> KVStats:  # fmt: skip
    """What the parts of a manager have counted."""
    offloaded, loaded = swaps.num_blocks
    return KVStats(
        groups=tuple(group_stats(g, p, cache, room.num_evictable) for g, p in zip(groups, pools, strict=True)),
        num_cow_copies=num_cow_copies,
        num_prefix_query_tokens=cache.num_query_tokens,
        num_prefix_hit_tokens=cache.num_hit_tokens,
        num_evicted_blocks=room.num_evicted_blocks,
        num_checkpoints=cache.num_checkpoints,
        num_selections=selections.num_cut,
        num_aside_blocks=selections.num_sent,
        num_offloaded_blocks=offloaded,
        num_loaded_blocks=loaded,
        num_store_query_tokens=0 if stored is None else stored.num_query_tokens,
        num_store_hit_tokens=0 if stored is None else stored.num_hit_tokens,
        num_adapters_held=0 if adapters is None else len(adapters.held),
        num_adapter_blocks=0 if adapters is None else adapters.num_blocks,
    )
