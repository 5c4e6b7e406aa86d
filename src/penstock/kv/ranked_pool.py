"""The memory of a cache group whose blocks lie on several ranks, whole: slab s is on rank s mod N.

Numbered so, the lowest slabs are the first ones of every rank, and memory behind them is taken rank by rank at the same
pace (`kv.backing`). What becomes free goes to its rank's pile; slabs are handed out from the pile of a rank that is
named.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kv.block_pool import BlockPool


def slabs_of(num_slabs: int, rank: int, size: int) -> int:
    """How many of the slabs 0 ... num_slabs - 1 are on `rank`, one of `size`."""
    return (num_slabs - rank + size - 1) // size


class RankedPool(BlockPool):
    """Slabs of `size` ranks; integers only. Pages of their own belong to none (`alloc_page` is not for it)."""

    __slots__ = ("_fresh", "_piles", "size")

    def __init__(self, num_slabs: int, pages_per_slab: int, size: int) -> None:
        super().__init__(num_slabs, pages_per_slab)
        self.size = size
        self._piles = [[s for s in self._free if s % size == rank] for rank in range(size)]
        self._free = []  # what the base class puts here waits to be sorted in
        self._fresh = [len(pile) for pile in self._piles]

    def rank_of(self, slab: int) -> int:
        return slab % self.size

    @property
    def num_free(self) -> int:
        """Slabs that can be handed out now, of all ranks together."""
        return sum(map(self.num_free_on, range(self.size)))

    def num_free_on(self, rank: int) -> int:
        """Slabs of one rank that can be handed out now."""
        if self._free:
            self._sort_in()
        return len(self._piles[rank]) - self._kept_back(rank)

    def num_slabs_on(self, rank: int) -> int:
        """All slabs of a rank but those that are kept back."""
        return slabs_of(self.num_slabs, rank, self.size) - self._kept_back(rank)

    def alloc_on(self, rank: int, n: int) -> list[int] | None:
        """`n` slabs of one rank with one reference each, or None (and nothing handed out) if there are fewer."""
        if n > self.num_free_on(rank):
            return None
        pile = self._piles[rank]
        slabs = [pile.pop() for _ in range(n)]
        for slab in slabs:
            self.refs[slab] = 1
        if len(pile) < self._fresh[rank]:
            self._fresh[rank] = len(pile)
            self._count_fresh()
        return slabs

    def alloc_near(self, home: int, n: int) -> list[int] | None:
        """`n` slabs, of `home` as long as it has any, then each of the rank with most free ones, the lowest of equals.

        None, and nothing handed out, if all ranks together have fewer.
        """
        free = [self.num_free_on(rank) for rank in range(self.size)]
        if n > sum(free):
            return None
        slabs: list[int] = []
        for _ in range(n):
            rank = home if free[home] else free.index(max(free))
            free[rank] -= 1
            slabs += self.alloc_on(rank, 1) or ()
        return slabs

    def alloc_slabs(self, n: int) -> list[int] | None:
        """For whom any rank serves: those with most free ones."""
        free = [self.num_free_on(rank) for rank in range(self.size)]
        return self.alloc_near(free.index(max(free)), n)

    def freshen(self) -> None:
        self._sort_in()
        for rank, pile in enumerate(self._piles):
            pile.sort(reverse=True)
            last = self._last(rank)
            others = (i for i, slab in enumerate(pile) if slab != last - i * self.size)
            self._fresh[rank] = next(others, len(pile))
        self._count_fresh()

    def check_invariants(self) -> None:
        self._sort_in()
        for rank, pile in enumerate(self._piles):
            assert all(slab % self.size == rank for slab in pile), f"the pile of rank {rank} has slabs of others"
        piles = [list(pile) for pile in self._piles]
        self._free = sorted((slab for pile in piles for slab in pile), reverse=True)
        try:
            super().check_invariants()
        finally:
            self._free = []

    def _sort_in(self) -> None:
        for slab in self._free:
            self._piles[slab % self.size].append(slab)
        self._free = []

    def _kept_back(self, rank: int) -> int:
        if not self.num_kept_back:
            return 0
        given = slabs_of(self.num_slabs - self.num_kept_back, rank, self.size)
        return slabs_of(self.num_slabs, rank, self.size) - given

    def _last(self, rank: int) -> int:
        """The rank's highest slab."""
        return (slabs_of(self.num_slabs, rank, self.size) - 1) * self.size + rank

    def _count_fresh(self) -> None:
        """Slabs behind the last one that some rank has handed out."""
        used = (self._last(rank) - fresh * self.size for rank, fresh in enumerate(self._fresh))
        self.num_fresh = self.num_slabs - 1 - max(-1, *used)


def ranks_of(pool: RankedPool, slabs: Sequence[int]) -> list[int]:
    """The rank of each."""
    return [slab % pool.size for slab in slabs]
