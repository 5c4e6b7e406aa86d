"""What is sampled with where a request names nothing."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.core.sampling import RepetitionDetectionParams
from penstock.text.defaults import MILD, Wanted, sampling_decision, sampling_defaults
from penstock.text.limits import Limits

LIMITS = Limits(vocab_size=100, max_model_len=64)


@pytest.mark.parametrize(
    ("own", "mode", "expected", "why"),
    [
        ({}, "auto", MILD, "give none"),
        ({"eos_token_id": 2, "do_sample": True}, "auto", MILD, "give none"),
        ({"temperature": 1.0}, "auto", {"temperature": 1.0}, "own"),
        ({"top_k": 20, "top_p": 0.8}, "auto", {"top_k": 20, "top_p": 0.8}, "own"),
        ({"repetition_penalty": 1.1}, "auto", MILD | {"repetition_penalty": 1.1}, "give none"),
        ({"max_new_tokens": 999}, "auto", MILD | {"max_tokens": 64}, "give none"),
        ({"temperature": -1}, "auto", MILD, "give none"),
        ({"temperature": 0.3}, "vllm", {}, "neutral"),
        ({}, "vllm", {}, "neutral"),
    ],
)
def test_the_files_win_over_ours_and_nothing_is_mixed(own: Any, mode: str, expected: Any, why: str) -> None:
    found = sampling_defaults(own, LIMITS, Wanted(mode))
    assert found.values == found.beside(["max_tokens", "seed"]) == expected
    said = sampling_decision(found, mode)
    assert why in said.why
    assert all(f"{name} {value}" in said.value for name, value in found.values.items())
    for name in ("temperature", "top_p", "top_k", "min_p"):
        plain = {k: v for k, v in expected.items() if why != "give none" or k not in (*MILD, "top_k")}
        assert found.beside([name]) == plain, "who names one means the plain distribution else, unless the files do"


def test_repetition_detection_is_a_default_like_any_other() -> None:
    text = '{"max_pattern_size": 8, "min_count": 3}'
    asked = RepetitionDetectionParams(max_pattern_size=8, min_count=3)
    assert sampling_defaults({}, LIMITS, Wanted("vllm", text)).values == {"repetition_detection": asked}
    found = sampling_defaults({}, LIMITS, Wanted("auto", text))
    assert found.values == MILD | {"repetition_detection": asked}
    assert found.beside(["temperature"]) == {"repetition_detection": asked}
    assert 'repetition_detection {"max_pattern_size":8' in sampling_decision(found, "auto").value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "example"), ("[1]", "object"), ('{"max_size": 3}', "max_size"), ('{"max_pattern_size": "a"}', "str"),
        ('{"max_pattern_size": 8}', "min_count must be from 2 to 512, not 0"),
        ('{"max_pattern_size": 8, "min_count": 1}', "min_count"),
        ('{"max_pattern_size": 300, "min_count": 2}', "max_pattern_size must be from 0 to 256, not 300"),
        ('{"max_pattern_size": 256, "min_count": 17}', "min_count must be from 2 to 16, not 17"),
        ('{"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}', "min_pattern_size"),
    ],
)  # fmt: skip
def test_a_bad_default_is_told_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sampling_defaults({}, LIMITS, Wanted("auto", text))
    assert caught.value.field == "repetition_detection"
    assert says in str(caught.value)
