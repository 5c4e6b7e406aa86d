"""A text whose blocks are read from its end while it is computed from its front, until both meet.

Source: Cake, Jin et al., arXiv 2410.03065, section 4. The link's speed shows while it is used: how many blocks came in
the time that others took to be computed says where both will meet, and chunks are half of the way there, so that little
is computed that was about to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq
    from penstock.kv.cursor import PrefixCursor


class BothEnds:
    """`boundary`: from this block on up to `end` all have come. Blocks and chunks in blocks."""

    __slots__ = ("_arrived", "_at", "_chunk", "_good", "_size", "_slabs", "boundary", "cursor", "end", "seq")

    def __init__(self, seq: Seq, first: int, end: int, block_size: int) -> None:
        """`seq` has just been given the memory of all blocks up to `end`."""
        self.seq = seq
        self._slabs = [table.ids[:end] for table in seq.tables]
        self.cursor: PrefixCursor = seq.node
        self.boundary = self.end = end
        self._good: set[int] = set()
        self._size = block_size
        self._chunk, self._arrived, self._at = 1, 0, first

    def came(self, block: int) -> None:
        """A block was read."""
        self._arrived += 1
        self._good.add(block)
        while self.boundary - 1 in self._good:
            self.boundary -= 1

    def most(self, start: int) -> int:
        """Tokens that may be computed from `start` on: up to what has come, and the rest of a block that was begun."""
        end = max(self.boundary, -(-start // self._size))
        return min(end * self._size - start, self._chunk * self._size - start % self._size)

    def computed(self) -> int:
        """The sequence has computed more. Returns the tokens that it has now, with what it has met.

        Both meet between blocks: one that was begun is computed to its end, in memory of the sequence's own
        (`KVManager.grow` copies it, for the load refers to the other), where nothing was read to. Without a step in
        flight for it only: these know where they began.
        """
        num_tokens = self.seq.num_computed
        at, end = num_tokens // self._size, self.end * self._size
        if num_tokens >= end:
            return num_tokens
        if num_tokens % self._size == 0 and at >= self.boundary:
            return end
        done, arrived = at - self._at, self._arrived
        if done > 0:
            left = max(1, self.boundary - at)
            self._chunk = max(1, min(left, left * done // (2 * (done + arrived)) if arrived else 2 * self._chunk))
            self._at, self._arrived = at, 0
        return num_tokens

    def holds(self, first: int) -> bool:
        """Whether the tables have, from block `first` on, what was read to."""
        tables = self.seq.tables
        return all(table.ids[first : self.end] == ids[first:] for table, ids in zip(tables, self._slabs, strict=True))
