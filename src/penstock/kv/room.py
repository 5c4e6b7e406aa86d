"""Makes room in the paged pools by evicting from the prefix cache."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.protocols import PrefixCache
from penstock.kv.block_pool import BlockPool

Slabs = tuple[int, ...]


class Want(NamedTuple):
    """What an operation needs from the pool of a group, all at once."""

    group: int
    num_slabs: int
    num_pages: int


class Room:
    """`paged` and `slots`: indices of the groups in whose order the cache's slab tuples come."""

    def __init__(
        self, paged: tuple[int, ...], slots: tuple[int, ...], pools: list[BlockPool], cache: PrefixCache
    ) -> None:
        self.num_evicted_blocks = 0
        self._paged = paged
        self._slots = slots
        self._pools = pools
        self._cache = cache

    def reserve(self, wants: list[Want]) -> bool:
        """Evict until the pools have what is wanted. False, and nothing evicted, if that cannot be."""
        short = self._shortage(wants)
        if short > self._cache.num_evictable:
            return False
        while short > 0:
            if not self.evict(short):
                return False
            short = self._shortage(wants)
        return True

    def _shortage(self, wants: list[Want]) -> int:
        """Blocks that have to be evicted: each gives one slab to every paged group."""
        short = 0
        for group, num_slabs, num_pages in wants:
            pool = self._pools[group]
            short = max(short, num_slabs - pool.num_free, -((pool.num_free_pages - num_pages) // pool.pages_per_slab))
        return short

    def evict(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` blocks; returns how many. No step in flight has seen them (`KVManager.release`)."""
        blocks, checkpoints = self._cache.evict(num_blocks)
        self.num_evicted_blocks += len(blocks)
        self.drop(blocks, checkpoints, unseen=True)
        return len(blocks)

    def drop(self, blocks: list[Slabs], checkpoints: list[Slabs], *, unseen: bool) -> None:
        """Take back the references of the prefix cache to what it has let go."""
        for groups, entries in ((self._paged, blocks), (self._slots, checkpoints)):
            for group, slabs in zip(groups, zip(*entries, strict=True), strict=False):
                self._pools[group].unref_slabs(slabs, unseen=unseen)
