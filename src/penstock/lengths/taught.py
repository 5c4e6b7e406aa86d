"""Predictors over answers that were given already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.core.protocols import LengthPredictor
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.lengths.score import Accuracy


class EndedRequest(NamedTuple):
    """A request that has ended, in tokens."""

    prompt: list[int]
    max_tokens: int
    num_generated: int

    def request(self, number: int) -> Request:
        return Request(
            request_id=str(number), prompt_token_ids=self.prompt, rules=TokenRules(), max_tokens=self.max_tokens
        )


def taught(predictor: LengthPredictor, known: Iterable[EndedRequest], asked: Iterable[EndedRequest]) -> Accuracy:
    """Learn from `known`, in order; predict `asked`, of which nothing is learned. Mutates `predictor`."""
    for number, example in enumerate(known):
        predictor.learn(example.request(number), example.num_generated)
    score = Accuracy()
    for number, example in enumerate(asked):
        score.add(predictor.predict(example.request(number), ()), example.num_generated)
    return score
