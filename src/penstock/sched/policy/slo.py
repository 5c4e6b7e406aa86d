"""Earliest deadline first, as far as deadlines can be met; and no prefill so large that a stream loses its pace.

A request's first token is due `slo_ttft_s` after its arrival. Waiting requests go in order of that, but for those that
would miss it all the same: from the first that would be late on, the one with most work left so far goes behind, which
keeps most of them in time (Moore). Those behind get what is left, and once in a while the oldest of them goes first, so
that nobody waits for ever. What steps take is learnt from the times at which steps begin (`sched.costs`).

A token is due `slo_tpot_s` after the one before it, on average. Prompt tokens of a step are as many as the stream with
least time in hand allows, at least `min_chunk`; nobody enters while one more decode would make steps too long for those
that run. A promise that steps without any prompt could not keep either is not looked at.

`Request.priority` is a class: each level puts a deadline back by `class_s`. Preemption is that of `fcfs`, by deadline.
Sources: Liu and Layland, JACM 1973 (earliest deadline first); Moore, Management Science 1968 (fewest late jobs); the
mean pace as a promise: AdaServe, arXiv 2501.12162, section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence, Status
from penstock.sched.costs import LearntCosts
from penstock.sched.policy.fcfs import Fcfs

WITHOUT = 8
"""Steps in a row in which prompts may have too little time (`SloAware.whole`)."""


class LastStep:
    """What a step was given, as it shows when the next one begins."""

    __slots__ = ("began_s", "decodes", "mark", "starts")

    def __init__(self, began_s: float, decodes: list[Sequence]) -> None:
        self.began_s, self.decodes = began_s, decodes
        self.mark = decodes[0].num_computed + decodes[0].num_inflight if decodes else 0
        self.starts: dict[int, tuple[Sequence, int]] = {}
        """Sequences that may have been given prompt tokens, and where they stood."""

    @property
    def decoded(self) -> bool:
        """Whether it ran: an order alone is no step."""
        return bool(self.decodes) and self.decodes[0].num_computed + self.decodes[0].num_inflight > self.mark

    @property
    def num_prefill(self) -> int:
        return sum(
            max(0, seq.num_computed + seq.num_inflight - (start or seq.num_cached))
            for seq, start in self.starts.values()
        )

    @property
    def ended(self) -> bool:
        """Whether all of it have ended: what followed may have been idle time."""
        seqs = [*self.decodes, *(seq for seq, _ in self.starts.values())]
        return all(seq.status is Status.FINISHED for seq in seqs)


class SloAware(Fcfs):
    """Args:
    ttft_s, tpot_s: promises to requests that name none, in seconds; 0: none. Without one, a first token is due after
        `class_s`.
    patience_s: who has been late for so long goes first, one for every `turns` others that enter.
    class_s: what a level of priority puts a deadline back.
    min_chunk: prompt tokens per step at least, so that no crowd of streams can stop prefills.
    window: waiting requests, first due first, that are looked at in a step.
    whole: 1: prompts get all that is left of a step's tokens as soon as there is time for so many, and one until then,
        for at most WITHOUT steps in a row: kernels work in tiles, and a part of one takes as long.
    """

    name = "slo"

    def __init__(
        self, ttft_s: float = 1.0, tpot_s: float = 0.1, patience_s: float = 30.0, turns: int = 4, class_s: float = 60.0,
        min_chunk: int = 16, window: int = 256, whole: int = 0,
    ) -> None:  # fmt: skip
        if not min(ttft_s, tpot_s, patience_s) >= 0:
            raise ConfigError("ttft_s, tpot_s and patience_s of slo must not be negative", field="ttft_s")
        if not (class_s > 0 and turns >= 1 and min_chunk >= 1 and window >= 1):
            raise ConfigError("class_s of slo must be above 0, and turns, min_chunk and window at least 1",
                              field="class_s")  # fmt: skip
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.patience_s, self.turns, self.class_s = patience_s, turns, class_s
        self.min_chunk, self.window, self.whole = min_chunk, window, whole
        self.costs = LearntCosts()
        self._now_s = 0.0
        self._last: LastStep | None = None
        self._first: dict[int, tuple[float, int]] = {}
        """Of sequences that decode: when the first token of theirs was seen, and how many there were then."""
        self._offered: list[Sequence] = []
        self._turns = 0
        self._overdue: Sequence | None = None
        self._room = self._budget = 0
        """Prompt tokens that this step may be given; what was left of its budget when the first were."""
        self._spare_s = float("inf")
        self._without = 0
        """Seconds that prompts may take in this step; steps in a row in which they had no time."""

    # -- time ----------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float, kv: Any) -> None:
        last, self._last = self._last, None
        if last is not None and now_s > last.began_s and not last.ended:
            num_prefill = last.num_prefill
            if self.whole and num_prefill == 1:
                num_prefill = 0
            if num_prefill or last.decoded:
                self.costs.observe(len(last.decodes), num_prefill, now_s - last.began_s)
        self._now_s = now_s

    def due_s(self, seq: Sequence) -> float:
        """When its first token is due."""
        request = seq.request
        promised = request.slo_ttft_s if request.slo_ttft_s is not None else self.ttft_s
        return request.arrival_s + (promised or self.class_s) + request.priority * self.class_s

    def key(self, seq: Sequence) -> tuple[int, ...]:
        """(when its first token is due in microseconds, arrival, sample)."""
        return (round(1e6 * self.due_s(seq)), seq.arrival, seq.index)

    # -- order ---------------------------------------------------------------------------------------------------

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in running:
            (decodes if seq.is_decoding else prefills).append(seq)
        self._count_turns()
        live = [seq for seq in decodes if not seq.held]  # who waits for a sibling or a tool has no pace to keep
        self._room, self._budget = self._prefill_room(live), -1
        self._last = LastStep(self._now_s, decodes) if decodes or prefills or waiting else None
        enter = [] if live and not self._bears_one_more(live) else waiting[: self.window]
        self._offered = [seq for seq in enter if not seq.held]
        line = self._line(sorted([*prefills, *self._offered], key=self.key))
        return [*decodes, *line, *(waiting[self.window :] if enter else ())]

    def _line(self, candidates: Seq[Sequence]) -> list[Sequence]:
        """Those that can make it, first due first; then those that cannot."""
        token_s, time_s = self.costs.prefill_token_s, self._now_s
        heap: list[tuple[float, int, Sequence]] = []
        late: dict[int, Sequence] = {}
        for seq in candidates:
            work_s = token_s * max(1, seq.lag)
            heappush(heap, (-work_s, seq.seq_id, seq))
            time_s += work_s
            if time_s > self.due_s(seq) and seq.num_generated == 0:
                longest_s, _, left = heappop(heap)
                time_s += longest_s
                late[left.seq_id] = left
        self._overdue = None
        if not late:
            return list(candidates)
        ahead = [seq for seq in candidates if seq.seq_id not in late]
        behind = sorted(late.values(), key=lambda s: (s.request.priority, s.arrival, s.index))
        oldest = min(behind, key=self.key)
        if self._turns >= self.turns and self._now_s >= self.due_s(oldest) + self.patience_s:
            self._overdue = oldest
            behind.remove(oldest)
            ahead.insert(0, oldest)
        return ahead + behind

    def _count_turns(self) -> None:
        """How many have entered since somebody went first who had been late for long enough."""
        overdue = self._overdue
        if overdue is not None and overdue.status is not Status.WAITING and overdue.lag <= 0:
            self._turns = 0
        self._turns += sum(seq.status is not Status.WAITING and seq is not overdue for seq in self._offered)
        self._offered = []

    # -- streams -------------------------------------------------------------------------------------------------

    def promised_tpot_s(self, seq: Sequence) -> float:
        """0: nothing is."""
        promised = seq.request.slo_tpot_s
        return self.tpot_s if promised is None else promised

    def _prefill_room(self, decodes: Seq[Sequence]) -> int:
        """Prompt tokens that leave every stream in time whose promise can be kept at all."""
        known, self._first = self._first, {}
        token_s, step_s = self.costs.prefill_token_s, self.costs.decode_s(len(decodes))
        hand_s = float("inf")
        for seq in decodes:
            promised = self.promised_tpot_s(seq)
            if not promised:
                continue
            first_s, num = self._first[seq.seq_id] = known.get(seq.seq_id) or (self._now_s, seq.num_generated)
            if step_s <= promised:
                due_s = first_s + promised * (seq.num_generated - num + 1)
                hand_s = min(hand_s, due_s - self._now_s)
        self._spare_s = hand_s - step_s
        if hand_s == float("inf") or token_s <= 0 or self.whole:
            return 1 << 30
        return max(self.min_chunk, int((hand_s - step_s) / token_s))

    def _bears_one_more(self, decodes: Seq[Sequence]) -> bool:
        """Whether steps stay short enough for those that run if one more decodes."""
        now_s, then_s = self.costs.decode_s(len(decodes)), self.costs.decode_s(len(decodes) + 1)
        return all(not now_s <= self.promised_tpot_s(s) < then_s for s in decodes)

    def num_tokens(self, seq: Sequence, lag: int, budget_left: int) -> int:
        if lag == 1:
            return min(1, budget_left)
        if self._budget < 0:
            self._budget = budget_left
            if self.whole:
                late = self.costs.prefill_token_s * budget_left > self._spare_s
                self._without = self._without + 1 if late and self._without < WITHOUT else 0
                self._room = 1 if self._without else budget_left  # one: somebody may have to go on
        room = self._room - (self._budget - budget_left)
        if self._last is not None:
            self._last.starts[seq.seq_id] = (seq, seq.num_computed + seq.num_inflight)
        return max(0, min(lag, budget_left, room))
