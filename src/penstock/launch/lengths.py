"""Lengths at a front end: who predicts them, and asking the model first where that is the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.core.output import RequestOutput
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.lengths.front import ExpectedLengths
    from penstock.text.tokenizer import Tokenizer

Made = tuple[Request, str | None, SamplingParams]
"""A request, its text and its parameters."""


def lengths_of(config: EngineConfig, tokenizer: Tokenizer | None) -> ExpectedLengths | None:
    """None: nobody predicts. Raises ConfigError."""
    if config.scheduler.length_predictor is None:
        return None
    from penstock.lengths import make_predictor  # nobody else needs it
    from penstock.lengths.front import ExpectedLengths

    return ExpectedLengths(make_predictor(config.scheduler.length_predictor, tokenizer))


def question_params(question: Request) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=question.max_tokens)


def with_lengths(
    lengths: ExpectedLengths, made: list[Made], run: Callable[[list[Made]], list[RequestOutput]]
) -> list[Made]:
    """The same with expected lengths. `run` answers the questions, if the predictor has any."""
    questions = [lengths.question(request) for request, _, _ in made]
    asked = [question for question in questions if question is not None]
    outputs = run([(question, None, question_params(question)) for question in asked]) if asked else []
    answers = {question.request_id: out.outputs[0].token_ids for question, out in zip(asked, outputs, strict=True)}
    return [
        (lengths.expect(request, () if question is None else answers[question.request_id]), text, params)
        for (request, text, params), question in zip(made, questions, strict=True)
    ]
