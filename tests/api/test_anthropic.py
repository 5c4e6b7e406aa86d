"""/v1/messages with the official client on a real socket: the bundled model, and a script where it must call tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM
from penstock.server.anthropic.events import BlockWriter
from penstock.server.errors import WireError
from penstock.server.live import LiveServer
from penstock.server.parsing.events import CallArguments, CallStart, Content
from penstock.server.routes import messages as route
from tests.api.conftest import bundled
from tests.api.scripted import SCRIPT, Scripts, splits

MANY = 6
GREEDY: dict[str, Any] = {"model": "nano", "max_tokens": MANY, "extra_body": {"temperature": 0}}
WORDS = "I would like to order a pizza."  # what nano answers with more than MANY tokens
ASK: Any = [{"role": "user", "content": WORDS}]
BLOCKS = [
    {"type": "thinking", "thinking": "First I look.", "signature": ""},
    {"type": "text", "text": "It is höt 🦊"},
    {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Bern"}},
    {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(bundled(), ops="ref", max_model_len=512, num_gpu_blocks_override=64)


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def chat(llm: LLM, messages: list[dict[str, Any]], max_tokens: int = MANY, **options: Any) -> str:
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens), **options)[0].outputs[0].text


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


# -- the bundled model -------------------------------------------------------------------------------------------


def test_text_is_that_of_chat(sdk: anthropic.Anthropic, llm: LLM) -> None:
    got = sdk.messages.create(messages=ASK, **GREEDY)
    assert text_of(got) == chat(llm, ASK)
    assert (got.type, got.role, got.model, got.stop_reason) == ("message", "assistant", "nano", "max_tokens")
    assert got.id.startswith("msg_")
    count = sdk.messages.count_tokens(messages=ASK, model="nano").input_tokens
    cached = got.usage.cache_read_input_tokens
    assert cached is not None
    assert (got.usage.input_tokens + cached, got.usage.output_tokens) == (count, MANY)
    blocks: Any = [
        {"role": "user", "content": [{"type": "text", "text": WORDS, "cache_control": {"type": "ephemeral"}}]}
    ]
    system: Any = [{"type": "text", "text": "You know animals."}]
    want = chat(llm, [{"role": "system", "content": "You know animals."}, *ASK])
    assert text_of(sdk.messages.create(messages=blocks, system=system, **GREEDY)) == want


def test_a_stream_adds_up(sdk: anthropic.Anthropic, llm: LLM) -> None:
    with sdk.messages.stream(messages=ASK, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == chat(llm, ASK)
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == MANY
    whole = sdk.messages.create(messages=ASK, **GREEDY)
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == final.usage.input_tokens + (
        final.usage.cache_read_input_tokens or 0
    )


def test_the_asynchronous_client_streams(live: LiveServer, llm: LLM) -> None:
    async def ask() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=live.url, api_key="none") as client:
            async with client.messages.stream(messages=ASK, **GREEDY) as stream:
                streamed = "".join([text async for text in stream.text_stream])
            return streamed, text_of(await client.messages.create(messages=ASK, **GREEDY))

    want = chat(llm, ASK)
    assert asyncio.run(ask()) == (want, want)


def test_stop_sequences_and_prefills(sdk: anthropic.Anthropic, llm: LLM) -> None:
    whole = chat(llm, ASK, 30)
    stop = whole[5:8]
    got = sdk.messages.create(messages=ASK, stop_sequences=[stop], **{**GREEDY, "max_tokens": 30})
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)
    assert text_of(got) == whole[: whole.index(stop)]
    begun: Any = [*ASK, {"role": "assistant", "content": "Once there"}]
    want = chat(llm, begun, add_generation_prompt=False, continue_final_message=True)
    assert text_of(sdk.messages.create(messages=begun, **GREEDY)) == want


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "input"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 10_000}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"stop": ["a"]}, "stop_sequences"),
    ],
)
def test_bad_input_is_named_in_anthropics_shape(http: httpx.Client, change: dict[str, Any], named: str) -> None:
    body = {"messages": ASK, "max_tokens": 3, **change}
    answer = http.post("/v1/messages", json={k: v for k, v in body.items() if v is not None})
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert named in told["error"]["message"]


def test_errors_have_anthropics_shape_for_its_client(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        sdk.messages.create(messages=ASK, model="claude-9", max_tokens=3)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        sdk.messages.create(messages=ASK, model="nano", max_tokens=0)
    answer = http.post("/v1/messages", content=b"{")
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    beta = http.post(
        "/v1/messages?beta=true", json={"messages": ASK, "max_tokens": 2}, headers={"anthropic-version": "x"}
    )
    assert beta.status_code == 200


# -- tool calls and thoughts, scripted ---------------------------------------------------------------------------


def test_every_split_adds_up_to_the_same_blocks() -> None:
    count = 0
    for events in splits(SCRIPT):
        writer = BlockWriter()
        out = [e for event in events for e in writer.feed([event])] + writer.finish()
        assert writer.blocks == BLOCKS
        made: list[Any] = []
        is_open = False
        for e in out:
            match e["type"]:
                case "content_block_start":
                    assert not is_open
                    assert e["index"] == len(made)
                    made.append({**e["content_block"], "json": ""})
                    is_open = True
                case "content_block_delta":
                    assert is_open
                    assert e["index"] == len(made) - 1
                    delta = dict(e["delta"])
                    kind = delta.pop("type")
                    ((key, value),) = delta.items()
                    at = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[kind]
                    made[-1][at] += value
                    assert value
                    assert key in ("text", "thinking", "partial_json")
                case "content_block_stop":
                    assert e["index"] == len(made) - 1
                    is_open = False
        assert not is_open
        for block in made:
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
        assert made == BLOCKS
        count += 1
    assert count == 255


def test_tool_use_in_the_official_client(
    live: LiveServer, sdk: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Scripts()
    monkeypatch.setattr(route, "begin", scripts.begin)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools: Any = [{"name": "weather", "description": "of a city", "input_schema": schema}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with sdk.messages.stream(messages=ASK, tools=tools, tool_choice=choice, **GREEDY) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "thinking", "input_json")]
        final = stream.get_final_message()
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [k for k in map(str, kinds) if k != "ping"] == ["message_start", *block * 4, "message_delta", "message_stop"]
    assert [b.to_dict() for b in final.content] == BLOCKS
    assert final.stop_reason == "tool_use"
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens, final.usage.output_tokens) == (3, 4, 6)
    whole = sdk.messages.create(messages=ASK, tools=tools, **GREEDY)
    assert [b.to_dict() for b in whole.content] == BLOCKS
    asked = scripts.asked[0]
    function = {"name": "weather", "description": "of a city", "parameters": schema}
    assert asked.tools == [{"type": "function", "function": function}]
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("required", False)


def test_tool_results_become_messages(
    live: LiveServer, sdk: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Scripts()
    monkeypatch.setattr(route, "begin", scripts.begin)
    results: Any = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "call_b", "content": "no clock", "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    turns: Any = [*ASK, {"role": "assistant", "content": BLOCKS}, {"role": "user", "content": results}]
    sdk.messages.create(messages=turns, thinking={"type": "enabled", "budget_tokens": 1024}, **GREEDY)
    calls = [
        {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
        {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    asked = scripts.asked[0]
    assert asked.messages == [
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": "It is höt 🦊", "reasoning_content": "First I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_a", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_b", "content": "Error: no clock"},
        {"role": "user", "content": "And now?"},
    ]
    assert asked.chat_template_kwargs == {"enable_thinking": True}
    assert not asked.continue_final_message


def test_a_failure_midway_is_an_error_event(
    live: LiveServer, sdk: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = WireError(503, "the request was aborted", code="aborted")
    monkeypatch.setattr(route, "begin", Scripts([Content("ab")], failure=failure).begin)
    with (
        pytest.raises(anthropic.APIStatusError, match="overloaded_error"),
        sdk.messages.stream(messages=ASK, **GREEDY) as s,
    ):
        for _ in s:
            pass
    with pytest.raises(anthropic.APIStatusError) as caught:
        sdk.messages.create(messages=ASK, **GREEDY)
    assert caught.value.status_code == 503


def test_a_call_that_was_cut_off_keeps_its_text() -> None:
    writer = BlockWriter()
    writer.feed([CallStart(0, "c", "f"), CallArguments(0, '{"a": [1')])
    writer.finish()
    assert writer.blocks == [{"type": "tool_use", "id": "c", "name": "f", "input": {"INVALID_JSON": '{"a": [1'}}]


def test_a_reader_that_leaves_ends_its_message(live: LiveServer) -> None:
    body = {"messages": ASK, "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}
    assert live.server is not None
    assert live.loop is not None
    ended = asyncio.Event()
    with httpx.Client(base_url=live.url, timeout=60) as client, client.stream("POST", "/v1/messages", json=body) as s:
        lines = s.iter_lines()
        next(line for line in lines if "content_block_delta" in line)

        async def follow() -> Any:
            (stream,) = live.server.client._streams.values()  # type: ignore[union-attr]
            stream.on_end(ended.set)
            return stream

        stream = asyncio.run_coroutine_threadsafe(follow(), live.loop).result(10)
    asyncio.run_coroutine_threadsafe(ended.wait(), live.loop).result(10)
    assert stream.final.outputs[0].finish_reason == "abort"
    assert len(stream.final.outputs[0].token_ids) < 400
