"""Beam search as a pure function of the beams' candidates; the engine turns its answer into forks.

Same rules as vLLM's: 2k continuations per beam; those that end the text are set aside, the best k others go on; at the
end everything competes by score = cumulative logprob / length ** length_penalty, where length counts prompt and
generated tokens without a final end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple


class Continuation(NamedTuple):
    """Beam number `parent` goes on with `token_id`."""

    parent: int
    token_id: int
    cum_logprob: float


class Advance(NamedTuple):
    going_on: list[Continuation]
    ended: list[Continuation]


def advance(
    cum_logprobs: Seq[float], candidates: Seq[Seq[tuple[int, float]]], width: int, eos_ids: frozenset[int]
) -> Advance:
    """One step of beam search.

    Args:
        cum_logprobs: score of each live beam, in order of rank.
        candidates: per beam, its best (token, logprob) pairs, best first.
        eos_ids: tokens that end a hypothesis; empty to ignore them.

    Ties keep the order of beams, then of candidates, so the result is a function of its arguments alone.
    """
    going_on: list[Continuation] = []
    ended: list[Continuation] = []
    for parent, (score, pairs) in enumerate(zip(cum_logprobs, candidates, strict=True)):
        for token_id, logprob in pairs:
            c = Continuation(parent, token_id, score + logprob)
            (ended if token_id in eos_ids else going_on).append(c)
    going_on.sort(key=lambda c: -c.cum_logprob)
    return Advance(going_on[:width], ended)


def final_score(cum_logprob: float, num_tokens: int, ends_with_eos: bool, length_penalty: float) -> float:
    """Length-normalised score. `num_tokens` counts prompt and generated tokens."""
    length = num_tokens - 1 if ends_with_eos else num_tokens
    return cum_logprob / float(max(length, 1) ** length_penalty)
