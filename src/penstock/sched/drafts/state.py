"""Whom a controller decides about, and what it knows of each."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.core.sequence import Sequence
from penstock.sched.drafts.slo import SloProgress


class SequenceState:
    """Attributes:
    slot: of its estimate; -1: it has ended.
    interval: steps between probes. due_at: the step from which the next one may come. probed: one is under way.
    pace: its deadline, if it has one.
    num_heard, num_right, num_wrong: verifications that nothing was learned from yet, drafts accepted in them, and how
        many ended with a wrong draft.
    """

    __slots__ = ("due_at", "interval", "num_right", "num_verified", "num_wrong", "probed", "seq_id", "slo", "slot")

    def __init__(self, seq_id: int, slot: int, step: int, slo: SloProgress | None = None) -> None:
        self.seq_id = seq_id
        self.slot = slot
        self.interval = 2
        self.due_at = step
        self.probed = False
        self.slo = slo
        self.num_verified = self.num_right = self.num_wrong = 0


def can_draft(running: Seq[Sequence]) -> list[Sequence]:
    """Those for whom drafts can be verified: they decode, alone, and no step in flight works on them."""
    return [s for s in running if s.is_decoding and not s.num_inflight and s.request.beam is None]
