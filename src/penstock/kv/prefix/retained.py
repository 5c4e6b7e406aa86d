"""Nodes that leave after the others until a time, or before them: what hints say of them.

Times are those at which steps begin, which a run's log has.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from penstock.kv.prefix.node import DEMOTED, PLAIN, RETAINED, PrefixNode


class Retained:
    """A node's `rank` follows from what is told here, and from the time (`expire`)."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int, PrefixNode]] = []
        self._serials = count()
        self._room = 64

    def retain(self, node: PrefixNode, until_s: float) -> None:
        """It keeps the later one of two times."""
        if until_s > node.until_s:
            node.until_s, node.rank = until_s, RETAINED
            self._push(node)

    def demote(self, node: PrefixNode) -> None:
        """It goes before all others, unless it is retained."""
        if node.rank == PLAIN:
            node.rank = DEMOTED

    def copied(self, node: PrefixNode, upper: PrefixNode) -> None:
        """`upper` is a part of what was `node`."""
        upper.rank, upper.until_s = node.rank, node.until_s
        if node.until_s:
            self._push(upper)

    def expire(self, now_s: float) -> list[PrefixNode]:
        """Those whose time is over, which are like others now."""
        over = []
        while self.ends and self.ends[0][0] <= now_s:
            until_s, _, node = heappop(self.ends)
            if node.until_s == until_s:
                node.until_s, node.rank = 0.0, PLAIN
                over.append(node)
        return over

    def _push(self, node: PrefixNode) -> None:
        heappush(self.ends, (node.until_s, next(self._serials), node))
        if len(self.ends) > self._room:  # those that were evicted, or got more time, do not wait for their end
            self.ends = [item for item in self.ends if item[2].until_s == item[0]]
            heapify(self.ends)
            self._room = 64 + 2 * len(self.ends)
