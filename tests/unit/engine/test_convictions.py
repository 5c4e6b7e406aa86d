"""What a conviction covers: the same again whoever sends it, and nothing that is harmless for all one knows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.base.clock import VirtualClock
from penstock.core.request import Request, Resume
from penstock.core.sampling import BeamSearchParams, TokenRules
from penstock.engine.convictions import KEEP_S, Convictions

PROMPT = [1, 5, 777, 9]


def request(rules: dict[str, Any] | None = None, **more: Any) -> Request:
    usual: dict[str, Any] = {"request_id": "r", "prompt_token_ids": PROMPT, "max_tokens": 50}
    return Request(**(usual | more), rules=TokenRules(**({"temperature": 1.0, "seed": 3} | (rules or {}))))


@pytest.fixture
def convictions() -> Convictions:
    return Convictions(VirtualClock())


@pytest.mark.parametrize(
    "again",
    [
        request(request_id="other"),
        request({"seed": 4}),
        request(max_tokens=1),
        request(tenant="somebody", weight=3.0, namespace=b"salt", priority=4, arrival_s=9.0, slo_tpot_s=0.1),
        request(resume=Resume([(0, [5])])),
        request({"reference": [1, 2]}),
        request({"stop_ids": [2, 7]}, stop_token_ids=[7], eos_token_ids=[2]),
    ],
    ids=["id", "seed", "length", "sender", "resumed", "prediction", "stops"],
)
def test_the_same_again_is_covered_whoever_sends_it(convictions: Convictions, again: Request) -> None:
    convictions.convict(request(), 0)
    assert convictions.cover(again)


@pytest.mark.parametrize(
    "other",
    [
        request(prompt_token_ids=[1, 5, 777]),
        request(prompt_token_ids=[1, 5, 777, 9, 9]),
        request({"temperature": 0.9}),
        request({"logit_bias": {5: 1.0}}),
        request({"num_prompt_logprobs": 1}),
        request({"num_logprobs": 1}),
        request({"min_tokens": 3, "stop_ids": [2]}),
        request({"grammar": "{}"}),
        request(n=2),
        request(beam=BeamSearchParams(beam_width=2, max_tokens=3)),
        request(pooling="mean"),
        request(pooling="last"),
    ],
    ids=[
        "shorter", "longer", "temperature", "bias", "prompt-logprobs", "logprobs", "min-tokens", "grammar", "n",
        "beams", "mean", "last",
    ],
)  # fmt: skip
def test_another_one_is_not_covered_by_one_conviction(convictions: Convictions, other: Request) -> None:
    convictions.convict(request(), 0)
    assert not convictions.cover(other)
    convictions.convict(other, 0)
    assert convictions.cover(other)


def test_biases_are_told_apart_by_what_they_are_not_by_their_order(convictions: Convictions) -> None:
    convictions.convict(request({"logit_bias": {5: 1.0, 6: 2.0}}), 0)
    assert convictions.cover(request({"logit_bias": {6: 2.0, 5: 1.0}}))


def test_after_sampled_tokens_the_seed_counts(convictions: Convictions) -> None:
    """Somebody else's "Hello" goes on, though one draw of it met a bug at its 38th token."""
    convictions.convict(request(), 37)
    assert convictions.cover(request(request_id="again"))
    assert not convictions.cover(request({"seed": 4}))
    convictions.convict(request({"seed": 4}), 12)  # so the seed does not matter after all
    assert convictions.cover(request({"seed": 5}))
    assert not convictions.cover(request({"seed": 5}, prompt_token_ids=[1, 5]))


def test_greedy_tokens_are_the_prompts_own(convictions: Convictions) -> None:
    convictions.convict(request({"temperature": 0.0}), 37)
    assert convictions.cover(request({"temperature": 0.0, "seed": 9}))


def test_who_ends_before_that_token_is_harmless(convictions: Convictions) -> None:
    convictions.convict(request({"temperature": 0.0}), 37)
    assert not convictions.cover(request({"temperature": 0.0}, max_tokens=37))
    assert convictions.cover(request({"temperature": 0.0}, max_tokens=38))


