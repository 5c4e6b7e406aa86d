"""What each tier of KV holds, for people and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.messages import TierFacts
from penstock.kv.prefix.insight import Ages
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
        out.append(
            TierFacts(
                tier.name, len(index), limit // per, index.num_bytes, limit, hits, index.num_evicted, index.num_kept
            )
        )
    return out


def counters_of(kv: KVManager) -> dict[str, float]:
    """Since start: `miss_REASON` (tokens), `hint_ACTION`, `age_found:TIER:N` and `age_left:TIER:N` (blocks, by
    bucket of `AGES_S`), `age_found:TIER:sum`, `age_left:TIER:sum` (seconds), `tier_WHAT:TIER` (what `/metrics` calls
    kv_tier_WHAT), `tier_misses:TIER:REASON` (blocks), `reused_blocks`."""
    out = {f"hint_{action}": float(num) for action, num in kv.hints.counts.items()}
    for tier in tiers_of(kv):
        out |= {
            f"tier_hit_tokens:{tier.name}": float(tier.hit_tokens),
            f"tier_left_blocks:{tier.name}": float(tier.left),
        }
        if tier.name == "host":
            out |= _moved("host", *kv.swaps.num_blocks, kv.swaps.block_bytes)
    for outer in kv.stored.tiers if kv.stored is not None else ():
        out |= _aged(outer.name, outer.index.found_ages, outer.index.left_ages)
        out |= _moved(outer.name, outer.num_stored, outer.num_loaded)
        out[f"tier_written_bytes:{outer.name}"] = float(outer.written_bytes)
        out[f"tier_read_bytes:{outer.name}"] = float(outer.read_bytes)
        out[f"tier_refused_blocks:{outer.name}"] = float(outer.num_refused)
    if kv.stored is not None:
        out["fetched_blocks"] = float(kv.stored.ahead.num_fetched)
        out |= {f"tier_misses:{why}": float(num) for why, num in sorted(kv.stored.misses.items())}
    out["reused_blocks"] = float(kv.swaps.kept.num_reused)
    if isinstance(kv.cache, PrefixTree):
        insight = kv.cache.insight
        out |= {f"miss_{reason}": float(num) for reason, num in insight.misses.items()}
        out |= _aged("device", insight.found, insight.left)
    return out


def _aged(tier: str, found: Ages, left: Ages) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, ages in (("found", found), ("left", left)):
        out |= {f"age_{name}:{tier}:{n}": float(num) for n, num in enumerate(ages.counts)}
        out[f"age_{name}:{tier}:sum"] = ages.sum_s
    return out


def _moved(tier: str, written: int, read: int, block_bytes: int = 0) -> dict[str, float]:
    """Blocks that went to a tier, and came from it, and their bytes."""
    return {
        f"tier_written_blocks:{tier}": float(written), f"tier_written_bytes:{tier}": float(written * block_bytes),
        f"tier_read_blocks:{tier}": float(read), f"tier_read_bytes:{tier}": float(read * block_bytes),
    }  # fmt: skip
