"""Who drafts although it does not pay, to find out whether it would by now.

Each sequence is probed at intervals that double while nothing is found, all of them at most every `gap` steps, and
what probes cost in all comes out of an exploration budget of their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.sched.drafts.cost import DraftCosts, StepCosts
from penstock.sched.drafts.state import SequenceState

SHARE = 0.004
"""Of all time, what probes may cost."""
SPARE_STEPS = 3.0
"""Plain steps that the controller's budget keeps for itself: what is beyond them may go into probes."""
MAX_INTERVAL = 128
MAX_SILENT = 8
"""The same where the drafter had nothing to say: that costs no step, and tells nothing."""
PATIENCE = 32
MAX_PATIENCE = 1024
"""Steps after which a budget that could not pay for a probe is looked at again: as many as it takes to fill."""
MAX_COST = 0.1
"""A probe has more than one draft if that makes the step longer by this share at most."""
SURPRISE = 0.1

Limits = dict[int, tuple[int, int]]
"""Sequence -> (drafts, depth)."""


class Probes:
    """Attributes:
    exploration_s: seconds that probes may cost; None: nothing was measured yet.
    next_step: the first step in which there may be one.
    """

    def __init__(self, costs: StepCosts, draft_costs: DraftCosts, num_drafts: int, depth: int) -> None:
        self._costs = costs
        self._draft_costs = draft_costs
        self._num_drafts = num_drafts
        self._depth = depth
        self._gap = 1  # steps between any probes, while none finds anything
        self._cost_s = 0.0
        self.exploration_s: float | None = None
        self.next_step = 0

    def add(
        self,
        limits: Limits,
        states: list[SequenceState],
        step: int,
        context: int,
        prefill_tokens: int,
        spare_s: float | None,
    ) -> bool:
        """Add probes to `limits`; whether the step costs more for them. `spare_s`: the controller's own budget."""
        self._cost_s = 0.0
        due = [state for state in states if step >= state.due_at and state.seq_id not in limits]
        if not due:
            return False
        if limits:
            self._swap(due, limits, step)
            return False
        if prefill_tokens or step < self.next_step:
            return False
        return self._probe(due, states, limits, step, context, spare_s)

    def _swap(self, due: list[SequenceState], limits: Limits, step: int) -> None:
        """While others draft, who is due gets the last draft of whoever has most: the step takes as long as before."""
        for state in due[:4]:
            rich = max(limits, key=lambda seq_id: limits[seq_id][0])
            limit = limits[rich][0] - 1
            if not limit:
                return
            limits[rich] = (limit, min(limit, self._depth))
            limits[state.seq_id] = (1, 1)
            state.probed = True
            state.due_at = step + state.interval

    def _probe(
        self,
        due: list[SequenceState],
        idle: list[SequenceState],
        limits: Limits,
        step: int,
        context: int,
        spare_s: float | None,
    ) -> bool:
        """Let some of those for whom drafts do not pay draft, as far as the exploration budget goes.

        Those who are `due`; all who are `idle` if that takes no longer: where a step is bound by reading weights, or
        runs in tiles, more rows are free.
        """
        num_rows = len(idle)
        plain_s = self._costs.seconds(num_rows, context, num_rows)
        budget_s = self.exploration_s
        if budget_s is None or spare_s is None:
            budget_s = plain_s
        else:  # what drafts have won may go into finding more of them
            budget_s += max(0.0, spare_s - SPARE_STEPS * plain_s)
        limit = min(8, self._num_drafts)
        while True:
            cost_s = self._seconds(limit, len(due), num_rows, context)
            if limit == 1 or cost_s <= MAX_COST * plain_s:
                break
            limit //= 2
        if cost_s > budget_s:
            count = len(due) // 2
            while count and self._seconds(limit, count, num_rows, context) > budget_s:
                count //= 2
            turn = step % len(due)
            due = (due[turn:] + due[:turn])[:count]
        elif self._seconds(limit, num_rows, num_rows, context) <= 1.05 * cost_s:
            due = idle
        for state in due:
            state.probed = True
            state.due_at = step + state.interval
            limits[state.seq_id] = (limit, min(limit, self._depth))
        if due:
            self._cost_s = self._seconds(limit, len(due), num_rows, context)
            self._gap = max(self._gap, min(2 * self._gap, MAX_SILENT))
            self.next_step = step + self._gap
        else:
            lacks_s = self._seconds(limit, 1, num_rows, context) - budget_s
            self.next_step = step + max(PATIENCE, min(MAX_PATIENCE, int(lacks_s / (SHARE * plain_s))))
        return bool(due)

    def _seconds(self, limit: int, count: int, num_rows: int, context: int) -> float:
        """What `room` drafts for `count` sequences add to a step of `num_rows`."""
        seconds = self._costs.seconds
        more_s = seconds(num_rows, context, num_rows + count * limit) - seconds(num_rows, context, num_rows)
        return max(more_s, 0.0) + self._draft_costs.seconds(limit, num_rows)

    def heard(self, states: Seq[SequenceState], before: Seq[float], after: Seq[float], step: int) -> None:
        """Drafts of these sequences were verified; the chance of the next one was `before` and is `after`."""
        if any(state.num_right for state in states):
            self._gap, self.next_step = 1, step
        elif any(state.probed for state in states):
            self._gap = min(2 * self._gap, MAX_INTERVAL)
            self.next_step = step + self._gap
        for state, was, now in zip(states, before, after, strict=True):
            probed, state.probed = state.probed, False
            if not probed:
                state.interval = 2
            elif now - was > SURPRISE:
                state.interval = 1
            elif not state.num_right:
                state.interval = min(2 * state.interval, MAX_INTERVAL)
            state.due_at = step + state.interval

    def earn(self, duration_s: float) -> None:
        """A step took so long."""
        self.exploration_s = (self.exploration_s or 0.0) + SHARE * duration_s

    def pay(self, num_made: int) -> None:
        """The step with the probes that were added last has run, with so many drafts."""
        if self.exploration_s is not None and num_made:
            self.exploration_s = max(0.0, self.exploration_s - self._cost_s)
        self._cost_s = 0.0
