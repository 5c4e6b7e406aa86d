"""What running sequences will still need is set aside before another one enters, so that few have to leave again.

Admitting whoever fits now fills the pool with beginnings; as they grow, they throw each other out, and what they had is
computed again. Setting aside all they may ever need (max_tokens) keeps most of the pool empty, since most end sooner.
In between: a share of it, which shrinks while nobody is thrown out and jumps when somebody is. Of whom a length is
predicted (`Request.expected_tokens`), all of what that says is set aside, and of max_tokens nothing.
Sources: Zheng et al., SGLang, 2024, whose scheduler does so (`new_token_ratio`); its constants. Predictions: Jin et
al., S3, arXiv 2306.06000, section 4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.core.lengths import room_for
from penstock.core.sequence import Sequence

START, FLOOR, STEPS = 0.7, 0.14, 600
"""The share at first; the part of it that always stays; steps in which it falls from one to the other."""
AHEAD = 20
"""Tokens that everybody will at least still make, when the share is estimated anew."""


class Reserve:
    """`conservativeness` scales the share; 0 sets nothing aside. Units: tokens."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.scale(conservativeness)
        self.share = self._start
        self._of_running = (-1, 0, 0)
        """Of the running, in this step: how many they are, and what they may still add, without a prediction and with
        one. Many may ask in a step (`SchedulingPolicy.packs`)."""

    def scale(self, conservativeness: float) -> None:
        """Another one from now on; the share goes there as it does from step to step."""
        self.conservativeness = conservativeness
        self._start = min(1.0, START * conservativeness)
        self._floor = self._start * FLOOR

    def begin_step(self) -> None:
        self._of_running = (-1, 0, 0)

    def step(self) -> None:
        """A step in which nobody had to leave."""
        self.share = max(self._floor, self.share - (self._start - self._floor) / STEPS)

    def forced_out(self, running: Iterable[Sequence]) -> None:
        """Somebody had to leave: what those who stay have used of their limits is the new estimate."""
        if self._start == 0:
            return
        used = allowed = 0
        for seq in running:
            used += seq.num_generated + AHEAD
            allowed += seq.request.max_tokens
        self.share = max(self.share, min(1.0, used / max(1, allowed)))

    def tokens(self, running: Collection[Sequence], newcomer: Sequence) -> int:
        """To be left free beside what is known of `newcomer`."""
        if self.share == 0:
            return 0
        if self._of_running[0] != len(running):
            unknown = sum(_left(seq) for seq in running if not seq.request.expected_tokens)
            known = sum(_left(seq) for seq in running if seq.request.expected_tokens)
            self._of_running = (len(running), unknown, known)
        _, unknown, known = self._of_running
        if newcomer.request.expected_tokens > 0:
            return int(self.share * unknown) + known + _left(newcomer)
        return int(self.share * (unknown + _left(newcomer))) + known


def _left(seq: Sequence) -> int:
    """Tokens that a sequence, and samples that will fork from it, may still add."""
    request = seq.request
    left = max(0, room_for(request, seq.num_generated) - seq.num_generated)
    if seq.num_generated == 0:
        left *= request.beam.beam_width if request.beam is not None else request.n
    return left
