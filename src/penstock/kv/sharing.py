"""Between block tables and the prefix cache: whose slabs a sequence has, and what the cache gets of it.

The cache keeps of a block one number per group with block tables: a full group's is the slab itself, a window group's a
handle (`window_pool`).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.protocols import PrefixCache
from penstock.core.sequence import Sequence as Seq
from penstock.kv.block_pool import BlockPool
from penstock.kv.cursor import PrefixCursor
from penstock.kv.events import EventRecorder
from penstock.kv.outbox import Outbox
from penstock.kv.windows import Block, Windows


class Sharing:
    """`groups`: indices of the groups with block tables, in whose order the cache's tuples come."""

    def __init__(
        self,
        groups: tuple[int, ...],
        pools: Sequence[BlockPool],
        windows: Windows,
        cache: PrefixCache,
        outbox: Outbox,
        block_size: int,
    ) -> None:
        self.groups = groups
        self._pools = pools
        self._windows = windows
        self._cache = cache
        self._outbox = outbox
        self._block_size = block_size
        self.events: EventRecorder | None = None

    def enter(self, seq: Seq, blocks: list[Block]) -> None:
        """Fill the empty tables of an admitted sequence with matched blocks. Mutates: seq.tables, references."""
        for j, g in enumerate(self.groups):
            ids = [block[j] for block in blocks]
            if g in self._windows.groups:
                self._windows.enter(seq, g, ids)
            else:
                self._pools[g].ref_slabs(ids)
                seq.tables[g].ids = ids

    def insert(self, seq: Seq, cursor: PrefixCursor, end: int) -> None:
        """Put the blocks from the cursor's up to `end` into the cache, which may refuse the rest of them.

        Where the cache has a block already, the sequence goes over to it and drops its own. Mutates: cursor.entry,
        cursor.num_blocks, seq.tables, references.
        """
        first = cursor.num_blocks
        size = self._block_size
        columns = [seq.tables[g].ids[first:end] for g in self.groups]
        names = [self._windows.names(g, column) for g, column in zip(self.groups, columns, strict=True)]
        blocks: list[Block] = list(zip(*names, strict=True)) if names else [()] * (end - first)
        tokens = seq.token_ids[first * size : end * size].tobytes()
        cursor.entry, existing, num_new = self._cache.insert(cursor.entry, tokens, blocks)
        known = len(existing)
        cursor.num_blocks = first + known + num_new
        if num_new and self.events is not None:
            self.events.entered(seq, first + known, blocks[known : known + num_new])
        for j, g in enumerate(self.groups):
            pool, mine = self._pools[g], columns[j]
            theirs = [block[j] for block in existing]
            if g in self._windows.groups:
                self._windows.keep(g, names[j][known : known + num_new], mine[known:])
                theirs = self._windows.share(g, theirs, mine)
            else:
                pool.ref_slabs(mine[known : known + num_new])
            if theirs != mine[:known]:
                # After a swap blocks may be gone that no commit has seen: they are neither mine nor theirs.
                held = max(0, seq.tables[g].base - first)
                pool.ref_slabs(theirs[held:])
                pool.unref_slabs(mine[held:known])
                seq.tables[g].ids[first : first + known] = theirs
                self._outbox.table(seq.seq_id, g, first, theirs)
