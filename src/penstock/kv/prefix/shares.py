"""Whose blocks go first: tenants with more than their share of a tier make room for the others.

Whoever has most for its share gives up blocks (weighted max-min fairness): what a tenant does not use others may have,
and nobody loses a block to others while it has less, for its share, than one of them. Within a tenant the eviction
policy decides. Without shares there is one owner, and the policy decides alone.
"""

from __future__ import annotations

from typing import Any

from penstock.core.protocols import EvictionPolicy
from penstock.kv.prefix.node import Owner, PrefixNode, SlotCheckpoint
from penstock.kv.prefix.queue import EvictionQueue


class SharedQueue:
    """An eviction queue for each owner. `below`: of blocks in the tier below, not on the device."""

    def __init__(self, policy: EvictionPolicy, *, below: bool = False) -> None:
        self._policy = policy
        self._below = below
        self._queues: dict[Owner, EvictionQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, entry: PrefixNode) -> None:
        queue = self._queues.get(entry.owner)
        if queue is None:
            queue = self._queues[entry.owner] = EvictionQueue(self._policy)
        queue.push(entry)

    def discard(self, entry: PrefixNode) -> None:
        if entry.queued:
            self._queues[entry.owner].discard(entry)

    def pop(self) -> PrefixNode | None:
        queue = self._next()
        found: PrefixNode | None = None if queue is None else queue.pop()
        return found

    def first_key(self) -> tuple[int, Any] | None:
        """Of the entry that `pop` takes: see `EvictionQueue`."""
        queue = self._next()
        return None if queue is None else queue.first_key()

    def _next(self) -> EvictionQueue | None:
        """The queue whose first entry goes first."""
        queues = self._queues
        if len(queues) > 1:
            queues = {owner: queue for owner, queue in queues.items() if len(queue)}
        if len(queues) > 1:
            return queues[max(queues, key=self._excess)]
        return next(iter(queues.values()), None)

    def _excess(self, owner: Owner) -> float:
        return (owner.num_kept if self._below else owner.num_idle) / owner.share

    def pop_demoted(self) -> PrefixNode | None:
        """One that was demoted, whose-ever; None without any."""
        for queue in self._queues.values():
            if queue.first_is_demoted():
                found: PrefixNode | None = queue.pop()
                return found
        return None

    def entries(self) -> list[PrefixNode | SlotCheckpoint]:
        """All entries, in no particular order."""
        return [entry for queue in self._queues.values() for entry in queue.entries()]
