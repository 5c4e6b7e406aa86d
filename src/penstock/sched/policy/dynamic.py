"""Dynamic batching: wait up to a timeout or until the batch is full, then launch; the batch runs to completion.

The request-level batching of general model servers, kept as a measured baseline. Sources: BATCH, SC 2020 (the two
knobs and what they trade); Clipper, NSDI 2017, section 4.3 (delayed batching).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence
from penstock.sched.policy.fcfs import Fcfs


class Dynamic(Fcfs):
    """Members of a batch enter as memory and budget allow, until one of them has ended: who has not begun by then waits
    for the next batch, or places would be filled again at every step. Nobody else enters until all have ended.

    Args:
        timeout_s: how long the oldest waiting request may wait for company before a batch is launched, seconds.
        size: requests of a full batch.

    The wait itself is `not_before_s`, for whoever drives the engine to honour; unheeded, a batch is launched as soon as
    the last one has ended.
    """

    name = "dynamic"

    def __init__(self, timeout_s: float = 0.05, size: int = 8) -> None:
        if not timeout_s >= 0:
            raise ConfigError(f"timeout_s is {timeout_s}; it must not be negative", field="timeout_s")
        if size < 1:
            raise ConfigError(f"size is {size}; a batch has at least one request", field="size")
        self.timeout_s = timeout_s
        self.size = size
        self._batch: set[int] = set()
        """Arrival numbers of the requests launched last: forks and preempted members belong to them too."""

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        members = self._members(waiting)
        if running and members:
            members = self._begun(running, members)
        if not running and not members:
            members = self._launch(waiting)
        return super().order(running, members)

    def not_before_s(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> float | None:
        """When the timeout of the oldest request ends, unless a batch runs, or enough requests wait to fill one."""
        if running or not waiting or self._members(waiting):
            return None
        arrivals: set[int] = set()
        for seq in waiting:
            arrivals.add(seq.arrival)
            if len(arrivals) >= self.size:
                return None
        return waiting[0].request.arrival_s + self.timeout_s

    def _members(self, waiting: Seq[Sequence]) -> list[Sequence]:
        if not self._batch:
            return []
        # Whoever waits for this batch came no later than its youngest request: the queue is sorted by arrival.
        last = max(self._batch)
        members = []
        for seq in waiting:
            if seq.arrival > last:
                break
            if seq.arrival in self._batch and not seq.held:
                members.append(seq)
        return members

    def _begun(self, running: Seq[Sequence], members: list[Sequence]) -> list[Sequence]:
        """Those who wait for the batch that runs; with one that has ended only such as came back to the queue."""
        there = {seq.arrival for seq in running} | {seq.arrival for seq in members}
        if self._batch <= there:
            return members
        late = {seq.arrival for seq in members if seq.scheduled_s is None} - {seq.arrival for seq in running}
        self._batch -= late
        return [seq for seq in members if seq.arrival not in late]

    def _launch(self, waiting: Seq[Sequence]) -> list[Sequence]:
        self._batch = set()
        for seq in waiting:
            if len(self._batch) == self.size and seq.arrival not in self._batch:
                break
            self._batch.add(seq.arrival)
        return self._members(waiting)
