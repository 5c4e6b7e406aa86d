"""Who guesses although it does not pay, to find out whether it would by now.

Each sequence is probed at intervals that double while nothing is found, all of them at most every `gap` steps, and
what probes cost in all comes out of a purse of their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.sched.drafts.cost import DraftCosts, StepCosts
from penstock.sched.drafts.track import Track

SHARE = 0.004
"""Of all time, what probes may cost."""
SPARE_STEPS = 3.0
"""Plain steps that the controller's purse keeps for itself: what is beyond them may go into probes."""
MAX_INTERVAL = 128
MAX_SILENT = 8
"""The same where the drafter had nothing to say: that costs no step, and tells nothing."""
PATIENCE = 32
MAX_PATIENCE = 1024
"""Steps after which a purse that could not pay for a probe is looked at again: as many as it takes to fill."""
MAX_COST = 0.1
"""A probe has more than one guess if that makes the step longer by this share at most."""
SURPRISE = 0.1

Rooms = dict[int, tuple[int, int]]
"""Sequence -> (guesses, depth)."""


class Probes:
    """Attributes:
    purse_s: seconds that probes may cost; None: nothing was measured yet.
    next_step: the first step in which there may be one.
    """

    def __init__(self, costs: StepCosts, draft_costs: DraftCosts, num_drafts: int, depth: int) -> None:
        self._costs = costs
        self._draft_costs = draft_costs
        self._num_drafts = num_drafts
        self._depth = depth
        self._gap = 1  # steps between any probes, while none finds anything
        self._cost_s = 0.0
        self.purse_s: float | None = None
        self.next_step = 0

    def add(
        self, rooms: Rooms, tracks: list[Track], step: int, context: int, company: int, spare_s: float | None
    ) -> bool:
        """Add probes to `rooms`; whether the step costs more for them. `spare_s`: the controller's own purse."""
        self._cost_s = 0.0
        due = [track for track in tracks if step >= track.due_at and track.seq_id not in rooms]
        if not due:
            return False
        if rooms:
            self._swap(due, rooms, step)
            return False
        if company or step < self.next_step:
            return False
        return self._probe(due, tracks, rooms, step, context, spare_s)

    def _swap(self, due: list[Track], rooms: Rooms, step: int) -> None:
        """While others guess, who is due gets the last guess of whoever has most: the step takes as long as before."""
        for track in due[:4]:
            rich = max(rooms, key=lambda seq_id: rooms[seq_id][0])
            room = rooms[rich][0] - 1
            if not room:
                return
            rooms[rich] = (room, min(room, self._depth))
            rooms[track.seq_id] = (1, 1)
            track.probed = True
            track.due_at = step + track.interval

    def _probe(
        self, due: list[Track], idle: list[Track], rooms: Rooms, step: int, context: int, spare_s: float | None
    ) -> bool:
        """Let some of those for whom guesses do not pay guess, as far as the purse goes.

        Those who are `due`; all who are `idle` if that takes no longer: where a step is bound by reading weights, or
        runs in tiles, company is free.
        """
        num_rows = len(idle)
        plain_s = self._costs.seconds(num_rows, context, num_rows)
        budget_s = self.purse_s
        if budget_s is None or spare_s is None:
            budget_s = plain_s
        else:  # what guesses have won may go into finding more of them
            budget_s += max(0.0, spare_s - SPARE_STEPS * plain_s)
        room = min(8, self._num_drafts)
        while True:
            cost_s = self._seconds(room, len(due), num_rows, context)
            if room == 1 or cost_s <= MAX_COST * plain_s:
                break
            room //= 2
        if cost_s > budget_s:
            count = len(due) // 2
            while count and self._seconds(room, count, num_rows, context) > budget_s:
                count //= 2
            turn = step % len(due)
            due = (due[turn:] + due[:turn])[:count]
        elif self._seconds(room, num_rows, num_rows, context) <= 1.05 * cost_s:
            due = idle
        for track in due:
            track.probed = True
            track.due_at = step + track.interval
            rooms[track.seq_id] = (room, min(room, self._depth))
        if due:
            self._cost_s = self._seconds(room, len(due), num_rows, context)
            self._gap = max(self._gap, min(2 * self._gap, MAX_SILENT))
            self.next_step = step + self._gap
        else:
            lacks_s = self._seconds(room, 1, num_rows, context) - budget_s
            self.next_step = step + max(PATIENCE, min(MAX_PATIENCE, int(lacks_s / (SHARE * plain_s))))
        return bool(due)

    def _seconds(self, room: int, count: int, num_rows: int, context: int) -> float:
        """What `room` guesses for `count` sequences add to a step of `num_rows`."""
        seconds = self._costs.seconds
        more_s = seconds(num_rows, context, num_rows + count * room) - seconds(num_rows, context, num_rows)
        return max(more_s, 0.0) + self._draft_costs.seconds(room, num_rows)

    def heard(self, tracks: Seq[Track], before: Seq[float], after: Seq[float], step: int) -> None:
        """Guesses of these sequences were verified; the chance of the next one was `before` and is `after`."""
        if any(track.num_right for track in tracks):
            self._gap, self.next_step = 1, step
        elif any(track.probed for track in tracks):
            self._gap = min(2 * self._gap, MAX_INTERVAL)
            self.next_step = step + self._gap
        for track, was, now in zip(tracks, before, after, strict=True):
            probed, track.probed = track.probed, False
            if not probed:
                track.interval = 2
            elif now - was > SURPRISE:
                track.interval = 1
            elif not track.num_right:
                track.interval = min(2 * track.interval, MAX_INTERVAL)
            track.due_at = step + track.interval

    def earn(self, duration_s: float) -> None:
        """A step took so long."""
        self.purse_s = (self.purse_s or 0.0) + SHARE * duration_s

    def pay(self, num_made: int) -> None:
        """The step with the probes that were added last has run, with so many guesses."""
        if self.purse_s is not None and num_made:
            self.purse_s = max(0.0, self.purse_s - self._cost_s)
        self._cost_s = 0.0
