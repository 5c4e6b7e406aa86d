"""Tokens that a selection did not choose wait where there is room: on the device, in host memory, or nowhere.

Attention reads the lines that were chosen, which are a copy; all tokens stay in whole blocks beside them. Three phases
follow from memory alone, sequence by sequence:

1. As long as the device has room, blocks stay where they were computed.
2. When somebody finds none, whole blocks go to the tier, those of the sequence first that was cut first. The next
   selection takes from there what it chooses. Whatever is computed later is set aside on the device again, until the
   next time.
3. When the tier is full, too, the scheduler preempts somebody, who is computed again from its tokens.

What is chosen never depends on the phase: tokens are the same in all three.

Source: Zhao et al., ALISA, arXiv 2403.17312, section 5. The paper drops and computes again single tokens, by a share
that is searched for beforehand; a token's keys were made by looking at what was chosen then, so here a sequence is
computed again as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from penstock.config.held import kept_blocks, most_chosen
from penstock.config.selection import Keeping
from penstock.core.protocols import IdTier
from penstock.core.sequence import Sequence
from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.lines import cut_lines, line_blocks
from penstock.kv.outbox import Outbox
from penstock.kv.room import Room, Want
from penstock.kv.selection import Selections


class SetAside(Selections):
    """`leave`: a sequence stops standing in the prefix cache. As long as what was set aside is on the device, it stands
    there, so that nobody counts on blocks that it holds."""

    stays = True

    def __init__(
        self, keeping: Keeping, pool: BlockPool, room: Room, outbox: Outbox, block_size: int,
        withdraw: Callable[[Sequence], None], tier: IdTier, leave: Callable[[Sequence], None],
    ) -> None:  # fmt: skip
        super().__init__(keeping, 0, pool, room, outbox, block_size, withdraw)
        self._tier, self._leave = tier, leave
        self._cut: dict[int, Sequence] = {}
        """Those that have something aside, in the order of their first cut."""
        self._ends: dict[int, int] = {}
        """How many tokens they have aside."""

    # -- how much ------------------------------------------------------------------------------------------------

    def blocks_to_admit(self, seq: Sequence, num_tokens: int) -> int:
        """Sends away what others have aside if that is what it takes."""
        need = line_blocks(num_tokens, self._block_size) + self._num_chosen(seq)
        self._make_room(Want(self._group, need, 0))
        return need

    def coming(self, running: Iterable[Sequence]) -> int:
        return sum(map(self._coming, running))

    def _coming(self, seq: Sequence) -> int:
        if seq.num_known - seq.num_computed - seq.num_inflight <= 1:
            return 0
        table: BlockTable = seq.tables[self._group]
        held = len(table.ids) + len(table.aside)
        if table.layers is not None:
            held += sum(map(len, table.layers)) // len(table.layers)
        return max(0, line_blocks(seq.num_known, self._block_size) + self._num_chosen(seq) - held)

    def _num_chosen(self, seq: Sequence) -> int:
        """Blocks, besides all that it has, of one that gets to all it knows."""
        return most_chosen(self._keeping, seq.num_known, self._block_size, seq.prompt_len)

    def _reserve(self, seq: Sequence, end: int, want: Want) -> bool:
        table: BlockTable = seq.tables[self._group]
        num = max(0, self._num_copies(seq, end) - len(table.spare))
        if not self._make_room(want._replace(num_slabs=want.num_slabs + num)):
            return False
        table.spare += self._pool.alloc_slabs(num) or ()
        return True

    def _num_copies(self, seq: Sequence, end: int) -> int:
        """Slabs at most for what a selection at `end` chooses, and for what is set aside by it."""
        table: BlockTable = seq.tables[self._group]
        if end != seq.next_selection or self._num_over(end, min(table.dropped, default=0)) <= 0:
            return 0
        kept = kept_blocks(self._keeping, end, self._block_size)
        if table.layers is None:
            return kept
        shared = sum(self._pool.page_refs[page] > 1 for pages in table.layers for page in pages)
        return min(kept, line_blocks(shared, self._pool.pages_per_slab)) + self._num_new(seq, table, end)

    def _num_new(self, seq: Sequence, table: BlockTable, num_tokens: int) -> int:
        """Slabs to set aside so many tokens of a ragged table."""
        return line_blocks(num_tokens, self._block_size) - len(table.aside) + self._shares_tail(seq, table)

    def _shares_tail(self, seq: Sequence, table: BlockTable) -> bool:
        """Whether others look at the last block that `seq` has aside, and it is not full: it must not write there."""
        return self._ends.get(seq.seq_id, 0) % self._block_size != 0 and self._pool.refs[table.aside[-1]] > 1

    # -- cutting -------------------------------------------------------------------------------------------------

    def cut(self, seq: Sequence, counts: Seq[int]) -> None:
        table: BlockTable = seq.tables[self._group]
        pool, num_tokens = self._pool, seq.num_computed
        if table.layers is None:
            num = line_blocks(num_tokens, self._block_size)
            pool.unref_slabs(table.ids[num:])
            table.aside, table.ids = table.ids[:num], []
            table.layers = [[] for _ in counts]
        else:
            num = self._num_new(seq, table, num_tokens)
            assert num <= len(table.spare), f"{seq}: {num} blocks to set aside were not foreseen"
            if self._shares_tail(seq, table):
                pool.unref(table.aside.pop())
            table.aside += table.spare[:num]
            table.spare = table.spare[num:]
        cut_lines(table, pool, counts, num_tokens, self._block_size, seq.seq_id, self._group, self._outbox, table.aside)
        self._cut.setdefault(seq.seq_id, seq)
        self._ends[seq.seq_id] = num_tokens
        self.num_cut += 1

    def share(self, table: BlockTable, pool: BlockPool, parent: Sequence, child: Sequence) -> BlockTable:
        copy = super().share(table, pool, parent, child)
        if table.aside:
            copy.aside = list(table.aside)
            pool.ref_slabs(slab for slab in copy.aside if slab >= 0)
            self._tier.prepare_load([[~slab for slab in copy.aside if slab < 0]])
            self._outbox.pack(child.seq_id, self._group, [], [], copy.aside)
            self._cut[child.seq_id], self._ends[child.seq_id] = child, self._ends[parent.seq_id]
        return copy

    def release(self, seq: Sequence, table: BlockTable, pool: BlockPool) -> None:
        super().release(seq, table, pool)
        self._cut.pop(seq.seq_id, None)
        self._ends.pop(seq.seq_id, None)
        pool.unref_slabs(slab for slab in reversed(table.aside) if slab >= 0)
        self._tier.evict([[~slab for slab in table.aside if slab < 0]])

    # -- where it waits ------------------------------------------------------------------------------------------

    def _make_room(self, want: Want) -> bool:
        """Room for `want`, if need be in the place of what is set aside. False, and some of that is gone, if it is not
        enough, or not yet: steps in flight may look at it."""
        for seq in list(self._cut.values()):
            if self._room.reserve([want]):
                return True
            self._send(seq)
        return self._room.reserve([want])

    def _send(self, seq: Sequence) -> None:
        """Full blocks that `seq` has aside on the device go to the tier, all or none, with those who share them."""
        near = set(self._full_near(seq))
        family = [s for s in self._cut.values() if not near.isdisjoint(s.tables[self._group].aside)]
        if not near or any(s.num_computed + s.num_inflight >= s.next_selection for s in family):
            return  # a selection in flight reads them
        slabs = sorted({slab for s in family for slab in self._full_near(s)})
        ids = self._tier.prepare_store([len(slabs)])
        if ids is None:
            return
        self._tier.store(self._group, slabs, ids[0])
        there = dict(zip(slabs, ids[0], strict=True))
        for s in family:
            table: BlockTable = s.tables[self._group]
            mine = self._full_near(s)
            self._tier.prepare_load([[there[slab] for slab in mine]])
            table.aside = [~there[slab] if slab in there else slab for slab in table.aside]
            self._outbox.pack(s.seq_id, self._group, [], [], table.aside)
            self._pool.unref_slabs(mine)
            self._leave(s)
        self._tier.evict(ids)
        self.num_sent += len(slabs)

    def _full_near(self, seq: Sequence) -> list[int]:
        aside: list[int] = seq.tables[self._group].aside
        return [slab for slab in aside[: self._ends[seq.seq_id] // self._block_size] if slab >= 0]


def selections_of(
    keeping: Keeping, pool: BlockPool, room: Room, outbox: Outbox, block_size: int,
    withdraw: Callable[[Sequence], None], tier: IdTier, leave: Callable[[Sequence], None],
) -> Selections:  # fmt: skip
    """For managers of one full group and no other."""
    if keeping.aside:
        return SetAside(keeping, pool, room, outbox, block_size, withdraw, tier, leave)
    return Selections(keeping, 0, pool, room, outbox, block_size, withdraw)
