"""Bound answers of a model that thinks: the thought is free, and the answer is what was asked for."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.engine.process_link import ProcessLink
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.api.watch import scrape
from tests.unit.server.test_parsing_templates import HERMES

TEMPLATE = HERMES.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens is not defined or opens %}<think>\n{% endif %}{% endif %}",
)
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
USER = [{"role": "user", "content": "Paint the house of the old man by the river, please."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ITSELF = {"chat_template_kwargs": {"opens": False}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def serving(**settings: Any) -> LiveServer:
    assert "enable_thinking" in TEMPLATE
    common = {
        "port": 0,
        "ops": "native",
        "max_model_len": 512,
        "num_gpu_blocks_override": 128,
        "block_size": 16,
        "chat_template": TEMPLATE,
    }
    return LiveServer(serve_from_kwargs(model=bundled(), **{**common, **settings}))


@pytest.fixture(scope="module")
def thinking() -> Iterator[LiveServer]:
    with serving() as live:
        yield live


def post(live: LiveServer, path: str, **body: Any) -> Any:
    sized = {"max_output_tokens" if path == RESPONSES else "max_tokens": 320}
    said = {"input": "hi"} if path == RESPONSES else {"messages": USER}
    answer = httpx.post(live.url + path, json={**said, **sized, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def choice(live: LiveServer, **body: Any) -> Any:
    return post(live, CHAT, **body)["choices"][0]


def is_answer(text: str) -> bool:
    return json.loads(text) in ({"a": "x"}, {"a": "y"})


@pytest.mark.parametrize("seed", range(3))
def test_the_answer_is_bound_and_the_thought_is_not(thinking: LiveServer, seed: int) -> None:
    # The grammar bars ends of text, which a free thought may draw: at this temperature they weigh nothing.
    how = {"seed": seed, "temperature": 0.3}
    found = choice(thinking, response_format=FORMAT, **how)
    assert found["finish_reason"] == "stop"
    assert is_answer(found["message"]["content"])
    free = choice(thinking, max_tokens=40, min_tokens=40, **how)["message"]["reasoning"]
    thought = found["message"]["reasoning"]
    assert len(thought) > 5
    assert thought.startswith(free.rstrip()[:20]), "the grammar has changed the thought"


@pytest.mark.parametrize(
    ("asked", "answers"),
    [({"choice": ["yes", "no"]}, ("yes", "no")), ({"choice": ["\nyes"]}, ("\nyes",)), ({"regex": "a{3}"}, ("aaa",)),
     ({"grammar": 'root ::= "<think>" | "[THINK]"'}, ("<think>", "[THINK]"))],
)  # fmt: skip
def test_every_kind_of_structured_output(thinking: LiveServer, asked: Any, answers: tuple[str, ...]) -> None:
    for more in ({}, OFF):
        found = choice(thinking, structured_outputs=asked, seed=3, **more)
        assert found["message"]["content"] in answers
        assert found["message"].get("reasoning", "") == "" if more else found["message"]["reasoning"]


def test_responses_and_messages(thinking: LiveServer) -> None:
    format = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    thought, message = post(thinking, RESPONSES, text={"format": format}, seed=1)["output"]
    assert (thought["type"], message["type"]) == ("reasoning", "message")
    assert is_answer(message["content"][0]["text"])
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    thought, text = post(thinking, MESSAGES, output_config=config, seed=1)["content"]
    assert (thought["type"], text["type"]) == ("thinking", "text")
    assert is_answer(text["text"])
    (text,) = post(thinking, MESSAGES, output_config=config, seed=1, thinking={"type": "disabled"})["content"]
    assert is_answer(text["text"])


@pytest.mark.parametrize("more", [OFF, ITSELF])
def test_where_the_prompt_opens_no_thought(thinking: LiveServer, more: dict[str, Any]) -> None:
    for seed in range(3):
        found = choice(thinking, response_format=FORMAT, seed=seed, **more)["message"]
        assert is_answer(found["content"])
        assert more is ITSELF or "reasoning" not in found


def test_a_thought_that_the_model_opens_itself(thinking: LiveServer) -> None:
    """nano never would: its first token is made likely."""
    with httpx.Client(base_url=thinking.url) as http:
        ids = http.post("/tokenize", json={"prompt": "<think>", "add_special_tokens": False}).json()["tokens"]
    found = choice(thinking, response_format=FORMAT, seed=2, logit_bias={str(ids[0]): 100}, **ITSELF)
    assert found["message"]["reasoning"]
    assert is_answer(found["message"]["content"])


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_tokens_that_are_over_within_the_thought(thinking: LiveServer, max_tokens: int) -> None:
    found = choice(thinking, response_format=FORMAT, max_tokens=max_tokens, seed=1)
    assert found["finish_reason"] == "length"
    assert not found["message"]["content"]


def test_samples_streams_and_logprobs_agree(thinking: LiveServer) -> None:
    body = {"response_format": FORMAT, "seed": 5, "n": 3, "logprobs": True, "top_logprobs": 2}
    whole = post(thinking, CHAT, **body)["choices"]
    assert all(is_answer(one["message"]["content"]) for one in whole)
    for one in whole:
        written = "".join(token["token"] for token in one["logprobs"]["content"])
        assert one["message"]["content"] in written
        assert "</think>" in written
    content, thoughts = [""] * 3, [""] * 3
    sent = {"messages": USER, "max_tokens": 320, "stream": True, **body}
    with httpx.stream("POST", thinking.url + CHAT, json=sent, timeout=120) as answer:
        for line in answer.iter_lines():
            for part in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                content[part["index"]] += part["delta"].get("content") or ""
                thoughts[part["index"]] += part["delta"].get("reasoning") or ""
    assert content == [one["message"]["content"] for one in whole]
    assert thoughts == [one["message"]["reasoning"] for one in whole]
    again = post(thinking, CHAT, **body)  # the prompt comes from the prefix cache
    assert again["choices"] == whole
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("named", [False, True])
def test_calls_that_are_required_come_behind_the_thought(thinking: LiveServer, named: bool) -> None:
    wanted: Any = {"type": "function", "function": {"name": "paint"}} if named else "required"
    for more in ({}, OFF):
        found = choice(thinking, tools=[TOOL], tool_choice=wanted, parallel_tool_calls=False, seed=5, **more)
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] == "paint"
        assert is_answer(call["function"]["arguments"])
        assert not found["message"]["content"]
        assert bool(found["message"].get("reasoning")) == (not more)
        assert found["finish_reason"] == "tool_calls"
    kind = {"type": "tool", "name": "paint"} if named else {"type": "any"}
    tool = {"name": "paint", "input_schema": SCHEMA}
    blocks = post(thinking, MESSAGES, tools=[tool], tool_choice={**kind, "disable_parallel_tool_use": True}, seed=4)
    assert [block["type"] for block in blocks["content"]] == ["thinking", "tool_use"]


def test_with_drafts_and_with_preemption_the_answers_are_the_same(thinking: LiveServer) -> None:
    body = {"response_format": FORMAT, "temperature": 0, "n": 2}
    expected = [post(thinking, CHAT, **body, prediction={"type": "content", "content": '{"a": "x"}'})["choices"]]
    expected += [post(thinking, CHAT, **body, seed=n)["choices"] for n in range(4)]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "controller": "fixed"}
    for settings in ({"speculative_config": drafts}, {"num_gpu_blocks_override": 40, "enable_prefix_caching": False}):
        with serving(engine_in_process=True, **settings) as live, ThreadPoolExecutor(5) as pool:
            first = pool.submit(
                post, live, CHAT, **body, prediction={"type": "content", "content": '{"a": "x"}'}
            )  # fmt: skip
            others = [pool.submit(post, live, CHAT, **body, seed=n) for n in range(4)]
            assert [one.result()["choices"] for one in (first, *others)] == expected
            assert "speculative_config" in settings or scrape(live.url)["penstock:num_preemptions_total"] > 0


def test_the_end_of_an_engine_changes_no_answer(thinking: LiveServer) -> None:
    body = {"response_format": FORMAT, "max_tokens": 400}
    assert thinking.server is not None
    link = thinking.server.client.link
    assert isinstance(link, ProcessLink)
    assert link.pid is not None
    with ThreadPoolExecutor(4) as pool:
        calm = [one["choices"] for one in pool.map(lambda n: post(thinking, CHAT, **body, seed=n), range(4))]
        wild = [pool.submit(post, thinking, CHAT, **body, seed=n) for n in range(4)]
        while thinking.server.client.num_live < 4:
            assert not any(one.done() for one in wild)
        os.kill(link.pid, signal.SIGKILL)
        assert [one.result()["choices"] for one in wild] == calm
    assert all(is_answer(one[0]["message"]["content"]) for one in calm)


def test_without_a_parser_of_thoughts_the_whole_output_is_bound(tmp_path: Path) -> None:
    with serving(reasoning_parser="none", engine_in_process=True) as live:
        found = choice(live, response_format=FORMAT, seed=1)["message"]
        assert is_answer(found["content"])
        assert "reasoning" not in found
