"""As many guesses as pay, or none: the expected tokens per second of each step decide.

In every step the likeliest guesses of all sequences are made, as many as give most expected tokens per expected second;
no guess at all must be beaten by a margin. Chances come from `acceptance`, seconds from `cost`, the best number from
`planner`. Sources: SpecServe, arXiv 2503.05096 (draft length from a model of efficiency and the load at hand);
AdaServe, arXiv 2501.12162, section 4 (a step's budget goes to the guesses likeliest to be accepted, after those that
sequences with a deadline need).

What nobody can know is kept small by a purse, in seconds. It holds START_STEPS steps at first, gets SHARE of all time,
and what guesses have won or lost against plain decoding; while it is empty nobody guesses. So whatever the text does,
it costs at most SHARE of the time and a few steps. Sequences whose guesses do not pay are probed (`probes`).

Deciding costs time itself, which counts where a step takes a millisecond. There a decision is kept for a few steps,
while the same sequences run and guesses come out as was expected; what is heard meanwhile is learned at once before
the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from penstock.core.batch import SchedulerOutput, StepOutput, Verified
from penstock.core.protocols import StepTimer
from penstock.core.sequence import Sequence
from penstock.sched.drafts.acceptance import MOST, STRANGER, Beliefs
from penstock.sched.drafts.cost import DraftCosts, StepCosts, UnitTimer
from penstock.sched.drafts.planner import Planner
from penstock.sched.drafts.probes import Probes, Rooms
from penstock.sched.drafts.slo import Pace, slo_of_request
from penstock.sched.drafts.track import Track, guessers, tightened

SHARE = 0.005
"""Of all time, what finding out may cost."""
START_STEPS = 3.0
MAX_STEPS = 12.0
"""Plain steps that the purse holds at first, and at most: what was won long ago must not pay for losses now."""
WARM_UP = 4
"""Plain steps that are timed before anybody drafts, unless the first takes what was predicted."""
REMEASURE = 256
FIRST_MEASURE = 8
"""Steps with guesses after which a plain one is run, to know what it takes now: few at first, then twice as many each
time, up to REMEASURE. The next one if that was never known and the timer is found to be wrong."""
DECIDING_S = 2e-4
"""What a decision takes, about, and for 48 sequences twice that: on a slow core whose caches hold weights."""
DECIDING_SHARE = 0.015
"""Of a step, what decisions may take, if keeping them for KEPT steps suffices for it."""
KEPT = 8
QUIET = 8
LONGEST = 128
"""The decision that nobody drafts is kept for QUIET times the square of that many steps, at most for LONGEST."""
MEASURED = 2
"""Of the steps for which it is kept, the last ones: they are timed. In all before them this class only counts."""
AROUND = 4.0
"""What stands around a step may be longer than it by this factor; beyond it the engine had nothing to do."""


class _Ran(NamedTuple):
    """A step in which everybody decoded. `num_made`: guesses that were run; `gained`: tokens beyond one each; `room`:
    guesses of the sequence that had most; `num_asked`: sequences with room.
    """

    duration_s: float
    draft_s: float
    num_rows: int
    context: int
    num_made: int
    gained: int
    room: int
    num_asked: int


class AdaptiveDrafts:
    """See `core.protocols.DraftController`. All it knows comes from results and recorded times, so runs replay.

    `num_drafts`, `depth`: guesses of a sequence in a step at most, and how many on one path. `timer` predicts steps;
    None: they are learned from nothing. `branching`: the drafter's guesses are trees. `slo_of`: seconds per output
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
        self.beliefs = Beliefs(num_drafts, depth, branching=branching)
        self.purse_s: float | None = None
        """None: nothing was measured yet."""
        self.num_steps = 0
        self.tracks: dict[int, Track] = {}
        self._planner = Planner(self.costs, self.draft_costs)
        self._probes = Probes(self.costs, self.draft_costs, num_drafts, depth)
        self._depth = depth
        self._slo_of = slo_of
        self._heard: list[Track] = []
        self._since_plain = 0
        self._measure_after = FIRST_MEASURE
        self._prompts = 0  # prompt tokens of the last step
        self._company = 0  # those to be expected in the next one
        self._has = 1.0  # share of proposals that hold a guess
        self._paced = False
        self._rooms: Rooms = {}
        self._again = 0  # the step in which is decided anew
        self._for: tuple[int, Sequence | None, int] = (0, None, 0)
        self._expected = self._drift = 0.0  # tokens gained in a step; how much more they were since the decision
        self._began_s: float | None = None  # when the last step began
        self._ran: _Ran | None = None  # a step whose time is not known to its end yet
        self._lone = False  # the step before the one that is settled next had drafts
        self._num_measured = 0  # steps, until the purse is filled
        self._refused_until = 0  # the step up to which nobody drafts
        self._resting = 0  # steps for which nobody drafts and nothing is looked at
        self._rested_s = 0.0  # what they have taken so far
        self._num_rows = 0  # sequences that run
        self._refused = 0.0  # the best chance of a draft token that was not worth it

    # -- before a step ---------------------------------------------------------------------------------------------

    def begin_step(self, running: Seq[Sequence], now_s: float | None = None) -> Mapping[int, tuple[int, int]]:
        if self.num_steps < self._refused_until:
            same = not running or (len(running) == self._num_rows and running[-1] is self._for[1])
            if same or self._is_refused_to(running):
                if not self._resting:
                    self._settle(now_s)
                return self._rooms
            self._refused_until = 0
            self._wake()
        self._settle(now_s)
        if not running:
            return {}
        who = (len(running), running[-1], self._company)
        if self.num_steps >= self._again or self._for != who:
            self._for = who
            self._rooms = self._decide(running)
            if not self._rooms and not self._paced:
                self._refused_until, self._num_rows = self._again, len(running)
                self._resting = max(0, self._again - self.num_steps - MEASURED)
        return self._rooms

    def _is_refused_to(self, running: Seq[Sequence]) -> bool:
        """Whether nobody drafts among these either: about as many, none with a deadline, with strangers who promise no
        more than those to whom it was refused."""
        num_rows = len(running)
        if num_rows.bit_length() != self._num_rows.bit_length() or self.beliefs.gains[STRANGER, 0] > self._refused:
            return False
        refused = all(self._slo_of(seq) is None for seq in running)
        if refused:
            self._num_rows, self._for = num_rows, (num_rows, running[-1], self._company)
        return refused

    def _wake(self) -> None:
        """Time has passed without drafts; what a rest earns is what any step earns."""
        self._resting = 0
        self._began_s, self._lone = None, False
        if self.purse_s is not None:
            self.purse_s += SHARE * self._rested_s
            self._probes.earn(self._rested_s)
        self._rested_s = 0.0

    def _decide(self, running: Seq[Sequence]) -> Rooms:
        step = self._again = self.num_steps
        self._drift = 0.0
        seqs = guessers(running)
        if not seqs or self._since_plain >= self._measure_after:
            return {}
        if self.purse_s is None and self._began_s is not None:
            return {}  # what a plain step takes is not known yet
        if self.purse_s is not None and self.purse_s <= 0.0:
            context = sum([seq.num_computed for seq in seqs])
            earned_s = SHARE * self.costs.seconds(len(seqs), context, len(seqs))
            most = _quiet(self._steps_to_keep(len(seqs), context))
            self._again = step + max(1, min(most, int(-self.purse_s / earned_s)))
            self._refused = 1.0
            return {}
        tracks, context = [], 0
        for seq in seqs:
            track = self.tracks.get(seq.seq_id)
            tracks.append(self._meet(seq) if track is None else track)
            context += seq.num_computed
        if self._heard:
            self._learn()
        gains = self.beliefs.gains[[track.slot for track in tracks]]
        plan = self._planner.plan(gains, context, self._company, self._has)
        depth = self._depth
        rooms: Rooms = {}
        if plan:
            for seq, room in zip(seqs, plan, strict=True):
                if room:
                    rooms[seq.seq_id] = (room, room if room < depth else depth)
        if self._paced:
            self._tighten(tracks, rooms, context)
        probing = self._probes.add(rooms, tracks, step, context, self._company, self.purse_s)
        keep = self._steps_to_keep(len(seqs), context)
        if not rooms:
            soonest = max(self._probes.next_step, min([track.due_at for track in tracks]), step + keep)
            self._again = min(soonest, step + _quiet(keep))
            self._refused = float(gains[:, 0].max())
            if self.purse_s is not None:  # of a decision to draft it is a part of what the steps are seen to take
                self.purse_s -= _deciding_s(len(seqs))
        elif not probing and not self._paced and keep > 1:
            self._again = step + keep
            gained = sum([sum(row[:room]) for row, room in zip(gains.tolist(), plan, strict=True)])
            self._expected = self._has * gained
        return rooms

    def _steps_to_keep(self, num_rows: int, context: int) -> int:
        """One, where steps take so long that deciding in each of them costs nothing."""
        worth_s = DECIDING_SHARE * self.costs.seconds(num_rows, context, num_rows)
        return max(1, min(KEPT, round(_deciding_s(num_rows) / worth_s)))

    def _meet(self, seq: Sequence) -> Track:
        slo_s = self._slo_of(seq)
        pace = None if slo_s is None else Pace(slo_s)
        track = self.tracks[seq.seq_id] = Track(seq.seq_id, self.beliefs.meet(), self.num_steps, pace)
        self._paced = self._paced or slo_s is not None
        return track

    def _tighten(self, tracks: list[Track], rooms: Rooms, context: int) -> None:
        width = len(tracks) + sum([room for room, _ in rooms.values()])
        step_s = self.costs.seconds(len(tracks), context, width)
        tightened(rooms, tracks, self.beliefs.gains[[t.slot for t in tracks]].tolist(), self._has, step_s, self._depth)

    # -- after a step ------------------------------------------------------------------------------------------------

    def observe(self, output: SchedulerOutput, result: StepOutput) -> None:
        rows = output.scheduled
        if self._resting and rows:
            self.num_steps += 1
            self._rested_s += result.duration_s
            self._resting -= 1
            if not self._resting:
                self._wake()
            return
        verified = result.verified
        num_tokens = context = room = num_asked = 0
        for row in rows:
            num_tokens += row.num_tokens
            context += row.start
            if row.num_drafts:
                num_asked += 1
                if row.num_drafts > room:
                    room = row.num_drafts
        num_rows = len(rows)
        prompts = num_tokens - num_rows
        self._company = prompts if self._prompts else 0  # one chunk alone says nothing of the next step
        self._prompts = prompts
        if not rows:
            return
        self.num_steps = step = self.num_steps + 1
        if step & 15 == 0:
            self.beliefs.renew()
        num_made = gained = 0
        if verified:
            num_made, gained = self._hear(verified)
        if self._paced:
            self._keep_pace(result)
        if result.duration_s <= 0.0:
            return
        if prompts == 0 and context:
            took = (result.duration_s, result.draft_s)
            self._ran = _Ran(*took, num_rows, context, num_made, gained, room, num_asked)
        if self.purse_s is not None:
            self.purse_s += SHARE * result.duration_s
            self._probes.earn(result.duration_s)

    def _hear(self, verified: list[Verified]) -> tuple[int, int]:
        """Notes what came of guesses; returns how many were run, and the tokens beyond one for each sequence."""
        num_made = gained = 0
        has, evidence = self._has, self.beliefs.evidence
        for one in verified:
            made = one.num_drafted
            accepted = len(one.token_ids) - 1
            gained += accepted
            has += ((1.0 if made else 0.0) - has) / 64
            track = self.tracks.get(one.seq_id)
            if not made or track is None:  # who had no guess says nothing about guesses
                continue
            num_made += made
            right, wrong = evidence(made, accepted + 1 - one.whole)
            if not track.num_heard:
                self._heard.append(track)
            if track.num_right + right <= MOST:
                track.num_heard += 1
                track.num_right += right
                track.num_wrong += wrong
        self._has = has
        self._drift += gained - self._expected
        if abs(self._drift) > 1.5 * self._expected + 1.0 + self._for[0] / 16:
            self._again = 0
        return num_made, gained

    def _learn(self) -> None:
        """What was heard since the last decision goes into the beliefs."""
        heard, self._heard = [track for track in self._heard if track.slot >= 0], []
        if not heard:
            return
        slots = [track.slot for track in heard]
        before = self.beliefs.gains[slots, 0].tolist()
        self.beliefs.learn(
            slots, [t.num_right for t in heard], [t.num_wrong for t in heard], [t.num_heard for t in heard]
        )
        after = self.beliefs.gains[slots, 0].tolist()
        self._probes.heard(heard, before, after, self.num_steps)
        self.beliefs.see(slots[self.num_steps % len(slots)], min([t.num_heard for t in heard]))
        for track in heard:
            track.num_heard = track.num_right = track.num_wrong = 0

    def _settle(self, now_s: float | None) -> None:
        """The next step begins: what the last one took is known with all that stood around it.

        What an engine does between two steps (scheduling, committing, telling clients, this class) costs time too, and
        guesses make more of it: for small models it decides whether they pay. Source: own measurements, docs/log.md.
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
            lone, self._lone = self._lone, False
            if lone or self.num_steps & 3 == 0 or self.num_steps + MEASURED > self._again or self.purse_s is None:
                self.costs.observe(ran.num_rows, ran.context, ran.num_rows, forward_s, lone=lone)
                self._fill_purses(ran)
            return
        self._lone = True
        # Before it is learned from: what comes once (a drafter's first touch of its memory) is not what drafts cost.
        expected_s = self._expected_seconds(ran)
        self.costs.observe(ran.num_rows, ran.context, ran.num_rows + ran.num_made, forward_s)
        self._fill_purses(ran)
        if self.purse_s is not None:
            self._account(ran, min(forward_s + ran.draft_s, 2.0 * expected_s))
        self.draft_costs.observe(ran.room, ran.num_rows, ran.draft_s)

    def _fill_purses(self, ran: _Ran) -> None:
        """At first: once plain steps take what was predicted, or so many were measured that the slow ones of a cold
        start are not what counts."""
        self._num_measured += 1
        sure = self._num_measured > WARM_UP or self._began_s is None or not self.costs.surprising(ran.num_rows)
        if self.purse_s is None and sure:
            plain_s = self.costs.seconds(ran.num_rows, ran.context, ran.num_rows)
            self.purse_s = START_STEPS * plain_s
            self._probes.purse_s = plain_s

    def _expected_seconds(self, ran: _Ran) -> float:
        seconds = self.costs.seconds(ran.num_rows, ran.context, ran.num_rows + ran.num_made)
        return seconds + self.draft_costs.seconds(ran.room, ran.num_rows)

    def _account(self, ran: _Ran, took_s: float) -> None:
        """What a step with guesses has won or lost; `took_s` leaves out what somebody else's work may have added."""
        num_rows, context, seconds = ran.num_rows, ran.context, self.costs.seconds
        self._probes.pay(ran.num_made)
        self._since_plain = self._since_plain + 1 if ran.num_made else 0
        if self.costs.doubtful(num_rows):
            self._since_plain = self._measure_after
        plain_s = seconds(num_rows, context, num_rows)
        won_s = plain_s * (1.0 + ran.gained / num_rows) - took_s
        assert self.purse_s is not None
        self.purse_s = min(self.purse_s + won_s, MAX_STEPS * plain_s)
        if self.purse_s <= 0.0 or self._since_plain >= self._measure_after:
            self._again = 0

    def _keep_pace(self, result: StepOutput) -> None:
        produced = {sampled.seq_id: 1 for sampled in result.sampled}
        produced.update({v.seq_id: len(v.token_ids) for v in result.verified})
        for seq_id, track in self.tracks.items():
            if track.pace is not None:
                track.pace.add(result.duration_s, produced.get(seq_id, 0))

    def forget(self, seq_id: int) -> None:
        track = self.tracks.pop(seq_id, None)
        if track is not None:
            self.beliefs.forget(track.slot)
            track.slot = -1


def _deciding_s(num_rows: int) -> float:
    return DECIDING_S * (1.0 + num_rows / 48)


def _quiet(keep: int) -> int:
    """Steps for which nobody drafts, where a decision to draft is kept for `keep`."""
    return min(QUIET * keep * keep, LONGEST)
