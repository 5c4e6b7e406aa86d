"""A text whose blocks are read from its end while it is computed from its front, until both meet.

Source: Cake, Jin et al., arXiv 2410.03065, section 4. Measured rates say where both will meet, again before every
chunk; nothing is computed that will have come before it ends. While nobody knows them, and when nothing comes that
should have, the blocks that came in the time that others took to be computed say it, and chunks are half of the way
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.kv.load_rates import GAIN, GAIN_S, LoadRates, Places

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq
    from penstock.kv.cursor import PrefixCursor

CHUNK_S = 0.25
"""Computing goes on for about so long before what has come is looked at again."""
SLACK_S, MOST_S = 0.03, 5.0
"""What is expected to come is waited for so much longer than expected, and in all for no longer."""


class BothEnds:
    """`boundary`: from this block on up to `end` all have come. `is_first`: nothing of the sequence was computed
    before. Blocks and chunks in blocks."""

    __slots__ = (
        "_arrived", "_at", "_begun", "_chunk", "_good", "_places", "_rates", "_size", "_slabs", "_until_s", "boundary",
        "cursor", "end", "goal", "is_first", "over", "seq",
    )  # fmt: skip

    def __init__(
        self, seq: Seq, first: int, end: int, block_size: int, *, goal: int = 0, rates: LoadRates, places: Places
    ) -> None:
        """`seq` has just been given the memory of all blocks up to `end`.

        `goal`: only blocks from there on are read. It is computed up to there at once, and then waits for the rest
        as long as `rates` let it expect, twice; 0: where both meet shows on the way.
        """
        self.seq = seq
        self.goal, self.over = goal, False
        self.is_first = seq.scheduled_s is None
        self._rates, self._places = rates, places
        self._until_s: float | None = None
        self._slabs = [table.ids[:end] for table in seq.tables]
        self.cursor: PrefixCursor = seq.node
        self.boundary = self.end = end
        self._good: set[int] = set()
        self._size, self._begun = block_size, False
        self._chunk, self._arrived, self._at = max(1, goal - first), 0, first

    def came(self, block: int) -> None:
        """A block was read."""
        self._arrived += 1
        self._begun = True
        self._good.add(block)
        while self.boundary - 1 in self._good:
            self.boundary -= 1
        if not self.goal:
            self._until_s = None  # they come: what is missing is expected anew

    def most(self, start: int) -> int:
        """Tokens that may be computed from `start` on: up to what has come, and the rest of a block that was begun."""
        at, chunk = start // self._size, self._chunk
        if self.goal:
            if at >= self.goal and self._waits(at):
                return 0
        elif not self.over and at < self.boundary and self._rates.computes and self._places.known:
            meeting = self._meeting(at)
            if meeting > at:
                chunk = max(1, min(meeting - at, round(CHUNK_S * self._rates.tokens_s / self._size)))
            elif start % self._size == 0 and self._waits(at):
                return 0
        end = max(self.boundary, -(-start // self._size))
        return min(end * self._size - start, chunk * self._size - start % self._size)

    def _meeting(self, at: int) -> int:
        """Where both will meet as far as is known; `at` if what is missing comes about as soon by itself."""
        lead, end, size, begun = self._places.lead, self.boundary, self._size, self._begun
        meeting = self._rates.meeting(self._places, at, max(at, lead), end, size, begun=begun)
        seconds = max(self._rates.compute_s(at * size, meeting * size), self._places.seconds(meeting, end, begun=begun))
        gains = seconds < GAIN * self._places.seconds(at, end, begun=begun) - GAIN_S
        return meeting if gains or at < lead else at

    def _waits(self, at: int) -> bool:
        """What is missing from block `at` on is about to come."""
        if self.over or at >= self.boundary:
            return False
        if self._until_s is None:
            left_s = self._places.seconds(at, self.boundary, begun=self._begun)
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
