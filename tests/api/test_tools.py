"""Tool calls end to end: the bundled model cannot choose tools, but bound by a grammar it writes calls."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from penstock.server.tool_times import ToolUse
from tests.api.conftest import bundled
from tests.unit.server.test_parsing_templates import HERMES

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {
        "city": {"enum": ["Köln", 'a "b" \\ \n</tool_call>', "Bern"]}, "days": {"type": "integer", "minimum": 1,
                                                                               "maximum": 7},
        "where": {"$ref": "#/$defs/place"}},
    "required": ["city", "days", "where"], "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"north": {"type": "boolean"}}, "required": ["north"],
                        "additionalProperties": False}}}}}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USER = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def tools_server() -> Iterator[LiveServer]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=1024, num_gpu_blocks_override=256, chat_template=HERMES
    )
    with LiveServer(config) as server:
        yield server


@pytest.fixture(scope="module")
def client(tools_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tools_server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client, **more):
    """One answer, asked for at once and as a stream; both as (content, calls, finish reason), which must agree."""
    request = {"model": "nano", "messages": USER, "tools": TOOLS, "max_tokens": 200, "seed": 7, **more}
    whole = client.chat.completions.create(**request).choices[0]
    calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()]
    ids = [c.id for c in whole.message.tool_calls or ()]
    streamed: list = []
    content, finish = "", None
    for chunk in client.chat.completions.create(stream=True, **request):
        if not chunk.choices:
            continue
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or ():
            if delta.id:
                assert delta.index == len(streamed)
                assert delta.type == "function"
                streamed.append([delta.function.name, ""])
                ids.append(delta.id)
            streamed[delta.index][1] += delta.function.arguments or ""
    assert [tuple(call) for call in streamed] == calls
    assert content == (whole.message.content or "")
    assert finish == whole.finish_reason
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)
    return content, calls, finish


def check_weather(arguments):
    given = json.loads(arguments)
    assert set(given) == {"city", "days", "where"}
    assert given["city"] in WEATHER["function"]["parameters"]["properties"]["city"]["enum"]
    assert given["days"] in range(1, 8)
    assert given["where"]["north"] in (True, False)


def test_a_named_function_is_called(client):
    content, calls, finish = ask(client, tool_choice=NAMED, temperature=0.7, max_tokens=400)
    assert (content, finish) == ("", "tool_calls")
    assert [name for name, _ in calls] == ["get_weather"]
    check_weather(calls[0][1])


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_something(client, parallel):
    level = {"type": "object", "properties": {"level": {"enum": [1, 2]}}, "required": ["level"],
             "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "set", "parameters": level}}, NOW]
    more = {} if parallel else {"parallel_tool_calls": False}
    content, calls, finish = ask(
        client, tools=tools, tool_choice="required", temperature=0.7, max_tokens=90 if parallel else 300, **more
    )  # fmt: skip
    assert content == ""
    assert calls
    if finish == "length":
        assert parallel
        calls.pop()  # may be cut off
    else:
        assert finish == "tool_calls"
    for name, arguments in calls:
        assert (name, json.loads(arguments)) in [("now", {}), ("set", {"level": 1}), ("set", {"level": 2})]
    assert parallel or len(calls) == 1


def test_a_cut_call_ends_by_length(client):
    _, calls, finish = ask(client, tool_choice=NAMED, max_tokens=3)
    assert finish == "length"
    assert len(calls) == 1


def test_without_calls_text_stays_text(client):
    """The model of the test knows no tools: auto and none give what it writes."""
    for choice in ("auto", "none"):
        content, calls, finish = ask(client, tool_choice=choice, temperature=0, max_tokens=12)
        assert content
        assert not calls
        assert finish in ("stop", "length")


def test_what_was_called_comes_back_in_the_next_turn(client):
    answer = client.chat.completions.create(
        model="nano", messages=USER, tools=TOOLS, tool_choice=NAMED, max_tokens=200
    ).choices[0]  # fmt: skip
    call = answer.message.tool_calls[0]
    messages = [*USER, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
    again = client.chat.completions.create(model="nano", messages=messages, tools=TOOLS, max_tokens=4)
    assert again.choices[0].finish_reason


@pytest.mark.parametrize(("more", "param"), [
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * (1 << 20)}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1000)]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters.type"),
    ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tool_choice": NAMED, "tools": [NOW, {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "unevaluatedItems": False}}}, "strict": True}}]},
     "tools[1].function.parameters.properties.a.unevaluatedItems"),
])  # fmt: skip
def test_bad_tools_are_refused(tools_server, more, param):
    body = {key: value for key, value in {"messages": USER, "tools": TOOLS, **more}.items() if value is not None}
    answer = httpx.post(tools_server.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400


def test_a_template_without_tools_refuses_them_if_it_is_told_to(live, monkeypatch):
    assert live.server is not None
    monkeypatch.setattr(live.server, "config", dataclasses.replace(live.server.config, tool_prompt="off"))
    answer = httpx.post(live.url + "/v1/chat/completions", json={"messages": USER, "tools": TOOLS}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert "does not show tools" in answer.json()["error"]["message"]


def test_each_tool_is_bound_by_its_own_document(client):
    """A parameter named default, a definition named as another tool is, $id, numbers beyond 64 bits, and what cannot be
    enforced."""
    colour = {
        "$id": "https://a.example/f.json",
        "type": "object",
        "properties": {
            "default": {"$ref": "#/$defs/L"},
            "id": {"const": 10**30},
            "set": {"type": "null", "uniqueItems": True},
        },
        "required": ["default", "id", "set"],
        "additionalProperties": False,
        "$defs": {"L": {"enum": ["red", "blue"]}},
    }
    other = {
        "type": "object",
        "properties": {"secret": {"const": 42}},
        "required": ["secret"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}
             for name, parameters in (("f", colour), ("L", other))]  # fmt: skip
    for choice in ({"type": "function", "function": {"name": "f"}}, "required"):
        _, calls, finish = ask(
            client, tools=tools, tool_choice=choice, parallel_tool_calls=False, temperature=0.7, max_tokens=400
        )  # fmt: skip
        assert finish == "tool_calls"
        [(name, arguments)] = calls
        value = json.loads(arguments)
        if name == "f":
            assert value in [{"default": colour, "id": 10**30, "set": None} for colour in ("red", "blue")]
        else:
            assert (choice, value["secret"]) == ("required", 42)


def test_strict_leaves_text_alone(client):
    """The model writes text, as without: only within a call it would be bound."""
    strict = {"type": "function", "function": NOW["function"] | {"strict": True}}
    content, calls, finish = ask(client, tools=[strict], temperature=0, max_tokens=12)
    assert content
    assert not calls
    assert finish in ("stop", "length")


def test_A21_a_conversation_waits_for_its_tool(tools_server: LiveServer, client) -> None:
    """What becomes of its blocks is decided when the answer ends in a call: by how long the client expects the tool to
    take, or by how long it took before. The text is the same."""

    def decided(until: float = 0.0) -> float:
        """The engine tells its numbers now and then."""
        deadline = time.monotonic() + 5
        while True:
            lines = httpx.get(tools_server.url + "/metrics").text.splitlines()
            num = sum(float(line.split()[-1]) for line in lines if 'kv_hints_total{action="pause_' in line)
            if num >= until or time.monotonic() > deadline:
                return num
            time.sleep(0.05)

    def said(text: str, **pause: str):
        hints = {} if pause.get("action") is None else {"extra_body": {"kv_hints": [pause]}}
        return client.chat.completions.create(
            model="nano", messages=[{"role": "user", "content": text}], tools=[NOW], tool_choice="required",
            max_tokens=300, parallel_tool_calls=False, seed=7, **hints,
        ).choices[0].message  # fmt: skip

    before = decided()
    plain = said("How is the weather in Bern?").tool_calls[0].function
    assert decided() == before, "nobody asked for it"
    asked = said("How is the weather in Bern?", action="pause", expected="20s").tool_calls[0]
    assert asked.function == plain
    assert decided(before + 1) == before + 1
    said("How is the weather in Basel?", action="pause")
    assert decided() == before + 1, "nobody knows how long it takes"
    client.chat.completions.create(
        model="nano", max_tokens=4, tools=[NOW], messages=[
            {"role": "user", "content": "How is the weather in Bern?"},
            {"role": "assistant", "tool_calls": [asked.model_dump()]},
            {"role": "tool", "tool_call_id": asked.id, "content": "Fine."},
        ],
    )  # fmt: skip
    tool_times = tools_server.server.service.tool_times
    assert 0 < tool_times.expected_s("default", [ToolUse("", "now")]) < 60
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="nano", messages=USER, tools=[NOW], tool_choice="required", max_tokens=300, seed=7, stream=stream,
            parallel_tool_calls=False, extra_body={"kv_hints": {"actions": [{"action_type": "pause"}]}},
        )  # fmt: skip
        if stream:
            list(answer)
        assert decided(before + 2 + stream) == before + 2 + stream
    for wrong in ({"expected": "soon"}, {"expected": 0}, {"ttl": "5m"}):
        with pytest.raises(openai.BadRequestError, match=r"kv_hints\[0\]\.(expected must be|ttl is no field)"):
            said("x", action="pause", **wrong)
