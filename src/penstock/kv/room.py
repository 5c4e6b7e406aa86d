"""Makes room in the pools at the cost of the prefix cache, and of adapters that nobody has (`kv.adapter_pages`).

Full groups get blocks that the cache forgets. Window groups get idle slabs of blocks that stay in it, hollow: their own
memory is given up, and that of the full groups, for which they may still be matched, is not.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from penstock.core.protocols import PrefixCache
from penstock.kv.block_pool import BlockPool
from penstock.kv.events import EventRecorder
from penstock.kv.window_pool import WindowPool

Slabs = tuple[int, ...]


class Want(NamedTuple):
    """What an operation needs from the pool of a group, all at once."""

    group: int
    num_slabs: int
    num_pages: int


class IdleAdapters(Protocol):
    """Adapters as far as they can be given up: see `kv.adapter_pages.AdapterPages`."""

    num_idle: int

    def first_key(self) -> tuple[int, Any] | None: ...

    def give_up(self) -> int: ...


class Room:
    """`paged` (full and window groups) and `slots`: indices of the groups in whose order the cache's tuples come."""

    def __init__(
        self, paged: tuple[int, ...], slots: tuple[int, ...], pools: list[BlockPool], cache: PrefixCache
    ) -> None:
        self.num_evicted_blocks = 0
        self._paged = paged
        self._slots = slots
        self._pools = pools
        self.cache = cache
        self.events: EventRecorder | None = None
        self.adapters: IdleAdapters | None = None

    @property
    def num_evictable(self) -> int:
        """Blocks, a slab of every full group each, that can be given up now."""
        return self.cache.num_evictable + (0 if self.adapters is None else self.adapters.num_idle)

    @property
    def num_within_reach(self) -> int:
        """Slabs that every full group has, or can get."""
        free = [self._pools[g].num_free for g in self._paged if not isinstance(self._pools[g], WindowPool)]
        return min(free, default=0) + self.num_evictable

    def reserve(self, wants: list[Want]) -> bool:
        """Hollow and evict until the pools have what is wanted. False, and nothing given up, if that cannot be."""
        full: list[Want] = []
        for want in wants:
            pool = self._pools[want.group]
            if not isinstance(pool, WindowPool):
                full.append(want)
            elif self._missing(want) > pool.num_idle:
                return False
        short = max(map(self._missing, full), default=0)
        if short > self.num_evictable:
            return False
        for want in wants:
            pool = self._pools[want.group]
            if isinstance(pool, WindowPool):
                pool.make_room(max(0, self._missing(want)))
        while short > 0:  # each block that is evicted gives one slab to every full group
            if not self._free(short):
                return False
            short = max(map(self._missing, full))
        return True

    def _missing(self, want: Want) -> int:
        """Slabs that the group's pool lacks; 0 or less if it has what is wanted."""
        pool = self._pools[want.group]
        slabs_alone = want.num_slabs - pool.num_free
        pages_left = pool.num_free_pages - want.num_slabs * pool.pages_per_slab - want.num_pages
        return max(slabs_alone, -(pages_left // pool.pages_per_slab))

    def _free(self, num_blocks: int) -> int:
        """Give up so many blocks of texts and adapters, or a few more, in the order of the eviction policy."""
        adapters, freed = self.adapters, 0
        if adapters is None or not adapters.num_idle:
            return self.evict(num_blocks)
        while freed < num_blocks:
            own, text = adapters.first_key(), self.cache.first_key()
            took_adapter = own is not None and (text is None or own < text)
            more = adapters.give_up() if took_adapter else self.evict(1)
            if not more:
                break
            freed += more
        return freed

    def evict(self, num_blocks: int, **which: bool) -> int:
        """Evict up to `num_blocks` blocks of texts; returns how many. No step in flight has seen them
        (`KVManager.release`)."""
        blocks, checkpoints = self.cache.evict(num_blocks, **which)
        self.num_evicted_blocks += len(blocks)
        self.drop(blocks, checkpoints, unseen=True)
        return len(blocks)

    def drop(self, blocks: list[Slabs], checkpoints: list[Slabs], *, unseen: bool) -> None:
        """Take back the references of the prefix cache to what it has let go."""
        if self.events is not None:
            self.events.left(blocks)
        for groups, entries in ((self._paged, blocks), (self._slots, checkpoints)):
            for group, slabs in zip(groups, zip(*entries, strict=True), strict=False):
                pool = self._pools[group]
                if isinstance(pool, WindowPool):
                    pool.forget(slabs, unseen=unseen)
                else:
                    pool.unref_slabs(slabs, unseen=unseen)
