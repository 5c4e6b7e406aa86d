"""The request validator, against the list of bad inputs every front end has to refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from penstock.base.errors import InputError
from penstock.core.sampling import BeamSearchParams, SamplingParams
from penstock.text.validate import (
    Limits,
    build_request,
    make_rules,
    stop_strings,
    validate_beam,
    validate_prompt_ids,
    validate_sampling,
)
from tests.unit.text import text_vocabularies as vocabularies

LIMITS = Limits(vocab_size=512, max_model_len=100, eos_token_ids=(2,))
NAN, INF = math.nan, math.inf

BAD = [
    # field, value, parts of the message, a valid neighbour
    ("n", 0, ["1", "16384", "0"], 1), ("n", 10**9, ["16384", "1000000000"], 16384), ("n", 1.0, ["integer"], 2),
    ("n", True, ["integer", "true"], 1), ("n", None, ["integer", "null"], 1), ("n", "1", ["integer", "'1'"], 1),
    ("temperature", -1, ["0", "100", "-1"], 0), ("temperature", NAN, ["0", "100", "nan"], 1.0),
    ("temperature", INF, ["100", "inf"], 100), ("temperature", 1e308, ["100", "1e+308"], 100.0),
    ("temperature", "0", ["number", "'0'"], 0.0), ("temperature", None, ["number", "null"], 2),
    ("temperature", False, ["number", "false"], 0), ("temperature", 10**400, ["100", "1329 bits"], 1),
    ("temperature", -1e-9, ["from 0"], 1e-9), ("temperature", 1j, ["number", "complex"], 1),
    ("top_p", 0, ["above 0", "1"], 1e-6), ("top_p", 1.1, ["at most 1", "1.1"], 1.0), ("top_p", -INF, ["-inf"], 0.5),
    ("top_p", NAN, ["nan"], 1), ("top_p", "1", ["number"], 1),
    ("top_k", -2, ["-1", "512", "-2"], -1), ("top_k", 10**9, ["512", "1000000000"], 512), ("top_k", 513, ["512"], 0),
    ("top_k", 1.5, ["integer"], 1), ("top_k", True, ["integer"], 1),
    ("min_p", 2, ["0", "1", "2"], 1), ("min_p", -0.1, ["-0.1"], 0.0), ("min_p", NAN, ["nan"], 0.5),
    ("presence_penalty", 1e9, ["-2", "2", "1e+09"], 2), ("presence_penalty", -1e9, ["-2"], -2.0),
    ("presence_penalty", NAN, ["nan"], 0), ("frequency_penalty", 2.1, ["-2", "2", "2.1"], 2.0),
    ("frequency_penalty", -2.1, ["-2.1"], -2), ("repetition_penalty", 0, ["1e-06", "100"], 1e-6),
    ("repetition_penalty", 5e-324, ["1e-06", "e-324"], 1e-3), ("repetition_penalty", 9e-7, ["1e-06"], 1),
    ("repetition_penalty", -1e9, ["100"], 1), ("repetition_penalty", 101, ["100", "101"], 100),
    ("repetition_penalty", INF, ["inf"], 1.1),
    ("max_tokens", 0, ["1", "100", "0"], 1), ("max_tokens", -1, ["1", "-1"], 100),
    ("max_tokens", 2**31, ["100", "2147483648"], None),
    ("max_tokens", 1e99, ["integer", "1e+99"], 99), ("max_tokens", 16.0, ["integer"], 16),
    ("max_tokens", True, ["integer"], 1),
    ("min_tokens", -1, ["0", "-1"], 0), ("min_tokens", 17, ["17", "16"], 16), ("min_tokens", 1.0, ["integer"], 1),
    ("min_tokens", 2**31, ["100"], 16),
    ("logprobs", 21, ["20", "21"], 20), ("logprobs", 10**6, ["20", "1000000"], 0), ("logprobs", -1, ["0", "-1"], None),
    ("logprobs", True, ["integer"], 1), ("prompt_logprobs", 21, ["20"], 20), ("prompt_logprobs", -2, ["0"], 0),
    ("prompt_logprobs", 1.0, ["integer"], 1),
    ("seed", 2**64, ["18446744073709551615", "18446744073709551616"], 2**64 - 1),
    ("seed", -(2**63) - 1, ["-9223372036854775808", "-9223372036854775809"], -(2**63)),
    ("seed", 1.5, ["integer"], 1), ("seed", "1", ["integer"], None), ("seed", 10**5000, ["16610 bits"], 0),
    ("ignore_eos", 1, ["true or false"], True), ("ignore_eos", None, ["true or false"], False),
    ("detokenize", "yes", ["true or false"], False), ("skip_special_tokens", 0, ["true or false"], False),
    ("spaces_between_special_tokens", 0.0, ["true or false"], False),
    ("include_stop_str_in_output", [], ["true or false", "list"], True),
    ("stop", "", ["0 characters", "4096"], "a"), ("stop", ["a", ""], ["stop[1]", "0 characters"], ["a", "b"]),
    ("stop", ["a"] * 65, ["65", "64"], ["a"] * 64), ("stop", ["a"] * 10_000, ["10000", "64"], []),
    ("stop", "a" * 4097, ["4097", "4096"], "a" * 4096), ("stop", "a" * 2**20, ["1048576"], "ab"),
    ("stop", [3], ["stop[0]", "string", "3"], ["3"]), ("stop", 3, ["list of strings"], None),
    ("stop", {"a": 1}, ["list"], ("a",)),
    ("stop", b"a", ["list of strings"], "a"), ("stop", "\ud800", ["surrogate"], "\ue000"),
    ("stop_token_ids", [512], ["stop_token_ids[0]", "511", "512"], [511]),
    ("stop_token_ids", [0, -1], ["[1]", "-1"], [0]),
    ("stop_token_ids", [2**63], ["9223372036854775808"], [1]), ("stop_token_ids", [1.0], ["integer"], []),
    ("stop_token_ids", "12", ["list"], [1, 2]), ("stop_token_ids", [True], ["integer", "true"], [1]),
    ("stop_token_ids", [1] * 1025, ["1025", "1024"], [1] * 1024), ("stop_token_ids", 5, ["list"], None),
    ("allowed_token_ids", [], ["empty", "512"], [0]), ("allowed_token_ids", [512], ["511"], list(range(512))),
    ("allowed_token_ids", [-1], ["-1"], [0]), ("allowed_token_ids", [0] * 513, ["513", "512"], [0] * 512),
    ("allowed_token_ids", ["1"], ["integer"], [1]), ("allowed_token_ids", {1}, ["list"], (1,)),
    ("logit_bias", {-1: 0.0}, ["0", "511", "-1"], {0: 0.0}), ("logit_bias", {512: 0.0}, ["511", "512"], {511: 0}),
    ("logit_bias", {2**63: 1.0}, ["9223372036854775808"], {1: 1.0}),
    ("logit_bias", {1: NAN}, ["[1]", "nan"], {1: -100}),
    ("logit_bias", {1: 101}, ["100", "101"], {1: 100}), ("logit_bias", {1: -INF}, ["-inf"], {}),
    ("logit_bias", {1: "1"}, ["number"], {1: 1}), ("logit_bias", {"1": 1.0}, ["integer", "'1'"], None),
    ("logit_bias", dict.fromkeys(range(1025), 0.0), ["1025", "1024"], dict.fromkeys(range(512), 0.0)),
    ("logit_bias", dict.fromkeys(range(10**6), 0.0), ["1000000", "1024"], {3: 1}),
    ("logit_bias", [1], ["object"], {1: 1}),
    ("logit_bias", {True: 1.0}, ["integer"], {1: 1.0}),
    ("bad_words", [""], ["bad_words[0]", "256"], ["a"]), ("bad_words", [" "], ["blank"], [" a"]),
    ("bad_words", ["a"] * 129, ["129", "128"], ["a"] * 128), ("bad_words", ["a" * 257], ["257", "256"], ["a" * 256]),
    ("bad_words", "a", ["list"], []), ("bad_words", [1], ["string"], None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "parts", "neighbour"), BAD, ids=[f"{row[0]}-{i}" for i, row in enumerate(BAD)]
)
def test_bad_values_are_refused_with_field_and_range(field, value, parts, neighbour):
    with pytest.raises(InputError) as caught:
        validate_sampling(SamplingParams(**{field: value}), limits=LIMITS)
    message = str(caught.value)
    assert caught.value.param == field
    assert field in message
    for part in parts:
        assert part in message
    assert len(message) < 200
    validate_sampling(SamplingParams(**{field: neighbour}), limits=LIMITS)
    # The same on the way of every front end.
    with pytest.raises(InputError, match=field):
        build_request("r", [1, 2, 3], SamplingParams(**{field: value}), limits=LIMITS)


def test_no_more_than_a_few_characters_of_a_client_s_text_come_back():
    secret = "s3cret" * 100
    for bad in ({"temperature": secret}, {"stop": [[secret]]}, {"logit_bias": {secret: 1}}, {"bad_words": [secret]}):
        with pytest.raises(InputError) as caught:
            validate_sampling(SamplingParams(**bad), limits=LIMITS)
        assert str(caught.value).count("s3cret") <= 13
        assert len(str(caught.value)) < 160


def test_everything_at_its_bound_at_once_is_accepted():
    validate_sampling(
        SamplingParams(
            n=16384, temperature=100, top_p=1, top_k=512, min_p=1, presence_penalty=-2, frequency_penalty=2,
            repetition_penalty=100, max_tokens=100, min_tokens=100, stop=["a"] * 64, logprobs=20, prompt_logprobs=20,
            seed=-(2**63), stop_token_ids=[0, 511], allowed_token_ids=[0, 511], bad_words=["b"] * 128,
            logit_bias={0: -100, 511: 100},
        ),
        limits=LIMITS,
    )  # fmt: skip
    validate_sampling(SamplingParams(), limits=LIMITS)


def test_numpy_numbers_and_fractions_are_numbers():
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_p=Fraction(1, 2), top_k=np.uint8(5), seed=np.uint64(2**64 - 1),
        max_tokens=np.int32(5), stop_token_ids=[np.int64(3)], logit_bias={np.int32(4): np.float64(1)},
        allowed_token_ids=np.arange(5),
    )  # fmt: skip
    request = build_request("r", np.array([1, 2], dtype=np.int32), params, limits=LIMITS)
    assert request.prompt_token_ids == [1, 2]
    for value in (request.n, request.max_tokens, request.rules.top_k, request.rules.seed, *request.prompt_token_ids,
                  *request.rules.stop_ids, *request.rules.logit_bias, *request.rules.allowed_ids):  # fmt: skip
        assert type(value) is int
    assert type(request.rules.temperature) is type(request.rules.logit_bias[4]) is float
    for bad in (np.float32("nan"), np.float64("inf"), np.bool_(True)):
        with pytest.raises(InputError):
            validate_sampling(SamplingParams(temperature=bad), limits=LIMITS)


def test_stop_strings_need_text():
    with pytest.raises(InputError, match="detokenize") as caught:
        validate_sampling(SamplingParams(stop="a", detokenize=False), limits=LIMITS)
    assert caught.value.param == "stop"
    validate_sampling(SamplingParams(stop=[], detokenize=False), limits=LIMITS)
    assert stop_strings(SamplingParams(stop="ab")) == ["ab"]
    assert stop_strings(SamplingParams(stop=["a", "b"])) == ["a", "b"]
    assert stop_strings(SamplingParams()) == []


def test_logprobs_of_all_tokens_where_the_engine_allows_them():
    for free in (replace(LIMITS, max_logprobs=-1), replace(LIMITS, max_logprobs=512)):
        params = SamplingParams(logprobs=-1, prompt_logprobs=512)
        rules = build_request("r", [1], params, limits=free).rules
        assert (rules.num_logprobs, rules.num_prompt_logprobs) == (512, 512)
        with pytest.raises(InputError, match="512"):
            validate_sampling(SamplingParams(logprobs=513), limits=free)
    rules = build_request("r", [1], SamplingParams(logprobs=0), limits=LIMITS).rules
    assert (rules.num_logprobs, rules.num_prompt_logprobs) == (0, -1)


PROMPTS = [
    ([-1], ["prompt[0]", "-1", "511"]), ([0, 512], ["prompt[1]", "512", "511"]), ([1.0], ["integer"]),
    ([1, 2.5], ["[1]"]),
    ([True], ["integer", "true"]), (["1"], ["integer", "'1'"]), ([None], ["null"]), ([[1]], ["list"]),
    ([2**63], ["511"]),
    ([], ["empty", "1 token"]), ("text", ["list of token ids", "'text'"]), (None, ["null"]), (7, ["7"]),
    (b"ab", ["list"]),
    ({1: 2}, ["list", "dict"]), ([1] * 100, ["100 tokens", "100", "99"]), ([1] * 101, ["101 tokens", "100"]),
    ([1] * 10**6, ["1000000 tokens", "100"]),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "parts"), PROMPTS, ids=range(len(PROMPTS)))
def test_bad_prompts_are_refused(ids, parts):
    params = SamplingParams(max_tokens=1)
    for call in (
        lambda: validate_prompt_ids(ids, LIMITS),
        lambda: build_request("r", ids, params, limits=LIMITS),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.param == "prompt"
        for part in ["prompt", *parts]:
            assert part in str(caught.value)
        assert len(str(caught.value)) < 250
    with pytest.raises(InputError, match="messages"):
        validate_prompt_ids(ids, LIMITS, param="messages")


def test_prompt_and_max_tokens_fill_the_context_exactly_and_not_by_one_more():
    assert validate_prompt_ids([1] * 60, LIMITS, 40) == 40
    with pytest.raises(InputError) as caught:
        validate_prompt_ids([1] * 61, LIMITS, 40)
    assert caught.value.param == "max_tokens"
    for part in ("61 tokens", "max_tokens is 40", "101", "100", "at most 39"):
        assert part in str(caught.value)
    assert validate_prompt_ids([1] * 99, LIMITS, 1) == 1
    assert validate_prompt_ids([1] * 99, LIMITS) == 1
    assert validate_prompt_ids([1] * 60, LIMITS) == 40  # all that is left
    with pytest.raises(InputError, match="max_tokens must be from 1 to 100, not 0"):
        validate_prompt_ids([1], LIMITS, 0)


def test_prompt_and_max_tokens_must_fit_the_kv_pool():
    small = replace(LIMITS, kv_capacity_tokens=64)
    assert validate_prompt_ids([1] * 60, small, 4) == 4
    assert validate_prompt_ids([1] * 60, small) == 4
    with pytest.raises(
        InputError, match=r"together 65, but by the size of the KV cache this model's maximum context length is 64"
    ) as caught:
        validate_prompt_ids([1] * 60, small, 5)
    assert caught.value.param == "max_tokens"
    with pytest.raises(
        InputError, match=r"64 tokens, but by the size of the KV cache this model's maximum context length is 64"
    ):
        validate_prompt_ids([1] * 64, small)
    assert validate_prompt_ids([1] * 60, replace(LIMITS, kv_capacity_tokens=1000), 40) == 40


def test_min_tokens_is_held_against_what_is_left():
    params = SamplingParams(max_tokens=None, min_tokens=40)
    assert build_request("r", [1] * 60, params, limits=LIMITS).max_tokens == 40
    with pytest.raises(InputError) as caught:
        build_request("r", [1] * 61, params, limits=LIMITS)
    assert caught.value.param == "min_tokens"
    for part in ("min_tokens is 40", "61 tokens", "100", "39"):
        assert part in str(caught.value)
    with pytest.raises(InputError, match="max_tokens is 4"):
        build_request("r", [1], SamplingParams(max_tokens=4, min_tokens=5), limits=LIMITS)
    assert build_request("r", [1], SamplingParams(max_tokens=4, min_tokens=4), limits=LIMITS).rules.min_tokens == 4


BEAMS = [
    ("beam_width", 0, 1), ("beam_width", 65, 64), ("beam_width", 2.0, 2), ("beam_width", True, 1), ("max_tokens", 0, 1),
    ("max_tokens", 101, 100), ("max_tokens", None, 5), ("temperature", NAN, 0.0), ("temperature", -1, 0),
    ("length_penalty", INF, 100), ("length_penalty", NAN, -100), ("length_penalty", "1", 1), ("ignore_eos", 1, True),
    ("include_stop_str_in_output", None, False),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "neighbour"), BEAMS)
def test_bad_beam_parameters_are_refused(field, value, neighbour):
    good = {"beam_width": 4, "max_tokens": 8}
    with pytest.raises(InputError, match=field) as caught:
        validate_beam(BeamSearchParams(**good | {field: value}), limits=LIMITS)
    assert caught.value.param == field
    validate_beam(BeamSearchParams(**good | {field: neighbour}), limits=LIMITS)


def test_beam_width_is_bounded_by_the_vocabulary():
    with pytest.raises(InputError, match="from 1 to 5"):
        validate_beam(BeamSearchParams(beam_width=6, max_tokens=1), limits=replace(LIMITS, vocab_size=10))


def test_beam_requests():
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    request = build_request("r", [1, 5], params, limits=LIMITS)
    assert request.beam is params
    assert (request.n, request.max_tokens, request.eos_token_ids, request.rules.greedy) == (1, 8, [2], True)
    with pytest.raises(InputError, match="max_tokens is 99"):
        build_request("r", [1, 5], BeamSearchParams(beam_width=4, max_tokens=99), limits=LIMITS)


def test_wrong_kinds_of_parameters():
    with pytest.raises(InputError, match="not dict"):
        validate_sampling({"n": 1}, limits=LIMITS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not SamplingParams"):
        validate_beam(SamplingParams(), limits=LIMITS)  # type: ignore[arg-type]


def test_requests_carry_what_was_asked():
    params = SamplingParams(
        n=3, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.2, max_tokens=7, min_tokens=2, stop_token_ids=[9, 2], logprobs=4, logit_bias={5: 1},
        allowed_token_ids=[5, 6],
    )  # fmt: skip
    request = build_request(
        "id", [1, 2], params, limits=LIMITS, seed=11, priority=-3, namespace=b"t", taint="q", arrival_s=1.5
    )
    rules = request.rules
    assert (request.request_id, request.n, request.max_tokens) == ("id", 3, 7)
    assert (request.priority, request.namespace, request.taint, request.arrival_s) == (-3, b"t", "q", 1.5)
    assert (request.stop_token_ids, request.eos_token_ids) == ([9, 2], [2])
    assert (rules.temperature, rules.top_p, rules.top_k, rules.min_p) == (0.7, 0.9, 0, 0.1)
    assert (rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty) == (0.5, 0.25, 1.2)
    assert (rules.min_tokens, rules.stop_ids, rules.allowed_ids) == (2, [9, 2], [5, 6])
    assert (rules.logit_bias, rules.num_logprobs, rules.num_prompt_logprobs, rules.seed) == ({5: 1.0}, 4, -1, 11)
    ignoring = build_request("id", [1], SamplingParams(ignore_eos=True, seed=-5), limits=LIMITS)
    assert (ignoring.eos_token_ids, ignoring.rules.stop_ids, ignoring.rules.seed) == ([], [], -5)


def test_memory_of_prompt_logprobs_is_bounded():
    limits = replace(LIMITS, max_prompt_logprob_entries=60)
    build_request("r", [1] * 10, SamplingParams(prompt_logprobs=5), limits=limits)
    with pytest.raises(InputError, match=r"66 entries; at most 60") as caught:
        build_request("r", [1] * 11, SamplingParams(prompt_logprobs=5), limits=limits)
    assert caught.value.param == "prompt_logprobs"


def test_bad_words_become_sequences_with_and_without_a_space():
    gpt2 = vocabularies.gpt2()
    limits = Limits(vocab_size=gpt2.vocab_size, max_model_len=100)
    rules = make_rules(SamplingParams(bad_words=["bad", "New York", "  bad"]), gpt2, limits)
    pieces = [[gpt2.id_to_piece(i) for i in ids] for ids in rules.bad_sequences]
    assert pieces == [["bad"], ["Ġbad"], ["New", "ĠYork"], ["ĠNew", "ĠYork"]]
    llama = vocabularies.llama2()
    rules = make_rules(SamplingParams(bad_words=["bad"]), llama, replace(limits, vocab_size=32000))
    assert [[llama.id_to_piece(i) for i in ids] for ids in rules.bad_sequences] == [["▁bad"]]
    assert 1 not in rules.bad_sequences[0]  # no BOS


def test_bad_words_need_a_tokenizer_and_ids_of_the_model():
    with pytest.raises(InputError, match="tokenizer") as caught:
        make_rules(SamplingParams(bad_words=["a"]), None, LIMITS)
    assert caught.value.param == "bad_words"
    with pytest.raises(InputError, match=r"bad_words\[1\] is 'zebra'.*512") as caught:
        make_rules(SamplingParams(bad_words=["a", "zebra"]), vocabularies.gpt2(), LIMITS)
    assert caught.value.param == "bad_words"
