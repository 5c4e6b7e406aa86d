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


class Front:
    """`boundary`: from this block on up to `end` all have come. Blocks and chunks in blocks."""

    __slots__ = ("_arrived", "_at", "_chunk", "_good", "_size", "boundary", "cursor", "end", "seq")

    def __init__(self, seq: Seq, first: int, end: int, block_size: int) -> None:
        self.seq = seq
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
        """Tokens that may be computed from `start` on: none beyond what has come."""
        return min(self.boundary * self._size - start, self._chunk * self._size - start % self._size)

    def computed(self) -> int:
        """The sequence has computed more. Returns the tokens that it has now, with what it has met.

        Without a step in flight for it only: these know where they began.
        """
        num_tokens = self.seq.num_computed
        at = num_tokens // self._size
        if (self._good and at >= self.boundary) or at >= self.end:
            return max(num_tokens, self.end * self._size)
        done, arrived = at - self._at, self._arrived
        if done > 0:
            left = self.boundary - at
            self._chunk = max(1, min(left, left * done // (2 * (done + arrived)) if arrived else 2 * self._chunk))
            self._at, self._arrived = at, 0
        return num_tokens
