"""What each tier of KV holds, for people and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.messages import TierFacts
from penstock.kv.prefix.tree import PrefixTree
from penstock.kv.store_index import NO_LIMIT

if TYPE_CHECKING:
    from penstock.kv.manager import KVManager


def tiers_of(kv: KVManager) -> list[TierFacts]:
    """The device first, then what is below. Cheap enough for ten times a second."""
    size = kv.block_size
    num_bytes = sum(g.slab_bytes(size) for g in kv.groups if g.spec.kind == "paged")
    pool = None if kv.main_group is None else kv.pools[kv.main_group]
    if pool is None:
        return []
    total = pool.num_slabs - pool.num_kept_back
    loaded, below = kv.swaps.num_blocks[1] * size, kv.stored
    hits = kv.cache.num_hit_tokens
    out = [
        TierFacts(
            "device", kv.cache.num_evictable, total, kv.cache.num_evictable * num_bytes, total * num_bytes,
            max(0, hits - loaded), kv.stats().num_evicted_blocks, kv.hints.num_pinned,
        )
    ]  # fmt: skip
    offload = kv.cache.offload if isinstance(kv.cache, PrefixTree) else None
    if offload is not None:
        kept, room = offload.num_kept, offload.num_kept + offload.num_free
        gone = offload.num_stored - kept
        out.append(TierFacts("host", kept, room, kept * num_bytes, room * num_bytes, loaded, gone))
    tier_bytes = 0 if below is None else below.block_bytes
    for tier in below.tiers if below is not None else ():
        index = tier.index
        limit = index.limit_bytes if index.limit_bytes < NO_LIMIT else 0
        per = max(1, tier_bytes)
        hits = tier.num_loaded * size
        out.append(TierFacts(tier.name, len(index), limit // per, index.num_bytes, limit, hits, index.num_evicted))
    return out


def counters_of(kv: KVManager) -> dict[str, float]:
    """Since start: `miss_REASON` (tokens), `hint_ACTION`, `age_found_N` and `age_left_N` (blocks, by bucket of
    `AGES_S`), `age_found_sum`, `age_left_sum` (seconds), `tier_hits_TIER` (tokens), `tier_left_TIER` (blocks)."""
    out = {f"hint_{action}": float(num) for action, num in kv.hints.counts.items()}
    for tier in tiers_of(kv):
        out[f"tier_hits_{tier.name}"], out[f"tier_left_{tier.name}"] = float(tier.hit_tokens), float(tier.left)
    if isinstance(kv.cache, PrefixTree):
        insight = kv.cache.insight
        out |= {f"miss_{reason}": float(num) for reason, num in insight.misses.items()}
        for which, ages in (("found", insight.found), ("left", insight.left)):
            out |= {f"age_{which}_{n}": float(num) for n, num in enumerate(ages.counts)}
            out[f"age_{which}_sum"] = ages.sum_s
    return out
