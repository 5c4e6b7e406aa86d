"""How many slabs of each pool have memory behind them, which is taken a little ahead of use.

A pool is a range of addresses with a fixed number of slabs. Memory is asked for when what was handed out comes near the
end of what there is; the answer arrives as a `PoolGrowth`. Once one says that there was too little, the pools are as
small as their memory, until another says that there is enough: whoever needs more waits, or is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.cache_spec import CacheGroup
from penstock.core.events import PoolGrowth
from penstock.kv.block_pool import BlockPool

AHEAD_BYTES = 64 << 20
"""Bytes ahead of use, over all groups; of each group at least `MIN_AHEAD` slabs."""
MIN_AHEAD = 2
RETRY_S = 1.0
"""After a refusal the machine is not asked again for so long."""


class Backing:
    """Integers only. A schedule follows from what `apply` was told, and from nothing else of the machine's memory."""

    def __init__(self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], block_size: int) -> None:
        self._pools = list(pools)
        self.slab_bytes = tuple(group.slab_bytes(block_size) for group in groups)
        share = AHEAD_BYTES // max(1, len(self._pools))
        self._ahead = [max(MIN_AHEAD, share // max(1, size)) for size in self.slab_bytes]
        self.num_slabs = [0] * len(self._pools)
        """Slabs of each group that have memory behind them: all below this number."""
        self.is_short = False
        """The last answer was that there is too little."""
        self.gives_all = False
        """An operator wants what nobody uses given back, at once and whole."""

    @property
    def num_bytes(self) -> int:
        return sum(n * size for n, size in zip(self.num_slabs, self.slab_bytes, strict=True))

    @property
    def is_enough(self) -> bool:
        """Nobody comes near the end. Costs next to nothing: it is asked in every step."""
        if self.is_short:
            return False
        for pool, have, ahead in zip(self._pools, self.num_slabs, self._ahead, strict=True):
            if touched(pool) + ahead // 2 > have < pool.num_slabs:
                return False
        return True

    def grown(self, free_bytes: int) -> PoolGrowth | None:
        """The answer of a machine with so many free bytes; None: it is the one that there was last time."""
        # A step may have gone beyond the end. What it used it has.
        have = [max(n, touched(pool)) for n, pool in zip(self.num_slabs, self._pools, strict=True)]
        wanted = [
            max(n, min(pool.num_slabs, touched(pool) + ahead))
            for n, pool, ahead in zip(have, self._pools, self._ahead, strict=True)
        ]
        more = sum((w - h) * size for w, h, size in zip(wanted, have, self.slab_bytes, strict=True))
        is_short = more > free_bytes
        if is_short:
            wanted = [h + (w - h) * max(0, free_bytes) // more for w, h in zip(wanted, have, strict=True)]
        if wanted == self.num_slabs and is_short == self.is_short:
            return None
        return PoolGrowth(num_slabs=wanted, is_short=is_short)

    @property
    def spare_bytes(self) -> int:
        """What `rested` gives back at least; only while no step is in flight."""
        rest = self.rested()
        return sum((n - r) * size for n, r, size in zip(self.num_slabs, rest.num_slabs, self.slab_bytes, strict=True))

    def rested(self) -> PoolGrowth:
        """Nothing behind what is in use, and cached prefixes are, but what is wanted ahead of it, if anything is."""
        keep = []
        for pool, have, ahead in zip(self._pools, self.num_slabs, self._ahead, strict=True):
            last = max((slab for slab, count in enumerate(pool.refs) if count), default=-1)
            keep.append(min(max(have, last + 1), last + 1 + (0 if self.gives_all else ahead)))
        return PoolGrowth(num_slabs=keep, is_short=self.is_short, at_rest=True)

    def apply(self, growth: PoolGrowth) -> None:
        """Mutates: the pools' limits."""
        self.num_slabs, self.is_short = list(growth.num_slabs), growth.is_short
        for pool, n in zip(self._pools, self.num_slabs, strict=True):
            if growth.at_rest:
                self.gives_all = False
                pool.freshen()
            assert touched(pool) <= n <= pool.num_slabs, f"memory for {n} slabs: {touched(pool)} were handed out"
            pool.num_kept_back = pool.num_slabs - n if self.is_short else 0


def touched(pool: BlockPool) -> int:
    """All slabs from this number on are fresh."""
    return pool.num_slabs - pool.num_fresh
