"""For batches: requests that share a beginning run together, those that generate most for their prompts first.

Whoever waits is put in order in rounds. A round is a plan of all who wait when it begins: groups that share a beginning
(`prefix_groups`), one after the other, so that it is computed once, by the first of a group, and is there for all of
it, however small the cache. Groups that generate much for each token of their prompts go first: their decodes then
run beside the prompts of those behind, and no long tail of few decodes is left. Whoever comes later is in the next
round, so nobody waits for ever. Who enters is decided by memory: blocks that are shared count once.
Source: Zheng et al., BatchLLM, arXiv 2412.03594 (explicit global prefix sharing; prefix-sharing groups are scheduled
together, larger ratio of decode to prefill first; memory-centric token batching).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence, Status
from penstock.sched.policy.fcfs import Fcfs
from penstock.sched.policy.prefix_groups import PrefixGroup, prefix_groups
from penstock.sched.policy.prefix_order import MAX_STALE, NextBlocks, kinship


class BatchLLM(Fcfs):
    """Args: lookups: waiting requests that are looked up in the cache and offered to one step, at most."""

    name = "batchllm"

    def __init__(self, lookups: int = 64) -> None:
        if lookups < 1:
            raise ConfigError(f"lookups is {lookups}; it must be at least 1", field="lookups")
        self.lookups = lookups
        self._kv: Any = None
        self._line: list[Sequence] = []
        """Those of this round, in order, some of whom do not wait any more."""
        self._begun = False

    def begin_step(self, now_s: float, kv: Any) -> None:
        self._kv = kv

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        ordered = super().order(running, ())
        if self._kv is None or not waiting:
            return ordered + list(waiting)
        self._plan(waiting)
        return ordered + self._leaders(running, (s for s in self._line if s.status is Status.WAITING and not s.held))

    # -- the round -----------------------------------------------------------------------------------------------

    def _plan(self, waiting: Seq[Sequence]) -> None:
        """A new round if this one is over, or nobody of it has begun."""
        left = sum(seq.status is Status.WAITING for seq in self._line)
        self._begun = self._begun or left < len(self._line)
        if left == 0 or (not self._begun and len(waiting) > left):
            self._line = self._round(waiting)
            self._begun = False
        elif len(self._line) - left > MAX_STALE:
            self._line = [seq for seq in self._line if seq.status is Status.WAITING]

    def _round(self, waiting: Seq[Sequence]) -> list[Sequence]:
        last = self._line[-1] if self._line else None
        groups = prefix_groups(waiting, self._kv.block_size)

        def rank(group: PrefixGroup) -> tuple[bool, float, int]:
            return (not goes_on(group, last), -group.ratio, group.members[0].arrival)

        return [seq for group in sorted(groups, key=rank) for seq in group.members]

    # -- not computing the same block twice ----------------------------------------------------------------------

    def _leaders(self, running: Seq[Sequence], ranked: Iterator[Sequence]) -> list[Sequence]:
        """The first of `ranked`, up to one whose next block somebody else is about to compute."""
        size = self._kv.block_size
        taken = NextBlocks(size)
        for seq in islice((s for s in running if not s.is_decoding), self.lookups):
            taken.add(seq, seq.num_computed // size * size)
        leaders = []
        for seq in islice(ranked, self.lookups):
            match = self._kv.match(seq).num_tokens
            if taken.follows(seq, match):
                break
            taken.add(seq, match)
            leaders.append(seq)
        return leaders


def goes_on(group: PrefixGroup, last: Sequence | None) -> bool:
    """Whether `last`, of the round before, has left what a group begins with."""
    if last is None or not group.num_shared:
        return False
    first, n = group.members[0], group.num_shared
    return kinship(first) == kinship(last) and first.token_ids[:n] == last.token_ids[:n]
