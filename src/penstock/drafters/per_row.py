"""What a drafter keeps about each sequence, made when it is first needed and dropped with the row."""

from __future__ import annotations

from typing import Generic, TypeVar

from penstock.core.batch import SchedulerOutput

S = TypeVar("S")


class PerRow(Generic[S]):
    """Base of drafters whose state is a function of a row's tokens and of what was verified behind them.

    Rows are preempted and come back, are forked and rolled back. A state is only ever made from `DraftJob.tokens`: a
    row that comes back, a child of a fork and a row that was rolled back begin anew.
    """

    wants_hidden = False

    def __init__(self) -> None:
        self.states: dict[int, S] = {}

    def track(self, output: SchedulerOutput) -> None:
        states = self.states
        if states:
            for seq_id in output.removed:
                states.pop(seq_id, None)
            for appended in output.appended:
                if appended.rollback:
                    states.pop(appended.seq_id, None)
