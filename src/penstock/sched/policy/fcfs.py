"""First come, first served, with stall-free chunked prefill: the default.

Decodes run in every step; running prefills, then new requests, share what is left of the token budget in order of
arrival. Nobody overtakes within a class, and the youngest yields memory first, so the oldest sequence always gets on.
Sources: Orca, OSDI 2022, section 4.2 (FCFS, iteration level); Sarathi-Serve, arXiv 2403.02310, section 4 (stall-free).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from penstock.core.sequence import Sequence


def arrival_key(seq: Sequence) -> tuple[int, int]:
    """Order of arrival of the request, then the sample's index."""
    return (seq.arrival, seq.index)


class Fcfs:
    name = "fcfs"
    displaces = False
    max_rows = 0
    spare = 0.0
    packs = False

    def begin_step(self, now_s: float, kv: Any) -> None:
        """Order of arrival needs neither time nor memory."""

    def key(self, seq: Sequence) -> tuple[int, ...]:
        return arrival_key(seq)

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """`running` and `waiting` come sorted by `key`; decodes first, so that no prefill can stall them."""
        # `is_decoding`, spelt out: this runs for every sequence in every step.
        decodes = [s for s in running if len(s.token_ids) - s.num_computed == 1 and s.num_computed > 0]
        if len(decodes) < len(running):
            decodes += [s for s in running if not s.is_decoding]
        decodes += waiting
        return decodes

    def leaves(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Seq[Sequence]:
        """Nobody, unless somebody needs the memory."""
        return ()

    def num_tokens(self, seq: Sequence, lag: int, budget_left: int) -> int:
        return min(lag, budget_left)

    def victim(self, running: Seq[Sequence], needy: Sequence) -> Sequence | None:
        """The youngest sequence, if it is younger than `needy`."""
        for seq in reversed(running):
            if seq is needy:
                return None
            if seq.num_inflight == 0 and seq.tables:
                return seq
        return None

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        """Whether `other` might yield memory to `seq`."""
        return self.key(seq) < self.key(other)

    def next_run_s(self, seqs: Seq[Sequence]) -> list[float]:
        """Who has memory runs: there is nobody to ask about."""
        return [0.0] * len(seqs)

    def claims(self, waiting: Seq[Sequence]) -> Seq[Sequence]:
        """Who among those waiting may displace others, in the order in which they are asked about."""
        return waiting

    def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        """Whom to preempt so that a waiting `newcomer` can be admitted: nobody, it waits."""
        return None

    def not_before_s(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> float | None:
        """Time before which nothing should be scheduled although somebody waits: never, start at once."""
        return None
