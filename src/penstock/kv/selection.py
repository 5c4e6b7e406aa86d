"""What sequences give up of their caches, and when: docs/concepts/paged-memory.md.

A selection takes place at positions that follow from the sequence alone (`SelectionConfig.next_position`): a sequence
that is preempted and computed again forgets the same. What is computed behind one is lossy: it stays out of the prefix
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from penstock.config.held import kept_blocks, most_blocks, num_over
from penstock.config.selection import Keeping
from penstock.core.sequence import NEVER, Sequence
from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.cursor import PrefixCursor
from penstock.kv.growth import apply_growth, plan_growth
from penstock.kv.lines import apply_lines, cut_lines, line_blocks, num_missing, plan_lines, share_table
from penstock.kv.outbox import Outbox
from penstock.kv.room import Room, Want


class KeepAll:
    """Nobody gives anything up: what a manager asks of its strategy, and the answers where there is none.

    What is asked in every step is asked only where `Sequence.next_selection` says so; it stays NEVER here.
    """

    num_cut = 0
    """Selections that took something away."""
    num_sent = 0
    """Blocks that were set aside and went to the tier."""
    stays = False
    """Whether a sequence that was cut still needs the blocks that the prefix cache has of it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def limit(self, seq: Sequence, limit: int) -> int:
        """How many of `limit` tokens a match may skip."""
        return limit

    def blocks_to_admit(self, seq: Sequence, num_tokens: int) -> int:
        """The most blocks that `seq` holds on its way to `num_tokens` tokens, of which it knows the first by now."""
        return line_blocks(num_tokens, self._block_size)

    def enter(self, seq: Sequence) -> None:
        """`seq` was admitted. Mutates: seq.next_selection, seq.taint_start."""

    def coming(self, running: Iterable[Sequence]) -> int:
        """Blocks that those who run will still take for their prompts, or for all they knew before a preemption."""
        return 0

    def grow(self, seq: Sequence, start: int, end: int) -> bool:
        """As `KVManager.grow`, from position `start` on, for a sequence that has a selection ahead."""
        raise NotImplementedError

    def keeps(self, seq: Sequence, end: int) -> int:
        """Tokens per line that the rank shall choose once `seq` has computed `end` tokens; 0: it has nothing to do."""
        raise NotImplementedError

    def passed(self, seq: Sequence) -> bool:
        """`seq` has computed up to its next selection. Whether it has lost something by that. Mutates: seq."""
        raise NotImplementedError

    def cut(self, seq: Sequence, counts: Seq[int]) -> None:
        """`seq` keeps what the rank has chosen, `counts` slots per line."""
        raise NotImplementedError

    def share(self, table: BlockTable, pool: BlockPool, parent: Sequence, child: Sequence) -> BlockTable:
        """The table of a fork, with a reference on everything in it."""
        return share_table(table, pool, parent.num_computed, self._block_size)

    def release(self, seq: Sequence, table: BlockTable, pool: BlockPool) -> None:
        """`seq` gives up all that is in `table`."""
        pool.unref_slabs(reversed(table.held))
        pool.unref_slabs(table.spare, unseen=True)
        for pages in table.held_pages:
            pool.unref_pages(reversed(pages))


