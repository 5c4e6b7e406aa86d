"""Sequences that were promised a pace: how many drafts they need to keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.sequence import Sequence

if TYPE_CHECKING:
    from penstock.sched.drafts.state import SequenceState


def slo_of_request(seq: Sequence) -> float | None:
    """Seconds per output token that a request was promised, if it was."""
    return seq.request.slo_tpot_s


class SloProgress:
    """How a sequence stands against its promise of `slo_s` seconds per token.

    Source: AdaServe, arXiv 2501.12162, section 4.1: the tokens that a sequence must get in a step so that its mean time
    per token is within its promise at the end of it.
    """

    __slots__ = ("elapsed_s", "num_tokens", "slo_s")

    LEAST_GAIN = 0.3
    """A draft less likely to be used than that does not help to keep a promise."""

    def __init__(self, slo_s: float) -> None:
        self.slo_s = slo_s
        self.elapsed_s = 0.0
        self.num_tokens = 0

    def add(self, seconds: float, num_tokens: int) -> None:
        self.elapsed_s += seconds
        self.num_tokens += num_tokens

    def drafts(self, chances: list[float], draft_rate: float, step_s: float) -> int:
        """Drafts that a step of `step_s` needs for it; fewer if even those would not do it.

        `chances`: the chance of each draft to be used; `draft_rate`: the share of proposals that hold any.
        """
        short = (self.elapsed_s + step_s) / self.slo_s - self.num_tokens - 1.0
        count = 0
        for gain in chances:
            if short <= 0.0 or gain < self.LEAST_GAIN:
                break
            short -= draft_rate * gain
            count += 1
        return count


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
