"""Batches of requests whose outputs are expected to be alike in length: nobody waits long for the longest.

Request-level batching, as `static`, so that what a step has too much of is what the batch's longest member makes the
others wait. Of those that wait, the oldest `group` are ordered by what they are still expected to generate
(`Request.expected_tokens`), and batches are taken from that order, shortest first. With `tokens` a batch has as many
members as that many output tokens allow (variable batch size): short answers take little memory, so more of them run at
once. With `collect` whoever has not ended when the batch's expected length is reached gives its place up and is put
into a later batch of its group, with twice the room (failure collection); what it has generated stays.
Nobody starves: a group is served to its end before the next one is formed.
Source: Zheng et al., Response Length Perception and Sequence Scheduling, arXiv 2305.13144, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.base.errors import ConfigError
from penstock.core.lengths import room_for
from penstock.core.sequence import Sequence
from penstock.sched.policy.dynamic import Dynamic
from penstock.sched.policy.fcfs import arrival_key


class LengthAware(Dynamic):
    """Args:
    size: requests of a batch at most.
    group: requests that are ordered together, >= size.
    tokens: output tokens that a batch's members may be expected to make, together; 0: as many as `size` make.
    collect: 1: failures are collected; 0: a batch runs until its last member ends.
    timeout_s: as for `dynamic`.
    """

    name = "length-aware"

    def __init__(
        self, size: int = 8, group: int = 256, tokens: int = 0, collect: int = 1, timeout_s: float = 0.0
    ) -> None:
        super().__init__(timeout_s=timeout_s, size=size)
        if group < size or tokens < 0:
            raise ConfigError(f"group of length-aware must be at least its size, {size}, and tokens at least 0",
                              field="group")  # fmt: skip
        self.group = group
        self.tokens = tokens
        self.collect = bool(collect)
        self._group: set[int] = set()
        self._until: dict[int, int] = {}
        """By arrival: the tokens at which a member is a failure."""

    def leaves(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Seq[Sequence]:
        if not (self.collect and waiting):
            return ()
        late = [seq for seq in running if not seq.held and seq.num_generated >= self._until.get(seq.arrival, 1 << 40)]
        if late and all(seq.arrival in self._batch for seq in waiting):
            return ()  # nobody else would have the place
        self._batch.difference_update(seq.arrival for seq in late)
        return late

    def _launch(self, waiting: Seq[Sequence]) -> list[Sequence]:
        ready = [seq for seq in waiting if seq.arrival in self._group and not seq.held]
        if not ready:
            self._group = set()
            for seq in waiting:
                if len(self._group) == self.group:
                    break
                self._group.add(seq.arrival)
            ready = [seq for seq in waiting if seq.arrival in self._group]
        self._batch, longest = set(), 0
        for seq in sorted(ready, key=lambda s: (self._left(s), *arrival_key(s))):
            if seq.arrival in self._batch:
                continue
            left = max(longest, self._left(seq))
            if len(self._batch) == self.size or (self._batch and self.tokens and
                                                 left * (len(self._batch) + 1) > self.tokens):  # fmt: skip
                break
            self._batch.add(seq.arrival)
            longest = left
        self._until = {s.arrival: s.num_generated + longest for s in ready if s.arrival in self._batch}
        return self._members(waiting)

    @staticmethod
    def _left(seq: Sequence) -> int:
        return room_for(seq.request, seq.num_generated) - seq.num_generated
