"""What coding agents and Open WebUI send (recorded, long texts cut): Claude Code, Codex, opencode, Continue, Qwen Code,
aider. They name models of their own, with the limits of those, and take tool calls apart in their own ways."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from penstock.server.parsing.custom import read_tools
from penstock.server.parsing.events import CallArguments, CallStart
from penstock.server.responses.events import ResponseWriter, replay
from penstock.server.responses.input import chat_messages
from penstock.server.routes import responses as route
from tests.api.conftest import bundled
from tests.api.scripted import ScriptedLink, Scripts
from tests.unit.server.test_parsing_templates import HERMES

FILE = Path(__file__).parents[1] / "data" / "agents.jsonl"
RECORDED = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
ROOM = 2048
HELLO: Any = [{"role": "user", "content": "Hello!"}]
TALK: Any = [{"role": "user", "content": "Talk!"}]
AGENTS = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [
    {"type": "function", "name": "close", "description": "Ends one.", "strict": False, "parameters": {
        "type": "object", "properties": {"target": {"type": "string", "maxLength": 4}}, "required": ["target"]}},
    {"type": "function", "name": "list", "parameters": {"type": "object", "properties": {}}}]}  # fmt: skip


def reply(prompt: str) -> str:
    """A call of the first tool that is shown; text where there is none, without end where that is asked for."""
    found = re.search(r'"function": \{"name": "([^"]+)"', prompt)
    if found is not None:
        call = {"name": found[1], "arguments": {"target": "x"}}
        return f"I look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return "on and on " * ROOM if "Talk!" in prompt else "Done."


@pytest.fixture(scope="module")
def engine() -> ScriptedLink:
    return ScriptedLink(reply, vocab_size=4096, room=ROOM)


@pytest.fixture(scope="module")
def live(engine: ScriptedLink) -> Iterator[LiveServer]:
    config = serve_from_kwargs(model=bundled(), port=0, chat_template=HERMES, any_model_name=True)
    with LiveServer(config, link=engine) as server:
        assert server.server is not None
        engine.tokenizer = server.server.service.tokenizer
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


# -- what was recorded -----------------------------------------------------------------------------------------------

ENDS = {"/v1/chat/completions": "data: [DONE]", "/v1/responses": "event: response.", "/v1/messages": "message_stop"}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r["client"])
def test_what_agents_send_is_taken_whole(http: httpx.Client, engine: ScriptedLink, recorded: dict[str, Any]) -> None:
    body, path = recorded["body"], recorded["path"].partition("?")[0]
    answer = http.post(recorded["path"], json=body)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    results = sum(json.dumps(body).count(word) for word in ('"tool_result"', '"role": "tool"', '_call_output"'))
    assert prompt.count("<|im_start|>tool\n") == results
    if "tools" in body:
        tool = body["tools"][0]
        assert f'"{tool.get("function", tool)["name"]}"' in answer.text
        assert "<tool_call>" not in answer.text
    if body.get("stream"):
        last = answer.text.rstrip().splitlines()
        if path == "/api/chat":
            assert json.loads(last[-1])["done"] is True
        else:
            assert any(ENDS[path] in line for line in last[-2:]), last[-2:]


# -- limits of the model that a client thinks it has -----------------------------------------------------------------


def test_an_anthropic_bound_beyond_the_context_is_never_reached(live: LiveServer) -> None:
    """`max_tokens` has to be said there, so clients say the most that their model could."""
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": "claude", "messages": TALK}
        whole = client.messages.create(max_tokens=20_000, **asked)
        prompt = whole.usage.input_tokens
        assert whole.stop_reason == "model_context_window_exceeded"
        assert prompt + whole.usage.output_tokens == ROOM
        with client.messages.stream(max_tokens=20_000, **asked) as stream:
            assert stream.get_final_message().stop_reason == "model_context_window_exceeded"
        fits = client.messages.create(max_tokens=ROOM - prompt, **asked)
        assert (fits.stop_reason, fits.usage.output_tokens) == ("max_tokens", ROOM - prompt)
        ended = client.messages.create(max_tokens=20_000, model="claude", messages=HELLO)
        assert ended.stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match="max_tokens must be from 1"):
            client.messages.create(max_tokens=0, **asked)


@pytest.mark.parametrize(
    ("path", "name", "asked"),
    [
        ("/v1/chat/completions", "max_tokens", {"messages": TALK}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": TALK}),
        ("/v1/completions", "max_tokens", {"prompt": "Talk!"}),
        ("/v1/responses", "max_output_tokens", {"input": "Talk!"}),
    ],
)
def test_limits_of_another_model_are_cut_and_its_own_refused(
    http: httpx.Client, path: str, name: str, asked: dict[str, Any]
) -> None:
    body = {**asked, name: 32_000}
    answer = http.post(path, json=body | {"model": "gpt-5"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["total_tokens"] == ROOM
    for own in ({}, {"model": http.get("/v1/models").json()["data"][0]["id"]}):
        refused = http.post(path, json=body | own)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    kept = http.post(path, json=body | {"model": "gpt-5", "truncate_prompt_tokens": -1})
    assert kept.status_code == 400, "the prompt would be cut to nothing to leave room for it"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/api/chat", {"messages": TALK, "stream": False, "options": {"num_predict": 32_000}}),
        ("/api/generate", {"prompt": "Talk!", "stream": False, "options": {"num_predict": 32_000}}),
        ("/completion", {"prompt": "Talk!", "n_predict": 32_000}),
    ],
)
def test_where_every_server_cuts_them_they_are_cut(
    http: httpx.Client, engine: ScriptedLink, path: str, asked: dict[str, Any]
) -> None:
    assert http.post(path, json=asked).status_code == 200
    request = engine.requests[-1]
    assert len(request.prompt_token_ids) + request.max_tokens == ROOM


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two " * ROOM}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "one two " * ROOM}], "max_tokens": 1}),
        ("/v1/responses", {"input": "one two " * ROOM}),
        ("/v1/completions", {"prompt": [5] * (ROOM - 1), "max_tokens": 2}),
        ("/v1/embeddings", {"input": "one two " * ROOM}),
        ("/api/chat", {"messages": [{"role": "user", "content": "one two " * ROOM}]}),
    ],
)
def test_what_is_too_long_is_said_in_words_that_clients_look_for(
    http: httpx.Client, path: str, asked: dict[str, Any]
) -> None:
    """LiteLLM (aider), opencode and Claude Code make a conversation shorter when they read these."""
    answer = http.post(path, json=asked)
    assert answer.status_code == 400
    error = answer.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    assert f"this model's maximum context length is {ROOM} tokens" in said
    if path == "/v1/messages":
        assert said.startswith("prompt is too long: ")
    elif path != "/api/chat":
        assert error["code"] == "context_length_exceeded"


# -- Responses: namespaces of tools, references to items -------------------------------------------------------------


def test_a_function_of_a_namespace_is_called(sdk: openai.OpenAI, engine: ScriptedLink) -> None:
    asked: Any = {"model": "nano", "input": "Do it.", "tools": [AGENTS]}
    first = sdk.responses.create(**asked)
    call = first.output[-1].to_dict()
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "close")
    events = list(sdk.responses.create(stream=True, **asked))
    added = [e.item.to_dict() for e in events if e.type == "response.output_item.added"][-1]
    assert (added["namespace"], added["name"]) == ("agents", "close")
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[-1].to_dict()["namespace"] == "agents"
    items: Any = [{"role": "user", "content": "Do it."}, *(item.to_dict() for item in first.output)]
    items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "done"})
    sdk.responses.create(**(asked | {"input": items}))
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.count('"agents__close"') == 2, "declared, and called"


def test_the_model_sees_both_names_and_hears_them_again() -> None:
    tools = read_tools([{"type": "function", "name": "close"}, AGENTS], nested=False)
    assert tools.listed is not None
    assert [tool["function"]["name"] for tool in tools.listed] == ["close", "agents__close", "agents__list"]
    assert tools.listed[1]["function"]["description"] == "(agents: Helpers.) Ends one."
    assert tools.spaces == {"agents__close": ("agents", "close"), "agents__list": ("agents", "list")}
    call = {"type": "function_call", "call_id": "c", "name": "close", "arguments": "{}"}
    for item, name in ((call, "close"), (call | {"namespace": "agents"}, "agents__close")):
        assert chat_messages([item])[0]["tool_calls"][0]["function"]["name"] == name


def test_a_stored_stream_is_replayed_with_its_namespaces() -> None:
    ids = iter(["fc_1", "fc_2"])
    spaces = {"agents__close": ("agents", "close")}
    writer = ResponseWriter(lambda prefix: next(ids), spaces=spaces)
    said = writer.feed([
        CallStart(0, "c0", "agents__close"), CallArguments(0, "{}"), CallStart(1, "c1", "close"), CallArguments(1, "{}")
    ])  # fmt: skip
    said += writer.finish()
    response = {"id": "resp_1", "status": "completed", "output": writer.items}
    told = [event for event in replay(response) if "item" in event]
    assert [event["item"] for event in told] == [event["item"] for event in said if "item" in event]
    assert [item.get("namespace") for item in writer.items] == ["agents", None]


@pytest.mark.parametrize(
    ("tools", "said", "param"),
    [
        ([AGENTS | {"tools": []}], "tools[0].tools must be a list of functions", "tools[0].tools"),
        ([AGENTS | {"name": None}], "tools[0].name", "tools[0].name"),
        (
            [AGENTS | {"tools": [{"type": "custom", "name": "x"}]}],
            "a namespace has only these",
            "tools[0].tools[0].type",
        ),
        ([AGENTS | {"name": "a b"}], "is not one: 1 to 64 letters", "tools[0].tools[0].name"),
        ([AGENTS, AGENTS], "names must differ", "tools[1].tools[0].name"),
        ([{"type": "web_search"}], "which would run on the server", "tools[0].type"),
    ],
)
def test_what_a_namespace_cannot_be_is_said(http: httpx.Client, tools: Any, said: str, param: str) -> None:
    answer = http.post("/v1/responses", json={"input": "Do it.", "tools": tools})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert said in error["message"]


def test_an_item_is_sent_by_its_id(sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Vercel's AI SDK does from the second step on."""
    scripts = Scripts()
    monkeypatch.setattr(route, "begin", scripts.begin)
    first = sdk.responses.create(model="nano", input="Do it.")
    whole: Any = [item.to_dict() for item in first.output]
    results: Any = [
        {"type": "function_call_output", "call_id": i["call_id"], "output": "ok"} for i in whole if "call_id" in i
    ]
    for kind in ({"type": "item_reference"}, {}):
        references: Any = [kind | {"id": item["id"]} for item in whole]
        sdk.responses.create(model="nano", input=[*references, *results])
        sdk.responses.create(model="nano", input=[*whole, *results])
        assert scripts.asked[-2].messages == scripts.asked[-1].messages
        assert [m["role"] for m in scripts.asked[-2].messages] == ["assistant", "tool", "tool"]
    sdk.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=r"input\[0\] refers to .* no stored response") as caught:
        sdk.responses.create(model="nano", input=[{"type": "item_reference", "id": whole[0]["id"]}])
    assert caught.value.param == "input[0].id"
