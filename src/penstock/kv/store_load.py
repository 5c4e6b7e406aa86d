"""A text whose blocks are read from its end while it is computed from its front, until both meet.

Source: Cake, Jin et al., arXiv 2410.03065, section 4. The link's speed shows while it is used: how many blocks came in
the time that others took to be computed says where both will meet, and chunks are half of the way there, so that little
is computed that was about to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.kv.load_rates import LoadRates

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq
    from penstock.kv.cursor import PrefixCursor

SLACK_S, MOST_S = 0.03, 5.0
"""What is expected to come is waited for so much longer than expected, and in all for no longer."""


class BothEnds:
    """`boundary`: from this block on up to `end` all have come. Blocks and chunks in blocks."""

    __slots__ = (
        "_arrived", "_at", "_block_bytes", "_chunk", "_good", "_rates", "_size", "_slabs", "_until_s", "boundary",
        "cursor", "end", "goal", "over", "seq",
    )  # fmt: skip

    def __init__(
        self, seq: Seq, first: int, end: int, block_size: int, *, goal: int = 0, rates: LoadRates, block_bytes: int
    ) -> None:
        """`seq` has just been given the memory of all blocks up to `end`.

        `goal`: only blocks from there on are read. It is computed up to there at once, and then waits for the rest
        as long as `rates` let it expect, twice; 0: nobody knows where both will meet.
        """
        self.seq = seq
        self.goal, self.over = goal, False
        self._rates, self._block_bytes = rates, block_bytes
        self._until_s: float | None = None
        self._slabs = [table.ids[:end] for table in seq.tables]
        self.cursor: PrefixCursor = seq.node
        self.boundary = self.end = end
        self._good: set[int] = set()
        self._size = block_size
        self._chunk, self._arrived, self._at = max(1, goal - first), 0, first

    def came(self, block: int) -> None:
        """A block was read."""
        self._arrived += 1
        self._good.add(block)
        while self.boundary - 1 in self._good:
            self.boundary -= 1

    def most(self, start: int) -> int:
        """Tokens that may be computed from `start` on: up to what has come, and the rest of a block that was begun."""
        if self.goal and start >= self.goal * self._size and self._waits(start // self._size):
            return 0
        end = max(self.boundary, -(-start // self._size))
        return min(end * self._size - start, self._chunk * self._size - start % self._size)

    def _waits(self, at: int) -> bool:
        """What is missing from block `at` on is about to come."""
        if self.over or at >= self.boundary:
            return False
        if self._until_s is None:
            left_s = self._rates.load_s((self.boundary - at) * self._block_bytes)
            self._until_s = self._rates.elapsed_s + min(2 * left_s + SLACK_S, MOST_S)
        return self._rates.elapsed_s < self._until_s

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
            half = left * done // (2 * (done + arrived)) if arrived else 2 * self._chunk
            self._chunk = self.goal - at if at < self.goal else max(1, min(left, half))
            self._at, self._arrived = at, 0
        return num_tokens

    def holds(self, first: int) -> bool:
        """Whether the tables have, from block `first` on, what was read to."""
        tables = self.seq.tables
        return all(table.ids[first : self.end] == ids[first:] for table, ids in zip(tables, self._slabs, strict=True))
