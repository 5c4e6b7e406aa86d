"""A request while it lives: its samples or beams, and what is still owed to the client."""

from __future__ import annotations

from penstock.core.request import Request
from penstock.core.sequence import Sequence


class SequenceGroup:
    """All sequences of one request.

    Attributes:
        live: sample index -> unfinished sequence. For beams, index is only an identity.
        forked: the first token has been sampled and all n samples exist.
        cancelled: samples aborted before they existed; the client has been told, they are never started.
        candidates: beams only: sequence id -> its (token, logprob) continuations, until all beams have them.
        completed: beams only: (generated ids, cumulative logprob, finish reason) of ended hypotheses.
    """

    __slots__ = ("arrival", "cancelled", "candidates", "completed", "forked", "live", "next_index", "request")

    def __init__(self, request: Request, arrival: int, leader: Sequence) -> None:
        self.request = request
        self.arrival = arrival
        self.live: dict[int, Sequence] = {leader.index: leader}
        self.next_index = 1
        self.forked = request.n == 1
        self.cancelled: set[int] = set()
        self.candidates: dict[int, list[tuple[int, float]]] = {}
        self.completed: list[tuple[list[int], float, str]] = []
