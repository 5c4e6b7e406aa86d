"""What every predictor of lengths owes, whatever it goes by. Being registered enrols it."""

from __future__ import annotations

import random

import pytest

from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.lengths import LENGTH_PREDICTORS, make_predictor


class Letters:
    """A tokenizer whose ids are characters."""

    def encode_inner(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def ask(prompt: list[int], max_tokens: int, name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, rules=TokenRules(), max_tokens=max_tokens)


@pytest.fixture(params=LENGTH_PREDICTORS.names())
def predictor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_every_predictor_owes(predictor: str) -> None:
    """Within 0 to max_tokens whatever it has seen; the same for the same history; a question only over the prompt."""
    said = []
    for _ in range(2):
        made, rng, mine = make_predictor(predictor, Letters()), random.Random(3), []  # type: ignore[arg-type]
        assert made.name == predictor
        for i in range(80):
            one = ask([rng.randrange(1000) for _ in range(rng.randrange(1, 400))], rng.choice([2, 40, 3000]), f"{i}")
            question = made.question(one)
            if question is not None:
                assert question.prompt_token_ids[: len(one.prompt_token_ids)] == one.prompt_token_ids
                assert (
                    len(question.prompt_token_ids) + question.max_tokens <= len(one.prompt_token_ids) + one.max_tokens
                )
                assert question.namespace == one.namespace
            answer = Letters().encode_inner(rng.choice(["12", "about 400 words", "many", "0", "9" * 40]))
            mine.append(made.predict(one, answer))
            assert 0 <= mine[-1] <= one.max_tokens
            if rng.random() < 0.8:
                made.learn(one, rng.randrange(1, one.max_tokens + 1))
        said.append(mine)
    assert said[0] == said[1]
    assert any(said[0])
