"""Whom a controller decides about, and what it knows of each."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.core.sequence import Sequence
from penstock.sched.drafts.slo import Pace


class Track:
    """Attributes:
    slot: of its belief; -1: it has ended.
    interval: steps between probes. due_at: the step from which the next one may come. probed: one is under way.
    pace: its deadline, if it has one.
    num_heard, num_right, num_wrong: verifications that nothing was learned from yet, guesses accepted in them, and how
        many ended with a wrong guess.
    """

    __slots__ = ("due_at", "interval", "num_heard", "num_right", "num_wrong", "pace", "probed", "seq_id", "slot")

    def __init__(self, seq_id: int, slot: int, step: int, pace: Pace | None = None) -> None:
        self.seq_id = seq_id
        self.slot = slot
        self.interval = 2
        self.due_at = step
        self.probed = False
        self.pace = pace
        self.num_heard = self.num_right = self.num_wrong = 0


def guessers(running: Seq[Sequence]) -> list[Sequence]:
    """Those for whom guesses can be verified: they decode, alone, and no step in flight works on them."""
    return [s for s in running if s.is_decoding and not s.num_inflight and s.request.beam is None]
