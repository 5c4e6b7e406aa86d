"""Sequences that had to give up their device memory wait in a tier: swapped out whole, swapped in whole.

Sources: vLLM, arXiv 2309.06180, section 4.5 (swapping); FastServe, arXiv 2305.05920, section 4.3 (proactive swapping).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.cache_spec import CacheGroup
from penstock.core.protocols import BlockTier
from penstock.kv.block_pool import BlockPool

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq


class Swapped(NamedTuple):
    """Where a swapped-out sequence waits: `ids[g]` of the tier hold what is seen of its `num_tokens` tokens."""

    num_tokens: int
    ids: list[list[int]]


class Load(NamedTuple):
    """On its way back: `copy` is being read, and the device's `slabs` of each group are being written."""

    copy: Swapped
    slabs: list[list[int]]


class Swaps:
    """Attributes:
    tier: where sequences wait.
    loads: late loads that no step has reported yet, by number. Each has a reference on the slabs that it writes, so
        that nobody gets them if the sequence that waits for it goes.
    """

    def __init__(
        self, tier: BlockTier, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], block_size: int
    ) -> None:
        self.tier = tier
        self.loads: dict[int, Load] = {}
        self._next_move = 0
        self._groups = tuple(groups)
        self._pools = pools
        self._block_size = block_size

    def need(self, group: CacheGroup, num_tokens: int) -> int:
        """Slabs of a group that a sequence of so many tokens takes; of a window group, those that it still sees."""
        if not group.spec.per_token:
            return 1
        return -(-num_tokens // self._block_size) - group.spec.first_block(num_tokens, self._block_size)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes that one way of the swap moves."""
        return sum(self.need(g, num_tokens) * g.slab_bytes(self._block_size) for g in self._groups)

    def out(self, seq: Seq) -> bool:
        """Plan the copies of everything `seq` has computed. Mutates: seq.swapped.

        False, and nothing changed, if the tier lacks room, some of it was dropped, or some of it is still being loaded.
        """
        if seq.load in self.loads or any(table.layers is not None or table.dropped for table in seq.tables):
            return False
        needs = [self.need(g, seq.num_computed) for g in self._groups]
        ids = self.tier.reserve(needs)
        if ids is None:
            return False
        for g, taken in enumerate(ids):
            self.tier.store(g, seq.tables[g].held[: len(taken)], taken)
        seq.swapped = Swapped(seq.num_computed, ids)
        return True

    def back(self, seq: Seq) -> bool:
        """Plan the copies back into the tables of `seq`, which have room, but for blocks that it has computed.

        True: it goes on as if it had computed them. False: it waits for load `seq.load`. Mutates: seq.num_computed,
        writable, swapped, load.
        """
        copy: Swapped = seq.swapped
        move, self._next_move = self._next_move, self._next_move + 1
        slabs: list[list[int]] = []
        for g, group in enumerate(self._groups):
            base = group.spec.first_block(copy.num_tokens, self._block_size)
            first = max(base, seq.num_computed // self._block_size) if group.spec.per_token else 0
            ids = copy.ids[g][first - base :]
            slabs.append(seq.tables[g].ids[first : first + len(ids)])
            self.tier.load(g, ids, slabs[g], move)
        seq.swapped, seq.load = None, move
        if not self.tier.late:
            self.tier.free(copy.ids)
            seq.num_computed = copy.num_tokens
            return True
        for pool, targets in zip(self._pools, slabs, strict=True):
            pool.ref_slabs(targets)
        self.loads[move] = Load(copy, slabs)
        seq.writable = 0
        return False

    def ended(self, move: int) -> int:
        """A step has reported load `move`: nothing reads or writes for it any more.

        Returns the tokens that whoever waited for it has now; 0 if nobody had to wait.
        """
        load = self.loads.pop(move, None)
        if load is None:
            return 0
        self.tier.free(load.copy.ids)
        for pool, slabs in zip(self._pools, load.slabs, strict=True):
            pool.unref_slabs(slabs)
        return load.copy.num_tokens

    def drop(self, seq: Seq) -> None:
        """Give up a sequence's copy, if it has one (it is not needed, or the sequence has ended)."""
        if seq.swapped is not None:
            self.tier.free(seq.swapped.ids)
            seq.swapped = None

    def check_invariants(self, live: Iterable[Seq]) -> None:
        """AssertionError unless exactly what waits, and what is on its way, is held in the tier."""
        held: list[list[int]] = [[] for _ in self._groups]
        copies = [load.copy for load in self.loads.values()]
        for seq in live:
            if seq.swapped is not None:
                assert not seq.tables, f"{seq} owns device memory and a copy in tier {self.tier.name}"
                copies.append(seq.swapped)
        for copy in copies:
            for g, ids in enumerate(copy.ids):
                held[g] += ids
        self.tier.check_invariants(held)
