"""As many guesses as pay, or none: the expected tokens per second of each step decide.

In every step the likeliest guesses of all sequences are made, as many as give most expected tokens per expected second;
no guess at all must be beaten by a margin. Chances come from `acceptance`, seconds from `cost`. Sources: SpecServe,
arXiv 2503.05096 (draft length from a model of efficiency and the load at hand); AdaServe, arXiv 2501.12162, section 4
(a step's budget goes to the guesses likeliest to be accepted, after those that sequences with a deadline need).

What nobody can know is kept small by a purse, in seconds. It holds START_STEPS steps at first, gets SHARE of all time,
and what guesses have won or lost against plain decoding; while it is empty nobody guesses. So whatever the text does,
it costs at most SHARE of the time and a few steps. Sequences whose guesses do not pay are probed, at intervals that
double up to MAX_INTERVAL steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from penstock.core.batch import SchedulerOutput, StepOutput, Verified
from penstock.core.protocols import StepTimer
from penstock.core.sequence import Sequence
from penstock.sched.drafts.acceptance import Belief, Beliefs
from penstock.sched.drafts.cost import DraftCosts, StepCosts, UnitTimer, context_class
from penstock.sched.drafts.slo import Pace, slo_of_request

SHARE = 0.005
"""Of all time, what finding out may cost."""
PROBE_SHARE = 0.004
"""Of that, what probes may cost."""
START_STEPS = 3.0
MAX_STEPS = 12.0
"""Plain steps that the purse holds at first, and at most: what was won long ago must not pay for losses now."""
MARGIN = 0.015
"""A plan with guesses must promise so much more than one without."""
MAX_INTERVAL = 128
PROBE_COST = 0.1
"""A probe has more than one guess if that makes the step longer by this share at most."""
SURPRISE = 0.1
MAX_PLANS = 4096
FIRST_GUESSES = 16
REMEASURE = 256
"""Steps with guesses after which a plain one is run, to know what it takes now; the next one if that was never known
and the timer is found to be wrong."""


class Track:
    """What is known of one sequence. `interval`: steps between probes; `pace`: its deadline, if it has one."""

    __slots__ = ("belief", "interval", "pace", "probed")

    def __init__(self, belief: Belief, pace: Pace | None) -> None:
        self.belief = belief
        self.interval = 2
        self.probed = False
        self.pace = pace


class AdaptiveDrafts:
    """See `core.protocols.DraftController`. All it knows comes from results, so a recorded run replays.

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
        self._depth = depth
        self._slo_of = slo_of
        self._beliefs = Beliefs(num_drafts, depth, branching=branching)
        self._num_drafts = num_drafts
        self._tracks: dict[int, Track] = {}
        self._purse_s: float | None = None  # None: nothing was measured yet
        self._probe_purse_s: float | None = None
        self._probe_cost_s = 0.0
        self._gap = 1  # steps between any probes, while none finds anything
        self._next_probe = 0
        self._num_steps = 0
        self._since_plain = 0
        self._prompts = 0  # prompt tokens of the last step
        self._company = 0  # those to be expected in the next one
        self._has = 1.0  # share of proposals that hold a guess
        self._chosen = 0
        self._plan_key: tuple[int, ...] = ()
        self._plans: dict[tuple[int, ...], int] = {}
        self._plans_version = 0
        self._paced = False

    # -- before a step ---------------------------------------------------------------------------------------------

    def begin_step(self, decoding: Seq[Sequence]) -> Mapping[int, tuple[int, int]]:
        seqs = [seq for seq in decoding if not seq.num_inflight]
        if not seqs or self._since_plain >= REMEASURE:
            return {}
        if self._purse_s is not None and self._purse_s <= 0.0:
            return {}
        known = self._tracks
        tracks, context = [], 0
        for seq in seqs:
            track = known.get(seq.seq_id)
            tracks.append(self._meet(seq) if track is None else track)
            context += seq.num_computed
        beliefs = [track.belief for track in tracks]
        count = self._plan(beliefs, context)
        rooms: dict[int, tuple[int, int]] = {}
        depth, step = self._depth, self._num_steps
        if count:
            for seq, room in zip(seqs, share(beliefs, count), strict=True):
                if room:
                    rooms[seq.seq_id] = (room, room if room < depth else depth)
        if self._paced:
            self._tighten(seqs, tracks, rooms, context)
        self._probe_cost_s = 0.0
        due = [
            seq for seq, track in zip(seqs, tracks, strict=True)
            if not step % track.interval and seq.seq_id not in rooms
        ]  # fmt: skip
        if due and rooms:
            self._swap(due, rooms)
        elif due and not self._company and self._num_steps >= self._next_probe:
            self._probe(due, [seq for seq in seqs if seq.seq_id not in rooms], rooms, len(seqs), context)
        return rooms

    def _meet(self, seq: Sequence) -> Track:
        slo_s = self._slo_of(seq)
        track = self._tracks[seq.seq_id] = Track(self._beliefs.stranger, None if slo_s is None else Pace(slo_s))
        self._paced = self._paced or slo_s is not None
        return track

    def _plan(self, beliefs: list[Belief], context: int) -> int:
        """How many guesses to make in all."""
        num_rows = len(beliefs)
        if num_rows > 4:  # a number suits for some steps; for whom they are is looked at in each of them
            key: tuple[int, ...] = (num_rows, self._company, self._num_steps * 4 // num_rows)
            if key != self._plan_key:
                self._plan_key = key
                self._chosen = self._best(beliefs, context)
            return self._chosen
        key = (
            self._company,
            context_class(context),
            round(8 * self._has),
            *[b.number for b in beliefs],
        )
        if self._plans_version != self.costs.version or len(self._plans) > MAX_PLANS:
            self._plans_version = self.costs.version
            self._plans.clear()
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._best(beliefs, context)
        return found

    def _best(self, beliefs: list[Belief], context: int) -> int:
        """The number of guesses, likeliest first, that gives most tokens per second.

        A drafter has nothing for some sequences, so the width of the step is not certain: with one or two sequences it
        is one of two, with more the mean over one standard deviation less and more stands for all.
        """
        num_rows, has = len(beliefs), self._has
        table, fill = self.costs.table(num_rows, context), self.costs.fill
        plain_s = table.get(num_rows) or fill(table, num_rows, context, num_rows)
        best, chosen = num_rows / plain_s * (1.0 + MARGIN * has), 0
        gained, deepest, draft_s = 0.0, 0, 0.0
        flat = sorted([(-gain, d) for b in beliefs for d, gain in enumerate(b.gains, 1)])
        spread = (has * (1.0 - has) / num_rows) ** 0.5 if num_rows > 2 and has < 0.99 else 0.0
        if not self.costs.confirmed:  # a table that nothing has confirmed yet may be far off
            flat = flat[: max(FIRST_GUESSES, num_rows)]
        for count, (gain, d) in enumerate(flat, 1):
            gained -= has * gain
            if d > deepest:
                deepest = d
                draft_s = self.draft_costs.seconds(d, num_rows)
            if spread:
                low, high = round((has - spread) * count), round((has + spread) * count)
                low = num_rows + (low if low > 0 else 0)
                high = num_rows + (high if high < count else count)
                seconds = table.get(low) or fill(table, num_rows, context, low)
                seconds = (seconds + (table.get(high) or fill(table, num_rows, context, high))) / 2.0
            elif num_rows <= 2:
                width = num_rows + count
                seconds = table.get(width) or fill(table, num_rows, context, width)
                seconds = has * seconds + (1.0 - has) * plain_s
            else:
                width = num_rows + round(has * count)
                seconds = table.get(width) or fill(table, num_rows, context, width)
            rate = (num_rows + gained) / (seconds + draft_s)
            if rate > best:
                best, chosen = rate, count
            elif rate < 0.5 * best:  # kernels may work in tiles, so one dip is not the end, but this one is
                break
        if self._company and chosen:
            least = self._least_gain(best, num_rows, context)
            while chosen and -flat[chosen - 1][0] < least:
                chosen -= 1
        return chosen

    def _least_gain(self, rate: float, num_rows: int, context: int) -> float:
        """Guesses beside prompt tokens must bring as much per second as they do without: the prompts come anyway."""
        costs, company = self.costs, self._company
        more_s = costs.predicted_s(num_rows, context, 2 * num_rows, company)
        more_s -= costs.predicted_s(num_rows, context, num_rows, company)
        return rate * more_s / num_rows

    def _seconds(self, num_rows: int, context: int, width: int) -> float:
        table = self.costs.table(num_rows, context)
        found = table.get(width)
        return self.costs.fill(table, num_rows, context, width) if found is None else found

    def _probe(
        self, due: list[Sequence], idle: list[Sequence], rooms: dict[int, tuple[int, int]], num_rows: int, context: int
    ) -> None:
        """Let some of those for whom guesses do not pay guess, as far as the probes' purse goes.

        Those who are `due`; all who are `idle` if that takes no longer: where a step is bound by reading weights, or
        runs in tiles, company is free.
        """
        width = num_rows + sum([room for room, _ in rooms.values()])
        budget_s = self._probe_purse_s
        room = min(8, self._num_drafts)
        plain_s = self._seconds(num_rows, context, num_rows)
        if budget_s is None or self._purse_s is None:
            budget_s = plain_s
        else:  # what guesses have won may go into finding more of them
            budget_s += max(0.0, self._purse_s - START_STEPS * plain_s)
        while True:
            cost_s = self._probe_s(room, len(due), num_rows, context, width)
            if room == 1 or cost_s <= PROBE_COST * self._seconds(num_rows, context, width):
                break
            room //= 2
        if cost_s > budget_s:
            count = len(due) // 2
            while count and self._probe_s(room, count, num_rows, context, width) > budget_s:
                count //= 2
            turn = self._num_steps % len(due)
            due = (due[turn:] + due[:turn])[:count]
        elif self._probe_s(room, len(idle), num_rows, context, width) <= 1.05 * cost_s:
            due = idle
        for seq in due:
            self._tracks[seq.seq_id].probed = True
            rooms[seq.seq_id] = (room, min(room, self._depth))
        if due:
            self._probe_cost_s = self._probe_s(room, len(due), num_rows, context, width)
            self._gap = min(2 * self._gap, MAX_INTERVAL)
            self._next_probe = self._num_steps + self._gap

    def _swap(self, due: list[Sequence], rooms: dict[int, tuple[int, int]]) -> None:
        """While others guess, who is due gets the last guess of whoever has most: the step takes as long as before."""
        for seq in due[:4]:
            rich = max(rooms, key=lambda seq_id: rooms[seq_id][0])
            room = rooms[rich][0] - 1
            if not room:
                return
            rooms[rich] = (room, min(room, self._depth))
            rooms[seq.seq_id] = (1, 1)
            self._tracks[seq.seq_id].probed = True

    def _probe_s(self, room: int, count: int, num_rows: int, context: int, width: int) -> float:
        more_s = self._seconds(num_rows, context, width + count * room) - self._seconds(num_rows, context, width)
        return max(more_s, 0.0) + self.draft_costs.seconds(room, num_rows)

    def _tighten(
        self, seqs: list[Sequence], tracks: list[Track], rooms: dict[int, tuple[int, int]], context: int
    ) -> None:
        """Those who are behind their deadline get the guesses they need, the least likely of others make place."""
        needs = [(seq, track, track.pace) for seq, track in zip(seqs, tracks, strict=True) if track.pace is not None]
        num_rows, taken = len(seqs), 0
        in_time = {seq.seq_id for seq in seqs}
        step_s = self._seconds(num_rows, context, num_rows + sum([room for room, _ in rooms.values()]))
        for seq, track, pace in sorted(needs, key=lambda need: need[2].slo_s):
            has_room = rooms.get(seq.seq_id, (0, 0))[0]
            wanted = pace.guesses(track.belief.gains, self._has, step_s)
            if wanted:
                in_time.discard(seq.seq_id)
            if wanted > has_room:
                rooms[seq.seq_id] = (wanted, min(wanted, self._depth))
                taken += wanted - has_room
        gains = {seq.seq_id: track.belief.gains for seq, track in zip(seqs, tracks, strict=True)}
        while taken > 0:
            others = [(gains[seq_id][room - 1], seq_id) for seq_id, (room, _) in rooms.items() if seq_id in in_time]
            if not others:
                return
            _, seq_id = min(others)
            room = rooms.pop(seq_id)[0] - 1
            if room:
                rooms[seq_id] = (room, min(room, self._depth))
            taken -= 1

    # -- after a step ------------------------------------------------------------------------------------------------

    def observe(self, output: SchedulerOutput, result: StepOutput) -> None:
        rows = output.scheduled
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
        self._num_steps += 1
        if self._num_steps & 15 == 0:
            self._beliefs.renew()
        num_made = self._learn(verified) if verified else 0
        if self._paced:
            self._keep_pace(result)
        if result.duration_s <= 0.0:
            return
        if prompts == 0 and context:
            gained = sum([len(v.token_ids) for v in verified]) - len(verified)
            self._price(result, num_rows, context, num_made, gained, room, num_asked)
        if self._purse_s is not None:
            self._purse_s += SHARE * result.duration_s
            self._probe_purse_s = (self._probe_purse_s or 0.0) + PROBE_SHARE * result.duration_s

    def _learn(self, verified: list[Verified]) -> int:
        """Beliefs after these verifications; returns the guesses that were run."""
        tracks, learn = self._tracks, self._beliefs.learn
        num_made = 0
        has = self._has
        for one in verified:
            made = one.num_drafted
            has += ((1.0 if made else 0.0) - has) / 64
            track = tracks.get(one.seq_id)
            if not made or track is None:  # it had no guess: that says nothing about guesses
                continue
            num_made += made
            accepted = len(one.token_ids) - one.whole
            if accepted:
                self._gap = self._next_probe = 1
            before = track.belief
            track.belief = after = learn(before, made, accepted)
            probed, track.probed = track.probed, False
            if not probed:
                track.interval = 2
            elif after.chance - before.chance > SURPRISE:
                track.interval = 1
            elif not accepted:
                track.interval = min(2 * track.interval, MAX_INTERVAL)
        self._has = has
        if num_made:
            one = verified[self._num_steps % len(verified)]
            track = tracks.get(one.seq_id)
            if track is not None and one.num_drafted:
                self._beliefs.see(track.belief)
        return num_made

    def _price(
        self, result: StepOutput, num_rows: int, context: int, num_made: int, gained: int, room: int, num_asked: int
    ) -> None:
        """Costs and the purse after a step in which everybody decoded; `gained`: tokens beyond one each."""
        costs = self.costs
        draft_s = result.draft_s
        forward_s = max(result.duration_s - draft_s, 0.0)
        costs.observe(num_rows, context, num_rows + num_made, forward_s)
        plain_s = self._seconds(num_rows, context, num_rows)
        if self._purse_s is None:
            self._purse_s = START_STEPS * plain_s
            self._probe_purse_s = plain_s
        if not num_asked:
            self._since_plain = 0
            return
        if self._probe_purse_s is not None:
            self._probe_purse_s = max(0.0, self._probe_purse_s - self._probe_cost_s)
        self._since_plain = self._since_plain + 1 if num_made else 0
        if costs.doubtful(num_rows):
            self._since_plain = REMEASURE
        if self.draft_costs.observe(room, num_rows, draft_s):
            self.costs.version += 1
        expected_s = self._seconds(num_rows, context, num_rows + num_made)
        expected_s += self.draft_costs.seconds(room, num_rows)
        took_s = min(forward_s + draft_s, 2.0 * expected_s)  # somebody else's work is not the guesses' fault
        won_s = plain_s * (1.0 + gained / num_rows) - took_s
        self._purse_s = min(self._purse_s + won_s, MAX_STEPS * plain_s)

    def _keep_pace(self, result: StepOutput) -> None:
        tracks = self._tracks
        produced = {sampled.seq_id: 1 for sampled in result.sampled}
        produced.update({v.seq_id: len(v.token_ids) for v in result.verified})
        for seq_id, track in tracks.items():
            if track.pace is not None:
                track.pace.add(result.duration_s, produced.get(seq_id, 0))

    def forget(self, seq_id: int) -> None:
        self._tracks.pop(seq_id, None)


def share(beliefs: list[Belief], count: int) -> list[int]:
    """Guesses for each sequence, if the `count` likeliest ones of all are made; of equal ones the first."""
    if len(beliefs) == 1:
        return [min(count, len(beliefs[0].gains))]
    flat = sorted([gain for belief in beliefs for gain in belief.falling])
    if not flat:
        return [0] * len(beliefs)
    cut = flat[min(count, len(flat)) - 1]
    spare = count - bisect_left(flat, cut)
    rooms = []
    for belief in beliefs:
        falling = belief.falling
        room = bisect_left(falling, cut)
        while spare and room < len(falling) and falling[room] == cut:
            room += 1
            spare -= 1
        rooms.append(room)
    return rooms
