"""Counters of the KV manager."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupStats:
    """Slabs of one cache group: total = free + used + evictable + quarantined.

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
    Prefix counters count every admission that looked, also those after a preemption.
    """

    groups: tuple[GroupStats, ...]
    num_cow_copies: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_evicted_blocks: int
    num_checkpoints: int
