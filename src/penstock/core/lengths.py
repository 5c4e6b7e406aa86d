"""Lengths of outputs in buckets: what a prediction (`Request.expected_tokens`) comes to in memory and in order.

A predictor is right if it names the bucket. Two buckets per octave: 16, 24, 32, 48, 64, 96 ... tokens, so that who ends
within its bucket leaves a third of it unused at most, a fifth on average.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.request import Request

FIRST = 16
"""Tokens of the first bucket."""


def bucket_of(num_tokens: int) -> int:
    """The number of the bucket, from 0, in which an output of so many tokens ends."""
    octave = max(0, (max(num_tokens, 1) - 1) // FIRST).bit_length() - 1  # num_tokens > FIRST << octave
    if octave < 0:
        return 0
    return 2 * octave + (1 if 2 * num_tokens <= 3 * (FIRST << octave) else 2)


def bucket_end(bucket: int) -> int:
    """The longest output, in tokens, that ends in it."""
    whole = FIRST << (bucket // 2)
    return whole if bucket % 2 == 0 else whole + whole // 2


@lru_cache(maxsize=4096)
def _rounded(num_tokens: int) -> int:
    return bucket_end(bucket_of(num_tokens))


def room_for(request: Request, num_generated: int) -> int:
    """Tokens of output that a sample with `num_generated` is expected to come to: the end of its bucket.

    A sample that outgrows its bucket is expected to come to twice as many; none to more than max_tokens, or than a
    prediction that is larger (in simulations max_tokens is the true length, and a wrong prediction stays wrong).
    Without a prediction: max_tokens. Source: Jin et al., S3, arXiv 2306.06000, section 4 (twice the memory at a
    misprediction).
    """
    if not request.expected_tokens:
        return request.max_tokens
    room = _rounded(request.expected_tokens)
    while room <= num_generated:
        room *= 2
    return min(room, max(request.max_tokens, request.expected_tokens))
