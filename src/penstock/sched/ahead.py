"""Blocks of those who wait in the queue, read from the store into host memory before they are admitted.

A window over the head of the queue says whose. What they will need stays: blocks that were read ahead, and with them
those that found no room, count as used just now, the first in the queue last, on the device, on the host and in the
store; so whoever comes next evicts others.
Source: CachedAttention, Gao et al., arXiv 2403.19708, section 3.3 (scheduler-aware fetching and eviction).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from penstock.core.sequence import Sequence
from penstock.kv.prefix.tree import PrefixTree

if TYPE_CHECKING:
    from penstock.kv.manager import KVManager

WINDOW = 16
"""Sequences at the head of the queue."""


class FetchAhead:
    """A part of the scheduler; without a store it does nothing."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._seen: tuple[int, ...] = ()

    def look(self, waiting: Seq[Sequence]) -> None:
        """The step admits nobody any more. Mutates: what is ordered of the store, and the order of eviction."""
        kv, stored = self._kv, self._kv.stored
        if stored is None or (not waiting and not self._seen):
            return
        window = [seq for seq in waiting[:WINDOW] if not seq.held]
        if (seen := tuple(seq.seq_id for seq in window)) == self._seen:
            return
        self._seen = seen
        needs: list[list[str]] = []
        for seq in reversed(window):
            match = kv.match(seq)
            needs.append(stored.needs(seq))
            if isinstance(kv.cache, PrefixTree):
                kv.cache.touch(match.namespace, match.entry, seq.token_ids, (seq.num_known - 1) // kv.block_size)
            seq.claim = None
        stored.fetch(needs[::-1])
