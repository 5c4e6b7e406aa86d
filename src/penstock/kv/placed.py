"""Blocks that lie on one rank each: a sequence's on its home as long as there is room, then on ranks that lend theirs.

What Infinite-LLM (Lin et al., arXiv 2401.02669, sections 4 and 5) calls rBlocks and their gManager: attention reads
blocks where they are and merges what ranks have found (`parallel.shard`), so a block may lie on any rank, and one rank
need not hold a whole sequence. This manager says where each goes, and keeps the ledger of who owes what to whom.

Free blocks of other ranks are borrowed before the prefix cache of the home gives anything up. A copy stays on the rank
of what is copied, for no bytes go from rank to rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from penstock.core.cache_spec import CacheGroup
from penstock.core.messages import RankBlocks
from penstock.core.sequence import Sequence
from penstock.kv.block_pool import BlockPool
from penstock.kv.cursor import PrefixCursor, PrefixMatch
from penstock.kv.growth import Growth, plan_growth
from penstock.kv.ledger import Ledger
from penstock.kv.manager import KVManager
from penstock.kv.ranked_pool import RankedPool, ranks_of
from penstock.kv.room import Want
from penstock.kv.stats import KVStats


class PlacedManager(KVManager):
    """For groups whose blocks are whole on one of several ranks (`CacheSpec.whole`), all of as many. Blocks do not
    leave the device: neither swapping nor stores go with it."""

    def __init__(self, groups: Seq[CacheGroup], num_slabs: Seq[int], block_size: int, **options: Any) -> None:
        super().__init__(groups, num_slabs, block_size, **options)
        self._ranked = {g: pool for g, pool in enumerate(self.pools) if isinstance(pool, RankedPool)}
        sizes = {pool.size for pool in self._ranked.values()}
        assert len(sizes) == 1, f"blocks lie on as many ranks in every group, not on {sorted(sizes)}"
        assert set(self._ranked) == set(self._paged), "either all blocks lie on one rank each, or none do"
        self.ledger = Ledger(sizes.pop())

    def _new_pool(self, group: CacheGroup, num_slabs: int) -> BlockPool:
        if not group.spec.whole:
            return super()._new_pool(group, num_slabs)
        return RankedPool(num_slabs, group.pages_per_slab, group.spec.ranks)

    # -- who has what ----------------------------------------------------------------------------------------------

    def _ranks(self, seq: Sequence) -> list[int]:
        """The rank of each of its blocks, of all groups."""
        return [rank for g, pool in self._ranked.items() for rank in ranks_of(pool, seq.tables[g].ids)]

    def _home(self, seq: Sequence, ranks: Seq[int]) -> int:
        """The rank where most of what `seq` knows would be, those blocks counted that it has found; of equals the one
        with most room, then the lowest."""
        found = Counter(ranks)
        need = max(0, -(-seq.num_known // self.block_size) * len(self._ranked) - len(ranks))
        free = [sum(pool.num_free_on(r) for pool in self._ranked.values()) for r in range(self.ledger.size)]
        return max(range(self.ledger.size), key=lambda r: (found[r] + min(need, free[r]), free[r], -r))

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        super().admit(seq, match)
        ranks = self._ranks(seq)
        self.ledger.enter(seq.seq_id, self._home(seq, ranks), ranks)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        if not super().fork(parent, child):
            return False
        self.ledger.enter(child.seq_id, self.ledger.home(parent.seq_id), self._ranks(child))
        return True

    def release(self, seq: Sequence) -> None:
        self.ledger.leave(seq.seq_id)
        super().release(seq)

    def _follow(self, seq: Sequence, cursor: PrefixCursor) -> None:
        """Where the cache has a block already, the sequence goes over to it, which may lie on another rank."""
        first = cursor.num_blocks
        mine = {g: ranks_of(pool, seq.tables[g].ids[first:]) for g, pool in self._ranked.items()}
        super()._follow(seq, cursor)
        for g, pool in self._ranked.items():
            for was, now in zip(mine[g], ranks_of(pool, seq.tables[g].ids[first:]), strict=True):
                if was != now:
                    self.ledger.give_back(seq.seq_id, (was,))
                    self.ledger.take(seq.seq_id, (now,))

    # -- growth ----------------------------------------------------------------------------------------------------

    def _grow(self, seq: Sequence, first: int, end: int) -> bool:
        plans = [(g, plan_growth(seq.tables[g], self.pools[g], first, end)) for g in self._paged]
        if not self._room.reserve([Want(g, plan.num_slabs, plan.num_pages) for g, plan in plans]):
            return False
        copies = {g: Counter(ranks_of(self._ranked[g], [seq.tables[g].ids[b] for _, b in p.copies])) for g, p in plans}
        while any(count > self._ranked[g].num_free_on(r) for g, c in copies.items() for r, count in c.items()):
            if not self._room.evict(1):  # whoever else has what is to be copied has to give way
                return False
        for g, plan in plans:
            self._place(seq, g, plan)
            self._num_cow_copies += len(plan.copies)
        return True

    def _place(self, seq: Sequence, group: int, plan: Growth) -> None:
        pool, table = self._ranked[group], seq.tables[group]
        for _, block in plan.copies:
            slabs = pool.alloc_on(pool.rank_of(table.ids[block]), 1)
            assert slabs is not None, "there is room for copies on their ranks"
            self.outbox.copy_slab(group, table.ids[block], slabs[0])
            pool.unref(table.ids[block])
            table.ids[block] = slabs[0]
            self.outbox.table(seq.seq_id, group, block, slabs)
        fresh = pool.alloc_near(self.ledger.home(seq.seq_id), plan.num_new)
        assert fresh is not None, "there is room on some rank"
        self.outbox.zero_slabs(group, fresh)
        self.outbox.table(seq.seq_id, group, len(table.ids), fresh)
        table.ids += fresh
        self.ledger.take(seq.seq_id, ranks_of(pool, fresh))

    def make_ragged(self, seq: Sequence, group_index: int) -> bool:
        """False: single pages belong to no rank."""
        return False if group_index in self._ranked else super().make_ragged(seq, group_index)

    # -- for people ------------------------------------------------------------------------------------------------

    def stats(self) -> KVStats:
        lent = sum(map(self.ledger.lent, range(self.ledger.size)))
        return replace(super().stats(), num_borrowed_blocks=self.ledger.num_borrowed, num_lent_blocks=lent)

    def rank_blocks(self) -> list[RankBlocks]:
        """Blocks of each rank, all groups together."""
        pools = self._ranked.values()
        return [
            RankBlocks(
                sum(p.num_slabs_on(r) for p in pools), sum(p.num_free_on(r) for p in pools),
                self.ledger.lent(r), self.ledger.borrowed(r),
            )
            for r in range(self.ledger.size)
        ]  # fmt: skip

    def check_invariants(self, live: Iterable[Sequence]) -> None:
        live = list(live)
        super().check_invariants(live)
        self.ledger.check_invariants({seq.seq_id: self._ranks(seq) for seq in live if seq.tables})
