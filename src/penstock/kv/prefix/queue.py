"""Which entry goes first: a heap with lazy deletion, ordered by an eviction policy."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from penstock.core.protocols import EvictionPolicy
from penstock.kv.prefix.node import DEMOTED

_SERIALS = count(1)
"""Of all queues together: an entry may leave one, where its old number stays in the heap, and enter another."""


class EvictionQueue:
    """Entries that may be given up. Each needs attributes `rank` and `queued` (0 outside of any queue), which the
    queue owns.

    Entries of a smaller `rank` go first; among those of one the policy decides.

    Pushing, discarding and popping cost O(log n): a discarded entry stays in the heap under a number that its `queued`
    no longer shows, and is skipped when it comes up.
    """

    __slots__ = ("_heap", "_live", "_policy")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[int, Any, int, Any]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, entry: Any) -> None:
        """Add an entry, or put it in its new place after its key changed. Equal keys go in order of pushing."""
        if not entry.queued:
            self._live += 1
        entry.queued = next(_SERIALS)
        heappush(self._heap, (entry.rank, self._policy.key(entry), entry.queued, entry))
        if len(self._heap) > 2 * self._live + 64:  # dead weight must not grow with the engine's life
            self._heap = [item for item in self._heap if item[3].queued == item[2]]
            heapify(self._heap)

    def discard(self, entry: Any) -> None:
        """Take an entry out, if it is in."""
        if entry.queued:
            entry.queued = 0
            self._live -= 1

    def pop(self) -> Any | None:
        """The entry that goes first, taken out; None if there is none."""
        heap = self._heap
        while heap:
            _, _, serial, entry = heappop(heap)
            if entry.queued == serial:
                entry.queued = 0
                self._live -= 1
                return entry
        return None

    def first_key(self) -> tuple[int, Any] | None:
        """Rank, and key by the policy, of the entry that goes first; None if there is none."""
        heap = self._heap
        while heap and heap[0][3].queued != heap[0][2]:
            heappop(heap)
        return (heap[0][0], heap[0][1]) if heap else None

    def first_is_demoted(self) -> bool:
        """Whether what goes first was demoted."""
        heap = self._heap
        while heap and heap[0][0] == DEMOTED:
            if heap[0][3].queued == heap[0][2]:
                return True
            heappop(heap)
        return False

    def entries(self) -> list[Any]:
        """All entries, in no particular order."""
        return [entry for _, _, serial, entry in self._heap if entry.queued == serial]
