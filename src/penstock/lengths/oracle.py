"""The length itself, as far as max_tokens is it: in simulations, and in loads that ignore the end of a text.

With `noise` the answer is off by a factor, log-normal with that sigma, of its own for every request: what a predictor
of a given quality would be worth. Source: none; the error model of most papers on scheduling by predicted lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np

from penstock.base.hashing import digest
from penstock.core.request import Request
from penstock.lengths import refused


def noisy(num_tokens: int, noise: float, seed: int, name: str) -> int:
    """`num_tokens` times exp(noise x a normal number), at least 1; the same for one seed and name."""
    if noise == 0:
        return max(1, num_tokens)
    drawn = np.random.default_rng([seed, int.from_bytes(digest(b"length", name.encode())[:8], "big")]).normal()
    return max(1, round(num_tokens * math.exp(noise * drawn)))


class OraclePredictor:
    """Args: noise: sigma of the factor's logarithm, >= 0; seed: of its draws."""

    name = "oracle"

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        if not noise >= 0:
            raise refused(f"noise of oracle is {noise}; it must not be negative")
        self._noise, self._seed = noise, seed

    def question(self, request: Request) -> Request | None:
        return None

    def predict(self, request: Request, answer: Seq[int]) -> int:
        return min(request.max_tokens, noisy(request.max_tokens, self._noise, self._seed, request.request_id))

    def learn(self, request: Request, num_generated: int) -> None:
        """There is nothing to be learned."""
