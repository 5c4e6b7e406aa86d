"""What a request did not say is never held against it, and usage counts what was done: every API in its own words."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from penstock.server.live import LiveServer
from penstock.text.defaults import MILD

CONTEXT = 512
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def generation_config(live: LiveServer, mine: dict[str, Any]) -> Iterator[None]:
    assert live.server is not None
    parts = live.server.parts
    front = parts["front"]
    parts["front"] = dataclasses.replace(front, generation_config=mine)
    try:
        yield
    finally:
        parts["front"] = front


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    lines = http.post(path, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# -- defaults of the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [CONTEXT - 1, CONTEXT, 10**6])
def test_a_default_length_is_bounded_by_what_is_left(live: LiveServer, http: httpx.Client, most: int) -> None:
    long = "The cat and the dog went to the house. "
    one = ask(http, "/tokenize", prompt=long)["count"]
    long *= (CONTEXT - 30) // one
    with generation_config(live, {"max_new_tokens": most}):
        full = {"ignore_eos": True, "temperature": 0}
        chat = ask(http, CHAT, messages=[{"role": "user", "content": long}], **full)
        assert chat["usage"]["total_tokens"] == CONTEXT
        assert ask(http, "/v1/responses", input=long, **full)["usage"]["total_tokens"] == CONTEXT
        assert ask(http, TEXT, prompt=[7] * 500, max_tokens=None, **full)["usage"]["total_tokens"] == CONTEXT
        asked = http.post(CHAT, json={"messages": HELLO, "max_tokens": CONTEXT})
        assert asked.json()["error"]["param"] == "max_tokens", "who asks for too much is told"


def test_the_default_length_of_completions_too(live: LiveServer, http: httpx.Client) -> None:
    body = {"prompt": [7] * (CONTEXT - 5), "ignore_eos": True, "temperature": 0}
    assert ask(http, TEXT, **body)["usage"]["completion_tokens"] == 5
    ended = events(http, TEXT, stream_options={"include_usage": True}, **body)
    assert ended[-1]["usage"]["completion_tokens"] == 5
    two = ask(http, TEXT, prompt=[[7] * (CONTEXT - 5), [7] * 9], ignore_eos=True)["usage"]
    assert two["completion_tokens"] == 5 + 16, "each prompt for itself"


def test_a_minimum_that_was_asked_for_beats_a_default_length(live: LiveServer, http: httpx.Client) -> None:
    assert ask(http, TEXT, prompt="a", min_tokens=20, temperature=0)["usage"]["completion_tokens"] == 20
    with generation_config(live, {"max_new_tokens": 3}):
        assert ask(http, CHAT, messages=HELLO, min_tokens=7)["usage"]["completion_tokens"] == 7
        assert ask(http, CHAT, messages=HELLO, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_no_default_is_held_against_a_request(
    live: LiveServer, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    bad: list[dict[str, Any]] = [
        {"temperature": -1}, {"temperature": 1e9}, {"temperature": float("nan")}, {"temperature": True},
        {"top_p": 0}, {"top_p": 1.5}, {"top_k": 50.0}, {"top_k": -3}, {"top_k": 2**40}, {"min_p": 7}, {"min_p": "0.1"},
        {"repetition_penalty": 0}, {"repetition_penalty": -1.0}, {"max_new_tokens": 0}, {"max_new_tokens": 1.5},
        {"max_new_tokens": None}, {"temperature": None}, {"max_length": 1}, {"min_new_tokens": 10**6},
        {"min_length": 600}, {"do_sample": False, "penalty_alpha": 0.6, "num_beams": 4},
    ]  # fmt: skip
    for mine in bad:
        with generation_config(live, mine), caplog.at_level(logging.WARNING, "penstock.server"):
            caplog.clear()
            for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"}), (MESSAGES, {"messages": HELLO})):
                assert ask(http, path, **body, max_tokens=1)["usage"], mine
            assert http.get("/v1/models").json()["data"][0]["default_sampling_params"] == MILD, mine
            told = [record for record in caplog.records if record.filename == "defaults.py"]
            assert len(told) <= 1, "said once, not with every request"
    good = {"temperature": 0, "do_sample": False, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.1}
    with generation_config(live, good):
        assert http.get("/v1/models").json()["data"][0]["default_sampling_params"] == {
            name: value for name, value in good.items() if name != "do_sample"
        }
        told = [ask(http, CHAT, messages=HELLO, max_tokens=8)["choices"][0]["message"] for _ in range(2)]
        assert told[0] == told[1]
    with generation_config(live, {"top_k": -1}):
        ask(http, CHAT, messages=HELLO, max_tokens=2)


# -- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("prompt", ["Once upon a time", [7, 8, 9], ["Once", "The cat sat"], [[7, 8], [9]]])
def test_a_prompt_that_is_only_looked_at_has_no_completion(
    http: httpx.Client, prompt: Any, logprobs: int | None
) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs, "temperature": 0}
    got = ask(http, TEXT, **body)
    usage = got["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    num = 0
    for choice in got["choices"]:
        num += len(choice["logprobs"]["tokens"]) if logprobs is not None else 0
        assert choice["finish_reason"] == "length"
        if isinstance(prompt, str):
            assert choice["text"] == prompt
    assert num == (usage["prompt_tokens"] if logprobs is not None else 0)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http, TEXT, stream_options=options, **body)
    assert {chunk["usage"]["completion_tokens"] for chunk in chunks} == {0}
    texts = [
        "".join(p["text"] for c in chunks for p in c["choices"] if p["index"] == i["index"]) for i in got["choices"]
    ]
    assert texts == [choice["text"] for choice in got["choices"]]
    kept = ask(http, TEXT, **body | {"return_token_ids": True, "n": 2, "temperature": 1})
    assert kept["usage"]["completion_tokens"] == 0
    assert {tuple(choice["token_ids"]) for choice in kept["choices"]} == {()}


def test_a_message_starts_with_the_usage_that_it_ends_with(http: httpx.Client) -> None:
    words = "The cat and the dog went to the house and had a long talk about it. " * 6
    body: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "max_tokens": 6, "temperature": 0}
    count = ask(http, "/v1/messages/count_tokens", messages=body["messages"])["input_tokens"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    salted = {"cache_salt": "usage of messages"}
    first = events(http, MESSAGES, **body, **salted)
    whole = ask(http, MESSAGES, **body, **salted)["usage"]
    again = events(http, MESSAGES, **body, **salted)
    for told in (first, again):
        assert told[0]["type"] == "message_start"
        begun, ended = told[0]["message"], told[-2]["usage"]
        assert [begun["usage"][name] for name in names] == [ended[name] for name in names]
        assert (begun["content"], begun["stop_reason"], begun["stop_sequence"]) == ([], None, None)
        assert begun["usage"]["output_tokens"] <= ended["output_tokens"] == whole["output_tokens"]
        assert ended["input_tokens"] + ended["cache_read_input_tokens"] == count
    assert first[0]["message"]["usage"]["cache_read_input_tokens"] == 0
    assert whole["cache_read_input_tokens"] > 0
    assert [whole[name] for name in names] == [again[0]["message"]["usage"][name] for name in names]
    openai = ask(http, CHAT, **body, **salted)["usage"]
    assert openai["prompt_tokens"] == count, "OpenAI's count has them in it"
    assert openai["prompt_tokens_details"]["cached_tokens"] == whole["cache_read_input_tokens"]
    response = ask(http, "/v1/responses", input=body["messages"], max_output_tokens=6, **salted)["usage"]
    assert response["input_tokens"] == count
    assert response["input_tokens_details"]["cached_tokens"] == whole["cache_read_input_tokens"]


def test_a_message_of_one_token_starts_empty(http: httpx.Client) -> None:
    told = events(http, MESSAGES, messages=HELLO, max_tokens=1, temperature=0)
    begun = told[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 1)
    assert told[-2]["delta"]["stop_reason"] == "max_tokens"


# -- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [" 5", "5 ", "+5", "-5", "-0", "05", "00", "5_0", "5.0", "5e0", "\u0665", "\uff15",
                                 "0x5", "", " ", "\n5", "5\n", "true", "null", "5" * 40])  # fmt: skip
def test_only_the_plain_number_names_a_token(http: httpx.Client, key: str) -> None:
    answer = http.post(TEXT, json={"prompt": "a", "max_tokens": 1, "logit_bias": {key: 1}})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "logit_bias"
    assert http.post(TEXT, json={"prompt": "a", "max_tokens": 1, "logit_bias": {"0": 1, "50": -1}}).status_code == 200


@pytest.mark.parametrize("bad", [" 5", "5", "+5", True, 5.0, None, [5]])
def test_only_a_whole_number_is_a_token(http: httpx.Client, bad: Any) -> None:
    for field in ("stop_token_ids", "allowed_token_ids"):
        answer = http.post(TEXT, json={"prompt": "a", "max_tokens": 1, field: [5, bad]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"{field}[1]")
    for prompt in ([5, bad], [[5, bad]], [[5], bad], [bad, 5]):
        if prompt in ([bad, 5], [[5], bad]) and isinstance(bad, list):
            continue
        assert http.post(TEXT, json={"prompt": prompt, "max_tokens": 1}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [5, bad]}).status_code == 400