def test_who_has_passed_that_token_is_harmless(convictions: Convictions) -> None:
    convictions.convict(request({"temperature": 0.0}), 37)
    assert convictions.cover(request({"temperature": 0.0}), 37)
    assert not convictions.cover(request({"temperature": 0.0}), 38)


def test_the_earliest_death_counts(convictions: Convictions) -> None:
    for num_tokens in (37, 12, 30):
        convictions.convict(request({"temperature": 0.0}), num_tokens)
    assert convictions.cover(request({"temperature": 0.0}, max_tokens=13))
    assert not convictions.cover(request({"temperature": 0.0}, max_tokens=12))


def test_stops_count_where_they_are_held_back(convictions: Convictions) -> None:
    convictions.convict(request({"min_tokens": 3, "stop_ids": [2]}), 0)
    assert convictions.cover(request({"min_tokens": 3, "stop_ids": [2]}))
    assert not convictions.cover(request({"min_tokens": 3, "stop_ids": [7]}))


@pytest.mark.parametrize(
    "other",
    [
        request({"grammar": "{}"}),
        request({"num_prompt_logprobs": 1}),
        request(beam=BeamSearchParams(beam_width=2, max_tokens=3)),
    ],
    ids=["grammar", "prompt-logprobs", "beams"],
)
def test_a_prompt_that_kills_is_not_refused_for_another_kind_of_work(convictions: Convictions, other: Request) -> None:
    for temperature in (0.7, 0.8):
        convictions.convict(request({"temperature": temperature}), 0)
    assert not convictions.cover(other)


def test_a_prompt_that_kills_however_it_is_asked_is_refused_however_it_is_asked(convictions: Convictions) -> None:
    convictions.convict(request({"temperature": 0.7}), 0)
    convictions.convict(request({"temperature": 0.8}), 0)
    assert convictions.cover(request({"temperature": 0.9}))
    assert not convictions.cover(request(pooling="mean")), "another kind of work"
    assert not convictions.cover(request({"temperature": 0.9}, prompt_token_ids=[1, 5]))


def test_the_same_conviction_twice_widens_nothing(convictions: Convictions) -> None:
    for _ in range(3):
        convictions.convict(request(), 0)
    assert not convictions.cover(request({"temperature": 0.9}))
    assert len(convictions) == 1


def test_vectors_and_beams_begin_anew_and_are_covered_whatever_their_length(convictions: Convictions) -> None:
    for whole in (request(pooling="mean", max_tokens=1), request(beam=BeamSearchParams(beam_width=2, max_tokens=3))):
        convictions.convict(whole, 7)
        assert convictions.cover(msgspec.structs.replace(whole, request_id="again"))


def test_it_ends_after_an_hour() -> None:
    clock = VirtualClock()
    convictions = Convictions(clock)
    convictions.convict(request(), 0)
    clock.advance(KEEP_S - 1)
    assert convictions.refuses(request())
    clock.advance(2)
    assert not convictions.refuses(request())
    assert (len(convictions), convictions.num_convicted, convictions.num_refused) == (0, 1, 1)


def test_memory_is_bounded_and_the_latest_are_kept() -> None:
    convictions = Convictions(VirtualClock(), max_keys=20)
    for i in range(200):
        convictions.convict(request(prompt_token_ids=[i]), 0)
    assert len(convictions._entries) == 20
    assert convictions.cover(request(prompt_token_ids=[199]))
    assert not convictions.cover(request(prompt_token_ids=[0]))


def test_what_kills_again_and_again_is_not_forgotten_for_newer_ones() -> None:
    convictions = Convictions(VirtualClock(), max_keys=20)
    for i in range(100):
        if i % 5 == 0:
            convictions.convict(request(prompt_token_ids=[777]), 0)
        convictions.convict(request(prompt_token_ids=[i]), 0)
        assert convictions.cover(request(prompt_token_ids=[777])), i


def test_harmless_requests_are_never_covered() -> None:
    """A thousand prompts that differ from a hundred convicted ones."""
    convictions = Convictions(VirtualClock())
    for i in range(100):
        convictions.convict(request({"temperature": i % 3 / 2}, prompt_token_ids=[777, i]), i % 2 * 5)
    assert not any(convictions.cover(request(prompt_token_ids=[i, 777])) for i in range(1000))