class Selections(KeepAll):
    """For managers of one full group, `group`, and no other."""

    def __init__(
        self, keeping: Keeping, group: int, pool: BlockPool, room: Room, outbox: Outbox, block_size: int,
        withdraw: Callable[[Sequence], None],
    ) -> None:  # fmt: skip
        """`withdraw`: makes the prefix cache forget what it has of a sequence, as far as nobody else needs it."""
        self._keeping, self._config = keeping, keeping.config
        self._withdraw = withdraw
        super().__init__(block_size)
        self._group, self._pool, self._room, self._outbox = group, pool, room, outbox

    def blocks_to_admit(self, seq: Sequence, num_tokens: int) -> int:
        most = most_blocks(self._keeping, seq.num_known, self._block_size, seq.prompt_len)
        more = -((seq.num_known - num_tokens) // self._block_size)
        return min(super().blocks_to_admit(seq, num_tokens), most + more)

    def coming(self, running: Iterable[Sequence]) -> int:
        return sum(map(self._coming, running))

    def _coming(self, seq: Sequence) -> int:
        if seq.num_known - seq.num_computed - seq.num_inflight <= 1:
            return 0  # it has started to generate
        table: BlockTable = seq.tables[self._group]
        held = len(table.ids)
        if table.layers is not None:
            held = sum(map(len, table.layers)) // len(table.layers)
        was_cut = bool(table.dropped)
        most = most_blocks(self._keeping, seq.num_known, self._block_size, seq.prompt_len, was_cut=was_cut)
        return max(0, most - held)

    def limit(self, seq: Sequence, limit: int) -> int:
        """A selection takes place behind tokens that have run, and those whose attention decides have to run, too."""
        if self._keeping.drops == "nothing":
            return limit
        if self._keeping.watches == "all":
            return 0
        unseen = self._config.options.observe if self._keeping.watches == "recent" else 1
        end = 0
        while end - unseen < limit:
            end = self._config.next_position(end, seq.prompt_len)
            if self._num_over(end, 0) > 0:
                return max(0, min(limit, end - unseen))
        return limit

    def enter(self, seq: Sequence) -> None:
        if self._keeping.drops != "nothing":
            seq.next_selection = self._config.next_position(seq.num_computed, seq.prompt_len)
        elif seq.taint_start is None:
            seq.taint_start = seq.prompt_len  # what is generated has not read everything

    def keeps(self, seq: Sequence, end: int) -> int:
        if self._keeping.drops != "tokens":
            return 0
        dropped = min(seq.tables[self._group].dropped, default=0)
        return self._config.budget.of(end) if self._num_over(end, dropped) > 0 else 0

    def _num_over(self, num_tokens: int, dropped: int) -> int:
        return num_over(self._keeping, num_tokens, dropped, self._block_size)

    def passed(self, seq: Sequence) -> bool:
        """Cuts whole blocks; tokens are cut once the rank has chosen (`cut`)."""
        seq.next_selection = self._config.next_position(seq.num_computed, seq.prompt_len)
        seq.writable = 0
        return self._keeping.drops == "blocks" and self._cut_blocks(seq)

    def grow(self, seq: Sequence, start: int, end: int) -> bool:
        """Where the positions end at a selection that takes something away, memory for its copies is set aside as well:
        what a sequence forgets must not depend on how much memory others have left.
        """
        g, size = self._group, self._block_size
        table = seq.tables[g]
        if table.layers is not None and table.dropped:
            lines = plan_lines(table, self._pool, start, end, size)
            if not self._reserve(seq, end, Want(g, 0, lines.num_pages)):
                return False
            if lines.num_pages:
                apply_lines(table, self._pool, lines, seq.seq_id, g, self._outbox)
            most = min(len(p) * size + d for p, d in zip(table.layers, table.dropped, strict=True))
        else:
            dropped = table.dropped[0] if table.dropped else 0
            plan = plan_growth(table, self._pool, (start - dropped) // size, line_blocks(end - dropped, size))
            if not self._reserve(seq, end, Want(g, plan.num_slabs, plan.num_pages)):
                return False
            if plan.num_slabs or plan.num_pages:
                apply_growth(table, self._pool, plan, seq.seq_id, g, self._outbox)
            most = table.num_blocks * size + dropped
        # A step that reaches a selection has to say so: it does not go the quick way.
        seq.writable = min(most, seq.next_selection - 1)
        return True

    def _reserve(self, seq: Sequence, end: int, want: Want) -> bool:
        """Room for `want`, and for copies if there is a selection at `end`: these are taken now, as `spare`.

        What is kept of blocks that the prefix cache has, too, is copied, so that it need not forget them. If there is
        no room for that, it has to: then the sequence takes its blocks back.
        """
        table: BlockTable = seq.tables[self._group]
        num = self._num_copies(seq, end) - len(table.spare)
        if num <= 0:
            return self._room.reserve([want])
        if not self._room.reserve([want._replace(num_slabs=want.num_slabs + num)]):
            self._withdraw(seq)
            num = self._num_copies(seq, end) - len(table.spare)
            if not self._room.reserve([want._replace(num_slabs=want.num_slabs + max(0, num))]):
                return False
        table.spare += self._pool.alloc_slabs(max(0, num)) or ()
        return True

    def _num_copies(self, seq: Sequence, end: int) -> int:
        """Slabs at most for what a selection at `end` keeps of blocks that others look at, or will until then."""
        table: BlockTable = seq.tables[self._group]
        if end != seq.next_selection or self._num_over(end, min(table.dropped, default=0)) <= 0:
            return 0
        kept = kept_blocks(self._keeping, end, self._block_size)
        cursor: PrefixCursor = seq.node
        if cursor.next_commit != NEVER:
            return kept
        pool = self._pool
        if table.layers is None:
            return min(kept, sum(pool.refs[slab] > 1 for slab in table.ids))
        shared = sum(pool.page_refs[page] > 1 for pages in table.layers for page in pages)
        return min(kept, line_blocks(shared, pool.pages_per_slab))

    def cut(self, seq: Sequence, counts: Seq[int]) -> None:
        table = seq.tables[self._group]
        num = num_missing(table, self._pool, counts, self._block_size)
        assert num <= len(table.spare) * self._pool.pages_per_slab, f"{seq}: copies of {num} pages were not foreseen"
        cut_lines(table, self._pool, counts, seq.num_computed, self._block_size, seq.seq_id, self._group, self._outbox)
        self.num_cut += 1

    def _cut_blocks(self, seq: Sequence) -> bool:
        """Sinks and the most recent blocks stay, the blocks between them go: nothing is moved.

        Blocks that the prefix cache has too are copied: it must be able to give its own up.
        """
        table, size, pool = seq.tables[self._group], self._block_size, self._pool
        dropped = table.dropped[0] if table.dropped else 0
        sinks = line_blocks(self._config.options.sinks, size)
        num = self._num_over(seq.num_computed, dropped)
        if num <= 0:
            return False
        kept = table.ids[:sinks] + table.ids[sinks + num :]
        shared = [i for i, slab in enumerate(kept) if pool.refs[slab] > 1]
        assert len(shared) <= len(table.spare), f"{seq}: copies of {len(shared)} blocks were not foreseen"
        for i in shared:
            slab = table.spare.pop()
            self._outbox.copy_slab(self._group, kept[i], slab)
            pool.unref(kept[i])
            kept[i] = slab
        pool.unref_slabs(table.spare, unseen=True)
        pool.unref_slabs(table.ids[sinks : sinks + num])
        table.ids, table.dropped, table.spare = kept, [dropped + num * size], []
        self._outbox.whole_table(seq.seq_id, self._group, table)
        self.num_cut += 1
        return True
