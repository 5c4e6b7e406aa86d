"""As many drafts as pay, or none: the expected tokens per second of each step decide.

In every step the likeliest drafts of all sequences are made, as many as give most expected tokens per expected second;
no drafts at all must be beaten by a margin. Chances come from `acceptance`, seconds from `cost`, the best number from
`planner`. Sources: SpecServe, arXiv 2503.05096 (draft length from a model of efficiency and the load at hand);
AdaServe, arXiv 2501.12162, section 4 (a step's budget goes to the drafts likeliest to be accepted, after those that
sequences with a deadline need).

What nobody can know is bounded by an exploration budget, in seconds. It holds START_STEPS steps at first, grows by
SHARE of all time, and by what drafts have won, or shrinks by what they have lost, against plain decoding; while it is
empty nobody drafts. So whatever the text does, drafting costs at most SHARE of the time and a few steps. Sequences
whose drafts do not pay are probed now and then (`probes`).

Deciding costs time itself, which counts where a step takes a millisecond. There a decision is kept for a few steps,
while the same sequences run and as many drafts are accepted as expected; verifications meanwhile are learned from at
once before the next decision. A decision that nobody drafts is kept longer, and until shortly before its end steps are
not even looked at (`_num_skipped`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from penstock.core.batch import SchedulerOutput, StepOutput, Verified
from penstock.core.protocols import StepTimer
from penstock.core.sequence import Sequence
from penstock.sched.drafts.acceptance import MOST, PRIOR, AcceptanceModel
from penstock.sched.drafts.cost import DraftCosts, StepCosts, UnitTimer
from penstock.sched.drafts.planner import Planner
from penstock.sched.drafts.probes import Limits, Probes
from penstock.sched.drafts.slo import SloProgress, slo_of_request
from penstock.sched.drafts.state import SequenceState, can_draft, tightened

SHARE = 0.005
"""Of all time, what finding out may cost."""
START_STEPS = 3.0
MAX_STEPS = 12.0
"""Plain steps that the exploration budget holds at first, and at most: what was won long ago pays for no losses now."""
WARM_UP = 4
"""Plain steps that are timed before anybody drafts, unless the first takes what was predicted."""
REMEASURE = 256
FIRST_MEASURE = 8
"""Steps with drafts after which a plain one is run, to know what it takes now: few at first, then twice as many each
time, up to REMEASURE. The next one if that was never known and the timer is found to be wrong."""
DECIDING_S = 2e-4
"""What a decision takes, about, and for 48 sequences twice that: on a slow core whose caches hold weights."""
DECIDING_SHARE = 0.015
"""Of a step, what decisions may take, if keeping them for KEPT steps suffices for it."""
KEPT = 8
REFUSED = 8
MAX_REFUSED = 128
"""The decision that nobody drafts is kept for REFUSED times the square of that many steps, at most for MAX_REFUSED."""
MEASURED = 2
"""Of the steps for which it is kept, the last ones: they are timed. In all before them this class only counts."""
AROUND = 4.0
"""What stands around a step may be longer than it by this factor; beyond it the engine had nothing to do."""


class _Ran(NamedTuple):
    """A step in which everybody decoded. `num_made`: drafts that were run; `gained`: tokens beyond one each; `limit`:
    drafts of the sequence that had most; `num_asked`: sequences with room.
    """

    duration_s: float
    draft_s: float
    num_rows: int
    context: int
    num_made: int
    gained: int
    limit: int
    num_asked: int


class AdaptiveDrafts:
    """See `core.protocols.DraftController`. All it knows comes from results and recorded times, so runs replay.

    `num_drafts`, `depth`: drafts of a sequence in a step at most, and how many on one path. `timer` predicts steps;
    None: they are learned from nothing. `branching`: the drafter's drafts are trees. `slo_of`: seconds per output
    token that a sequence was promised, or None.
    """

    name = "adaptive"

    def __init__(
        self,
        num_drafts: int,
        depth: int,
        *,
        timer: StepTimer | None = None,
        branching: bool = False,
        slo_of: Callable[[Sequence], float | None] = slo_of_request,
    ) -> None:
        self.costs = StepCosts(timer or UnitTimer())
        self.draft_costs = DraftCosts()
        self.acceptance = AcceptanceModel(num_drafts, depth, branching=branching)
        self.exploration_s: float | None = None
        """None: nothing was measured yet."""
        self.num_steps = 0
        self.states: dict[int, SequenceState] = {}
        self._planner = Planner(self.costs, self.draft_costs)
        self._probes = Probes(self.costs, self.draft_costs, num_drafts, depth)
        self._depth = depth
        self._slo_of = slo_of
        self._unlearned: list[SequenceState] = []
        self._since_plain = 0
        self._measure_after = FIRST_MEASURE
        self._prompts = 0  # prompt tokens of the last step
        self._prefill_tokens = 0  # those to be expected in the next one
        self._draft_rate = 1.0  # share of proposals that hold a draft
        self._any_slo = False
        self._limits: Limits = {}
        self._decide_at = 0  # the step in which is decided anew
        self._decided_for: tuple[int, Sequence | None, int] = (0, None, 0)
        self._expected = self._surprise = 0.0  # tokens gained in a step; how much more they were since the decision
        self._began_s: float | None = None  # when the last step began
        self._ran: _Ran | None = None  # a step whose time is not known to its end yet
        self._after_drafts = False  # the step before the one that is settled next had drafts
        self._num_measured = 0  # steps, until the exploration budget is filled
        self._refused_until = 0  # the step up to which nobody drafts
        self._num_skipped = 0  # steps for which nobody drafts and nothing is looked at
        self._skipped_s = 0.0  # what they have taken so far
        self._num_rows = 0  # sequences that run
        self._refused = 0.0  # the best chance of a draft token that was not worth it

    # -- before a step ---------------------------------------------------------------------------------------------

    def begin_step(self, running: Seq[Sequence], now_s: float | None = None) -> Mapping[int, tuple[int, int]]:
        if self.num_steps < self._refused_until:
            same = not running or (len(running) == self._num_rows and running[-1] is self._decided_for[1])
            if same or self._is_refused_to(running):
                if not self._num_skipped:
                    self._settle(now_s)
                return self._limits
            self._refused_until = 0
            self._resume()
        self._settle(now_s)
        if not running:
            return {}
        who = (len(running), running[-1], self._prefill_tokens)
        if self.num_steps >= self._decide_at or self._decided_for != who:
            self._decided_for = who
            self._limits = self._decide(running)
            if not self._limits and not self._any_slo:
                self._refused_until, self._num_rows = self._decide_at, len(running)
                self._num_skipped = max(0, self._decide_at - self.num_steps - MEASURED)
        return self._limits

    def _is_refused_to(self, running: Seq[Sequence]) -> bool:
        """Whether nobody drafts among these either: about as many, none with a deadline, and the prior promises no more
        than those to whom it was refused."""
        num_rows = len(running)
        if num_rows.bit_length() != self._num_rows.bit_length() or self.acceptance.chances[PRIOR, 0] > self._refused:
            return False
        refused = all(self._slo_of(seq) is None for seq in running)
        if refused:
            self._num_rows, self._decided_for = num_rows, (num_rows, running[-1], self._prefill_tokens)
        return refused

    def _resume(self) -> None:
        """Time has passed without drafts; what a rest earns is what any step earns."""
        self._num_skipped = 0
        self._began_s, self._after_drafts = None, False
        if self.exploration_s is not None:
            self.exploration_s += SHARE * self._skipped_s
            self._probes.earn(self._skipped_s)
        self._skipped_s = 0.0

    def _decide(self, running: Seq[Sequence]) -> Limits:
        step = self._decide_at = self.num_steps
        self._surprise = 0.0
        seqs = can_draft(running)
        if not seqs or self._since_plain >= self._measure_after:
            return {}
        if self.exploration_s is None and self._began_s is not None:
            return {}  # what a plain step takes is not known yet
        if self.exploration_s is not None and self.exploration_s <= 0.0:
            context = sum([seq.num_computed for seq in seqs])
            earned_s = SHARE * self.costs.seconds(len(seqs), context, len(seqs))
            most = _steps_refused(self._steps_to_keep(len(seqs), context))
            self._decide_at = step + max(1, min(most, int(-self.exploration_s / earned_s)))
            self._refused = 1.0
            return {}
        states, context = [], 0
        for seq in seqs:
            state = self.states.get(seq.seq_id)
            states.append(self._add(seq) if state is None else state)
            context += seq.num_computed
        if self._unlearned:
            self._learn()
        chances = self.acceptance.chances[[state.slot for state in states]]
        plan = self._planner.plan(chances, context, self._prefill_tokens, self._draft_rate)
        depth = self._depth
        limits: Limits = {}
        if plan:
            for seq, limit in zip(seqs, plan, strict=True):
                if limit:
                    limits[seq.seq_id] = (limit, limit if limit < depth else depth)
        if self._any_slo:
            self._tighten(states, limits, context)
        probing = self._probes.add(limits, states, step, context, self._prefill_tokens, self.exploration_s)
        keep = self._steps_to_keep(len(seqs), context)
        if not limits:
            soonest = max(self._probes.next_step, min([state.due_at for state in states]), step + keep)
            self._decide_at = min(soonest, step + _steps_refused(keep))
            self._refused = float(chances[:, 0].max())
            if self.exploration_s is not None:  # of a decision to draft it is a part of what the steps are seen to take
                self.exploration_s -= _deciding_s(len(seqs))
        elif not probing and not self._any_slo and keep > 1:
            self._decide_at = step + keep
            gained = sum([sum(row[:limit]) for row, limit in zip(chances.tolist(), plan, strict=True)])
            self._expected = self._draft_rate * gained
        return limits

    def _steps_to_keep(self, num_rows: int, context: int) -> int:
        """One, where steps take so long that deciding in each of them costs nothing."""
        worth_s = DECIDING_SHARE * self.costs.seconds(num_rows, context, num_rows)
        return max(1, min(KEPT, round(_deciding_s(num_rows) / worth_s)))

    def _add(self, seq: Sequence) -> SequenceState:
        slo_s = self._slo_of(seq)
        slo = None if slo_s is None else SloProgress(slo_s)
        state = self.states[seq.seq_id] = SequenceState(seq.seq_id, self.acceptance.add(), self.num_steps, slo)
        self._any_slo = self._any_slo or slo_s is not None
        return state

    def _tighten(self, states: list[SequenceState], limits: Limits, context: int) -> None:
        width = len(states) + sum([limit for limit, _ in limits.values()])
        step_s = self.costs.seconds(len(states), context, width)
        tightened(
            limits,
            states,
            self.acceptance.chances[[t.slot for t in states]].tolist(),
            self._draft_rate,
            step_s,
            self._depth,
        )

    # -- after a step ------------------------------------------------------------------------------------------------

    def observe(self, output: SchedulerOutput, result: StepOutput) -> None:
        rows = output.scheduled
        if self._num_skipped and rows:
            self.num_steps += 1
            self._skipped_s += result.duration_s
            self._num_skipped -= 1
            if not self._num_skipped:
                self._resume()
            return
        verified = result.verified
        num_tokens = context = limit = num_asked = 0
        for row in rows:
            num_tokens += row.num_tokens
            context += row.start
            if row.num_drafts:
                num_asked += 1
                if row.num_drafts > limit:
                    limit = row.num_drafts
        num_rows = len(rows)
        prompts = num_tokens - num_rows
        self._prefill_tokens = prompts if self._prompts else 0  # one chunk alone says nothing of the next step
        self._prompts = prompts
        if not rows:
            return
        self.num_steps = step = self.num_steps + 1
        if step & 15 == 0:
            self.acceptance.refresh_prior()
        num_made = gained = 0
        if verified:
            num_made, gained = self._count_verified(verified)
        if self._any_slo:
            self._follow_slos(result)
        if result.duration_s <= 0.0:
            return
        if prompts == 0 and context:
            took = (result.duration_s, result.draft_s)
            self._ran = _Ran(*took, num_rows, context, num_made, gained, limit, num_asked)
        if self.exploration_s is not None:
            self.exploration_s += SHARE * result.duration_s
            self._probes.earn(result.duration_s)

    def _count_verified(self, verified: list[Verified]) -> tuple[int, int]:
        """Notes what came of drafts; returns how many were run, and the tokens beyond one for each sequence."""
        num_made = gained = 0
        draft_rate, evidence = self._draft_rate, self.acceptance.evidence
        for one in verified:
            made = one.num_drafted
            accepted = len(one.token_ids) - 1
            gained += accepted
            draft_rate += ((1.0 if made else 0.0) - draft_rate) / 64
            state = self.states.get(one.seq_id)
            if not made or state is None:  # who had no draft says nothing about drafts
                continue
            num_made += made
            right, wrong = evidence(made, accepted + 1 - one.whole)
            if not state.num_verified:
                self._unlearned.append(state)
            if state.num_right + right <= MOST:
                state.num_verified += 1
                state.num_right += right
                state.num_wrong += wrong
        self._draft_rate = draft_rate
        self._surprise += gained - self._expected
        if abs(self._surprise) > 1.5 * self._expected + 1.0 + self._decided_for[0] / 16:
            self._decide_at = 0
        return num_made, gained

    def _learn(self) -> None:
        """What was verified since the last decision goes into the estimates."""
        heard, self._unlearned = [state for state in self._unlearned if state.slot >= 0], []
        if not heard:
            return
        slots = [state.slot for state in heard]
        before = self.acceptance.chances[slots, 0].tolist()
        self.acceptance.learn(
            slots, [t.num_right for t in heard], [t.num_wrong for t in heard], [t.num_verified for t in heard]
        )
        after = self.acceptance.chances[slots, 0].tolist()
        self._probes.heard(heard, before, after, self.num_steps)
        self.acceptance.update_prior(slots[self.num_steps % len(slots)], min([t.num_verified for t in heard]))
        for state in heard:
            state.num_verified = state.num_right = state.num_wrong = 0

    def _settle(self, now_s: float | None) -> None:
        """The next step begins: what the last one took is known with all that stood around it.

        What an engine does between two steps (scheduling, committing, telling clients, this class) costs time too, and
        drafts make more of it: for small models it decides whether they pay. Source: own measurements, docs/log.md.
        """
        ran, self._ran = self._ran, None
        began_s, self._began_s = self._began_s, now_s
        if ran is None:
            return
        around_s = 0.0
        if began_s is not None and now_s is not None:
            around_s = min(max(0.0, now_s - began_s - ran.duration_s), AROUND * ran.duration_s)
        forward_s = max(ran.duration_s - ran.draft_s, 0.0) + around_s
        if not ran.num_asked:
            if self._since_plain >= self._measure_after:
                self._measure_after = min(2 * self._measure_after, REMEASURE)
            self._since_plain = 0
            after_drafts, self._after_drafts = self._after_drafts, False
            if (
                after_drafts
                or self.num_steps & 3 == 0
                or self.num_steps + MEASURED > self._decide_at
                or self.exploration_s is None
            ):
                self.costs.observe(ran.num_rows, ran.context, ran.num_rows, forward_s, after_drafts=after_drafts)
                self._start_budgets(ran)
            return
        self._after_drafts = True
        # Before it is learned from: what comes once (a drafter's first touch of its memory) is not what drafts cost.
        expected_s = self._expected_seconds(ran)
        self.costs.observe(ran.num_rows, ran.context, ran.num_rows + ran.num_made, forward_s)
        self._start_budgets(ran)
        if self.exploration_s is not None:
            self._account(ran, min(forward_s + ran.draft_s, 2.0 * expected_s))
        self.draft_costs.observe(ran.limit, ran.num_rows, ran.draft_s)

    def _start_budgets(self, ran: _Ran) -> None:
        """At first: once plain steps take what was predicted, or so many were measured that the slow ones of a cold
        start are not what counts."""
        self._num_measured += 1
        sure = self._num_measured > WARM_UP or self._began_s is None or not self.costs.surprising(ran.num_rows)
        if self.exploration_s is None and sure:
            plain_s = self.costs.seconds(ran.num_rows, ran.context, ran.num_rows)
            self.exploration_s = START_STEPS * plain_s
            self._probes.exploration_s = plain_s

    def _expected_seconds(self, ran: _Ran) -> float:
        seconds = self.costs.seconds(ran.num_rows, ran.context, ran.num_rows + ran.num_made)
        return seconds + self.draft_costs.seconds(ran.limit, ran.num_rows)

    def _account(self, ran: _Ran, took_s: float) -> None:
        """What a step with drafts has won or lost; `took_s` leaves out what somebody else's work may have added."""
        num_rows, context, seconds = ran.num_rows, ran.context, self.costs.seconds
        self._probes.pay(ran.num_made)
        self._since_plain = self._since_plain + 1 if ran.num_made else 0
        if self.costs.doubtful(num_rows):
            self._since_plain = self._measure_after
        plain_s = seconds(num_rows, context, num_rows)
        won_s = plain_s * (1.0 + ran.gained / num_rows) - took_s
        assert self.exploration_s is not None
        self.exploration_s = min(self.exploration_s + won_s, MAX_STEPS * plain_s)
        if self.exploration_s <= 0.0 or self._since_plain >= self._measure_after:
            self._decide_at = 0

    def _follow_slos(self, result: StepOutput) -> None:
        produced = {sampled.seq_id: 1 for sampled in result.sampled}
        produced.update({v.seq_id: len(v.token_ids) for v in result.verified})
        for seq_id, state in self.states.items():
            if state.slo is not None:
                state.slo.add(result.duration_s, produced.get(seq_id, 0))

    def forget(self, seq_id: int) -> None:
        state = self.states.pop(seq_id, None)
        if state is not None:
            self.acceptance.forget(state.slot)
            state.slot = -1


def _deciding_s(num_rows: int) -> float:
    return DECIDING_S * (1.0 + num_rows / 48)


def _steps_refused(keep: int) -> int:
    """Steps for which nobody drafts, where a decision to draft is kept for `keep`."""
    return min(REFUSED * keep * keep, MAX_REFUSED)
