"""Cache-aware scheduling: who finds most of its prompt in the prefix cache goes first, while it is still there.

`order=lpm` (default, online): longest matched prefix first among the oldest `window` waiting requests, with a bound on
being overtaken. `order=dfs` (offline): the prompts in depth-first order of their radix tree, which computes every
shared block once; no bound, since new arrivals could go first for ever.

A request whose next block is being computed by another one waits for it instead of computing it a second time.
Work per step does not grow with the queue (`lpm`): at most `window` requests are ranked by what was last known of them,
and at most 2 * `lookups` are looked up: the ones looked up longest ago, and the ones about to be offered.
Sources: SGLang, arXiv 2312.07104, section 3 (longest shared prefix first; depth-first order is optimal offline).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence, Status
from penstock.sched.policy.fcfs import Fcfs, arrival_key
from penstock.sched.policy.prefix_order import DepthFirst, NextBlocks

ORDERS = ("lpm", "dfs")


class Candidate:
    """What is known of one of the oldest waiting requests.

    Attributes:
        match: tokens of its prompt in the cache when it was last looked up.
        looked_up: number of the step in which that was; -1 never.
        overtaken: younger requests admitted before it.
        since_s: when the first of them was.
    """

    __slots__ = ("looked_up", "match", "overtaken", "seq", "since_s")

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.match = 0
        self.looked_up = -1
        self.overtaken = 0
        self.since_s = 0.0


class CacheAware(Fcfs):
    """Args:
    order: "lpm" or "dfs".
    window: oldest waiting requests among which `lpm` chooses.
    lookups: see above; also the most requests offered to one step.
    max_overtaken: a request overtaken by so many younger ones goes first, and so does ...
    max_wait_s: ... one that was first overtaken so many seconds ago. Overdue requests go in order of arrival.
    """

    name = "cache-aware"

    def __init__(
        self,
        order: str = "lpm",
        window: int = 128,
        lookups: int = 32,
        max_overtaken: int = 128,
        max_wait_s: float = 30.0,
    ) -> None:
        if order not in ORDERS:
            raise ConfigError(f"order is {order!r}; choose one of: {', '.join(ORDERS)}", field="order")
        for knob, value in (("window", window), ("lookups", lookups), ("max_overtaken", max_overtaken)):
            if value < 1:
                raise ConfigError(f"{knob} is {value}; it must be at least 1", field=knob)
        self.window = window
        self.lookups = lookups
        self.max_overtaken = max_overtaken
        self.max_wait_s = max_wait_s
        self._depth_first = DepthFirst() if order == "dfs" else None
        self._candidates: dict[int, Candidate] = {}
        self._offered: list[Sequence] = []
        self._kv: Any = None
        self._now_s = 0.0
        self._step = 0

    def begin_step(self, now_s: float, kv: Any) -> None:
        self._now_s = now_s
        self._kv = kv
        self._step += 1

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        ordered = super().order(running, ())
        if self._kv is None:  # nobody to ask: first come, first served
            return ordered + list(waiting)
        if self._depth_first is not None:
            ranked = self._depth_first.walk(waiting)
        else:
            self._count_overtaking()
            ranked = self._longest_first(waiting)
        self._offered = self._leaders(running, ranked)
        return ordered + self._offered

    # -- longest prefix first ------------------------------------------------------------------------------------

    def _count_overtaking(self) -> None:
        """Those offered last time that run now have overtaken every older candidate that still waits."""
        # Preempted again at once, one is not counted; aborted while it waited, one is: the bound is about right.
        admitted = [seq for seq in self._offered if seq.status is not Status.WAITING]
        for seq in admitted:
            self._candidates.pop(seq.seq_id, None)
        for candidate in self._candidates.values():
            mine = arrival_key(candidate.seq)
            younger = sum(arrival_key(seq) > mine for seq in admitted)
            if younger and not candidate.overtaken:
                candidate.since_s = self._now_s
            candidate.overtaken += younger

    def _longest_first(self, waiting: Seq[Sequence]) -> Iterator[Sequence]:
        oldest = islice((seq for seq in waiting if not seq.held), self.window)
        known = self._candidates
        self._candidates = {seq.seq_id: known.get(seq.seq_id) or Candidate(seq) for seq in oldest}
        window = list(self._candidates.values())
        for candidate in sorted(window, key=lambda c: c.looked_up)[: self.lookups]:
            self._look_up(candidate)
        overdue = [c for c in window if self._is_overdue(c)]
        rest = [c for c in window if not self._is_overdue(c)]
        rest.sort(key=lambda c: -c.match)  # stable: order of arrival among equals
        return (c.seq for c in overdue + rest)

    def _is_overdue(self, candidate: Candidate) -> bool:
        if candidate.overtaken == 0:
            return False
        return candidate.overtaken >= self.max_overtaken or self._now_s - candidate.since_s >= self.max_wait_s

    def _look_up(self, candidate: Candidate) -> int:
        if candidate.looked_up != self._step:
            candidate.match = self._kv.match(candidate.seq).num_tokens
            candidate.looked_up = self._step
        return candidate.match

    # -- not computing the same block twice ----------------------------------------------------------------------

    def _leaders(self, running: Seq[Sequence], ranked: Iterator[Sequence]) -> list[Sequence]:
        """Of the first `lookups` of `ranked`, those whose next block nobody else is about to compute.

        An overdue request waits for nobody. In depth-first order everybody behind a follower waits with it.
        """
        size = self._kv.block_size
        taken = NextBlocks(size)
        for seq in islice((s for s in running if not s.is_decoding), self.lookups):
            taken.add(seq, seq.num_computed // size * size)
        leaders = []
        for seq in islice(ranked, self.lookups):
            candidate = self._candidates.get(seq.seq_id)
            match = self._look_up(candidate) if candidate else self._kv.match(seq).num_tokens
            overdue = candidate is not None and self._is_overdue(candidate)
            if taken.follows(seq, match) and not overdue:
                if self._depth_first is not None:
                    break
                continue
            taken.add(seq, match)
            leaders.append(seq)
        return leaders
