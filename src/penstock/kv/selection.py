"""What sequences give up of their caches, and when: DESIGN 3.5.

A selection takes place at positions that follow from the sequence alone (`SelectionConfig.next_position`): a sequence
that is preempted and computed again forgets the same. What is computed behind one is lossy: it stays out of the prefix
cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.config.selection import Keeping
from penstock.core.sequence import Sequence
from penstock.kv.block_pool import BlockPool
from penstock.kv.growth import apply_growth, plan_growth
from penstock.kv.lines import apply_lines, cut_lines, line_blocks, num_missing, plan_lines
from penstock.kv.outbox import Outbox
from penstock.kv.room import Room, Want


class Selections:
    """For managers of one full group, `group`, and no other."""

    def __init__(
        self, keeping: Keeping, group: int, pool: BlockPool, room: Room, outbox: Outbox, block_size: int
    ) -> None:
        self._keeping, self._config = keeping, keeping.config
        self._group, self._pool, self._room, self._outbox = group, pool, room, outbox
        self._block_size = block_size
        self.num_cut = 0
        """Selections that took something away."""
        self.num_missed = 0
        """Selections that found no memory to copy to: the sequence goes on with all it had."""

    def limit(self, seq: Sequence, limit: int) -> int:
        """How many of `limit` tokens a match may skip: a selection takes place behind tokens that have run, and those
        whose attention decides have to run, too."""
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
        """`seq` was admitted. Mutates: seq.next_selection, seq.taint_start."""
        if self._keeping.drops != "nothing":
            seq.next_selection = self._config.next_position(seq.num_computed, seq.prompt_len)
        elif seq.taint_start is None:
            seq.taint_start = seq.prompt_len  # what is generated has not read everything

    def keeps(self, seq: Sequence, end: int) -> int:
        """Tokens per line that the rank shall choose once `seq` has computed `end` tokens; 0: it has nothing to do."""
        if end != seq.next_selection or self._keeping.drops != "tokens":
            return 0
        dropped = min(seq.tables[self._group].dropped, default=0)
        return self._config.budget.of(end) if self._num_over(end, dropped) > 0 else 0

    def _num_over(self, num_tokens: int, dropped: int) -> int:
        """What has to go of a line that has dropped so many of `num_tokens` tokens: tokens, or whole blocks."""
        over = num_tokens - dropped - self._config.budget.of(num_tokens)
        if self._keeping.drops == "tokens":
            return max(over, 1) if self._keeping.always else over
        # The blocks of the sinks stay, and what the newest tokens stand in.
        size = self._block_size
        blocks = (num_tokens - dropped) // size - line_blocks(self._config.options.sinks, size)
        return min(line_blocks(max(over, 0), size), blocks)

    def passed(self, seq: Sequence) -> bool:
        """`seq` has computed up to its next selection, or not yet. Cuts whole blocks. Mutates: seq."""
        if seq.num_computed < seq.next_selection:
            return False
        seq.next_selection = self._config.next_position(seq.num_computed, seq.prompt_len)
        seq.writable = 0
        return self._keeping.drops == "blocks" and self._cut_blocks(seq)

    def grow(self, seq: Sequence, start: int, end: int) -> bool:
        """Make positions start ... end-1 writable, all or nothing; see `KVManager.grow`."""
        g, size = self._group, self._block_size
        table = seq.tables[g]
        if table.layers is not None and table.dropped:
            lines = plan_lines(table, self._pool, start, end, size)
            if not self._room.reserve([Want(g, 0, lines.num_pages)]):
                return False
            if lines.num_pages:
                apply_lines(table, self._pool, lines, seq.seq_id, g, self._outbox)
            most = min(len(p) * size + d for p, d in zip(table.layers, table.dropped, strict=True))
        else:
            dropped = table.dropped[0] if table.dropped else 0
            plan = plan_growth(table, self._pool, (start - dropped) // size, line_blocks(end - dropped, size))
            if not self._room.reserve([Want(g, plan.num_slabs, plan.num_pages)]):
                return False
            if plan.num_slabs or plan.num_pages:
                apply_growth(table, self._pool, plan, seq.seq_id, g, self._outbox)
            most = table.num_blocks * size + dropped
        # A step that reaches a selection has to say so: it does not go the quick way.
        seq.writable = min(most, seq.next_selection - 1)
        return True

    def cut(self, seq: Sequence, counts: Seq[int]) -> bool:
        """`seq` keeps what the rank has chosen, `counts` slots per line. False, and nothing changed, without memory."""
        table = seq.tables[self._group]
        want = Want(self._group, 0, num_missing(table, self._pool, counts, self._block_size))
        if not self._room.reserve([want]):
            self.num_missed += 1
            return False
        cut_lines(table, self._pool, counts, seq.num_computed, self._block_size, seq.seq_id, self._group, self._outbox)
        self.num_cut += 1
        return True

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
        if not self._room.reserve([Want(self._group, len(shared), 0)]):
            self.num_missed += 1
            return False
        for i, slab in zip(shared, pool.alloc_slabs(len(shared)) or (), strict=True):
            self._outbox.copy_slab(self._group, kept[i], slab)
            pool.unref(kept[i])
            kept[i] = slab
        pool.unref_slabs(table.ids[sinks : sinks + num])
        table.ids, table.dropped = kept, [dropped + num * size]
        self._outbox.whole_table(seq.seq_id, self._group, table)
        self.num_cut += 1
        return True
