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


def tightened(
    limits: dict[int, tuple[int, int]], states: list[SequenceState], chances: list[list[float]], draft_rate: float,
    step_s: float, depth: int,
) -> None:  # fmt: skip
    """Those who are behind their deadline get the drafts they need, the least likely of others make place.

    Mutates: `limits` (sequence -> drafts, depth). `chances`: of each sequence's drafts; `draft_rate`: see
    `SloProgress.drafts`; `step_s`: what a step with these limits takes.
    """
    needs = [(state, row, state.slo) for state, row in zip(states, chances, strict=True) if state.slo is not None]
    in_time = {state.seq_id: row for state, row in zip(states, chances, strict=True)}
    taken = 0
    for state, row, slo in sorted(needs, key=lambda need: need[2].slo_s):
        has_room = limits.get(state.seq_id, (0, 0))[0]
        wanted = slo.drafts(row, draft_rate, step_s)
        if wanted:
            in_time.pop(state.seq_id, None)
        if wanted > has_room:
            limits[state.seq_id] = (wanted, min(wanted, depth))
            taken += wanted - has_room
    while taken > 0:
        others = [(in_time[seq_id][limit - 1], seq_id) for seq_id, (limit, _) in limits.items() if seq_id in in_time]
        if not others:
            return
        _, seq_id = min(others)
        limit = limits.pop(seq_id)[0] - 1
        if limit:
            limits[seq_id] = (limit, min(limit, depth))
        taken -= 1
