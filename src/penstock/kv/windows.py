"""Sliding windows: which blocks of a sequence, and of a prefix in the cache, are still needed in each window group.

Source: Mistral 7B, arXiv 2310.06825, section 2 (rolling buffer cache); here blocks leave whole, and through the prefix
cache's back door (`window_pool`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

from penstock.core.batch import GONE
from penstock.core.cache_spec import CacheGroup, CacheSpec
from penstock.core.protocols import PrefixCache
from penstock.core.sequence import NEVER
from penstock.core.sequence import Sequence as Seq
from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.cursor import PrefixMatch
from penstock.kv.outbox import Outbox
from penstock.kv.window_pool import WindowPool

Block = tuple[int, ...]
"""What the prefix cache keeps of a block: slabs of full groups and handles of window groups, in group order."""


class Windows:
    """The window groups of a manager. `groups`: their indices; with none of them most methods have nothing to do."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: Sequence[BlockPool],
        block_size: int,
        step_tokens: int | None,
        outbox: Outbox,
    ) -> None:
        self.groups = tuple(g.index for g in groups if g.spec.window is not None)
        self._pools: dict[int, WindowPool] = {}
        for g in self.groups:
            pool = pools[g]
            assert isinstance(pool, WindowPool)
            self._pools[g] = pool
        self._specs: dict[int, CacheSpec] = {g: groups[g].spec for g in self.groups}
        per_token = [g.index for g in groups if g.spec.per_token]
        self._column = {g: per_token.index(g) for g in self.groups}
        self._block_size = block_size
        self._outbox = outbox
        self._step_tokens = sys.maxsize if step_tokens is None else step_tokens

    @property
    def num_hollowed(self) -> int:
        """Blocks that lost their memory in some group, since start."""
        return sum(pool.num_hollowed for pool in self._pools.values())

    # -- what the prefix cache still has -------------------------------------------------------------------------

    def match(
        self,
        cache: PrefixCache,
        namespace: bytes,
        tokens: array[int],
        most: int,
        keys: list[bytes],
        at_checkpoint: bool,
    ) -> tuple[Any, int, tuple[tuple[int, ...], ...]]:
        """`cache.match`, but only a prefix counts behind which every group still has all that the next token sees.

        Also returns the handles of that, group by group.
        """
        entry, num_blocks = cache.match(namespace, tokens, most, keys, at_checkpoint)
        if not num_blocks or not self.groups:
            return entry, num_blocks, ()
        path = cache.path(entry)
        longest = self.longest_visible(path[:num_blocks])
        while num_blocks and longest[num_blocks] < num_blocks:
            entry, num_blocks = cache.match(namespace, tokens, longest[num_blocks], keys, at_checkpoint)
        return entry, num_blocks, self.tails(path, num_blocks)

    def longest_visible(self, path: list[Block]) -> list[int]:
        """For every n up to len(path): the longest prefix of at most n blocks behind which all that the next token
        sees is alive."""
        longest = [0]
        runs = dict.fromkeys(self.groups, 0)  # living blocks without a gap, up to here
        for n, block in enumerate(path, 1):
            whole = True
            for g in self.groups:
                runs[g] = runs[g] + 1 if self._pools[g].slab_of(block[self._column[g]]) != GONE else 0
                whole = whole and runs[g] >= n - self._specs[g].first_block(n * self._block_size, self._block_size)
            longest.append(n if whole else longest[-1])
        return longest

    def tails(self, path: list[Block], num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """For each group the handles of what is visible behind the first `num_blocks` blocks of a path."""
        tails = []
        for g in self.groups:
            first = self._specs[g].first_block(num_blocks * self._block_size, self._block_size)
            tails.append(tuple(block[self._column[g]] for block in path[first:num_blocks]))
        return tuple(tails)

    # -- admission -----------------------------------------------------------------------------------------------

    def can_admit(self, seq: Seq, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether every group has, or can make, room for what `seq` will hold at one time, and for all of
        `num_tokens` that goes beyond its known tokens (the samples' margin)."""
        size = self._block_size
        matched = match.num_tokens // size
        end = -(-num_tokens // size)
        known = min(end, -(-seq.num_known // size))
        begin = _begin(seq, match.num_tokens)
        for j, g in enumerate(self.groups):
            spec, pool = self._specs[g], self._pools[g]
            first = spec.first_block(begin, size)
            tail = match.tails[j][max(0, first - matched + len(match.tails[j])) :] if matched else ()
            most = spec.most_blocks(known * size, self._step_tokens, size)
            need = max(0, min(known - max(first, matched), most - len(tail))) + end - known
            # What is matched stops being idle the moment it is admitted.
            taken = sum(pool.is_idle(pool.slab_of(handle)) for handle in tail)
            if need > pool.num_free + pool.num_idle - taken:
                return False
        return True

    def enter(self, seq: Seq, g: int, handles: list[int]) -> None:
        """Give an admitted sequence the table of a group: of the matched blocks those that it will see."""
        first = self._specs[g].first_block(_begin(seq, len(handles) * self._block_size), self._block_size)
        pool = self._pools[g]
        slabs = [pool.slab_of(handle) for handle in handles[first:]]
        pool.ref_slabs(slabs)
        table: BlockTable = seq.tables[g]
        table.ids = [GONE] * first + slabs
        table.base = first

    # -- following a sequence ------------------------------------------------------------------------------------

    def slide(self, seq: Seq) -> int:
        """Drop the blocks that lie before a window; returns `next_slide`. Mutates: seq.tables, references."""
        for g in self.groups:
            table: BlockTable = seq.tables[g]
            pool = self._pools[g]
            first, table.base = table.base, self._specs[g].first_block(seq.num_computed, self._block_size)
            gone = [GONE] * (table.base - first)
            if table.layers is None:
                pool.unref_slabs(table.ids[first : table.base])
                table.ids[first : table.base] = gone
                self._outbox.table(seq.seq_id, g, first, gone)
            for layer, pages in enumerate(table.layers or ()):
                pool.unref_pages(pages[first : table.base])
                pages[first : table.base] = gone
                self._outbox.table(seq.seq_id, g, first, gone, layer)
        return self.next_slide(seq.tables)

    def next_slide(self, tables: list[BlockTable]) -> int:
        """Computed tokens from which on the first block of some table is not visible any more."""
        due = NEVER
        for g in self.groups:
            window = self._specs[g].window
            assert window is not None
            due = min(due, (tables[g].base + 1) * self._block_size + window - 1)
        return due

    def names(self, g: int, slabs: list[int]) -> Sequence[int]:
        """What the prefix cache shall call these blocks of a group: new handles for window groups, else their slabs."""
        return self._pools[g].new_handles(len(slabs)) if g in self._pools else slabs

    def keep(self, g: int, handles: Sequence[int], slabs: list[int]) -> None:
        """The cache took new blocks with these handles; where the sequence has their slabs, it keeps those too."""
        for handle, slab in zip(handles, slabs, strict=False):
            if slab != GONE:
                self._pools[g].keep(handle, slab)

    def share(self, g: int, handles: list[int], mine: list[int]) -> list[int]:
        """The cache had these blocks already: which slabs the sequence shall have from now on.

        Handles that are dead come alive with the sequence's own slabs.
        """
        pool = self._pools[g]
        theirs = []
        for handle, slab in zip(handles, mine, strict=False):
            kept = pool.slab_of(handle)
            if slab != GONE and kept == GONE:
                pool.keep(handle, slab)
            theirs.append(slab if GONE in (slab, kept) else kept)
        return theirs


def _begin(seq: Seq, num_matched: int) -> int:
    """Tokens that `seq` will have computed once it is admitted and brought back."""
    if seq.swapped is not None:
        return max(num_matched, int(seq.swapped.num_tokens))
    return num_matched if seq.claim is None else max(num_matched, int(seq.claim.num_tokens))
