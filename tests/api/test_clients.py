"""What instructor, pydantic-ai and langchain send on their defaults (recorded by `tools/clients.py`), to a model whose
template shows no tools: valid calls where one is required, an answer where it may choose; streamed and at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

FILE = Path(__file__).parents[1] / "data" / "clients.jsonl"
RECORDED = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}}}  # fmt: skip


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=1024, num_gpu_blocks_override=256,
        repetition_detection={"max_pattern_size": 1, "min_count": 60},
    )  # fmt: skip
    with LiveServer(config) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The message and its end, the same at once and as a stream."""
    body = {**body, "temperature": 0, "max_tokens": 150}
    answer = http.post(path, json=body | {"stream": False})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    content, calls, end = "", [], None
    for line in http.post(path, json=body | {"stream": True}).text.splitlines():
        for part in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            content += part["delta"].get("content") or ""
            end = part["finish_reason"] or end
            for call in part["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    told = [[c["function"]["name"], c["function"]["arguments"]] for c in choice["message"].get("tool_calls", ())]
    assert (content, calls, end) == (choice["message"]["content"] or "", told, choice["finish_reason"])
    return {"content": content, "calls": calls, "end": end}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r["client"])
def test_what_clients_send_is_answered_in_its_shape(http: httpx.Client, recorded: dict[str, Any]) -> None:
    body = recorded["body"]
    got = ask(http, recorded["path"], body)
    declared = {tool["function"]["name"] for tool in body.get("tools", ())}
    choice = body.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        assert {name for name, _ in got["calls"]} <= declared
        assert len(got["calls"]) >= 1
        assert got["content"] == ""
        if got["end"] in ("stop", "tool_calls"):
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in got["calls"])
    elif "response_format" in body and got["end"] == "stop":
        assert isinstance(json.loads(got["content"]), dict)
    else:
        assert got["content"] or got["calls"]


def test_the_model_list_says_that_tools_are_told_in_words(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]
    assert model["capabilities"] == {"chat": True, "tools": "prompt", "bare_tool_calls": False}
    assert model["default_sampling_params"] == {
        "temperature": 0.7, "top_p": 0.95, "min_p": 0.05,
        "repetition_detection": {"max_pattern_size": 1, "min_count": 60},
    }  # fmt: skip


def test_what_is_counted_is_what_is_read(http: httpx.Client) -> None:
    """Calls and results of earlier turns, and tools, in every path that reads a conversation."""
    messages = [
        {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "9 degrees"},
    ]  # fmt: skip
    body = {"messages": messages, "tools": [TOOL]}
    text = http.post("/apply-template", json=body).json()
    assert "Result of weather:" in text["prompt"]
    assert "You can call functions:" in text["prompt"]
    asked = http.post("/v1/chat/completions", json=body | {"max_tokens": 2}).json()
    assert asked["usage"]["prompt_tokens"] == text["count"] == http.post("/tokenize", json=body).json()["count"]
    theirs = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 2, "tools": [
        {"name": "weather", "input_schema": TOOL["function"]["parameters"]}]}  # type: ignore[index]  # fmt: skip
    counted = http.post("/v1/messages/count_tokens", json=theirs).json()["input_tokens"]
    usage = http.post("/v1/messages", json=theirs).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] > 40
    none = http.post("/v1/messages/count_tokens", json={"messages": theirs["messages"]}).json()["input_tokens"]
    assert none < 20
    given = {"input": "Weather?", "tools": [{"type": "function", "name": "weather",
                                             "parameters": TOOL["function"]["parameters"]}]}  # type: ignore[index]  # fmt: skip
    assert http.post("/v1/responses/input_tokens", json=given).json()["input_tokens"] == counted


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_circles_end_an_answer_in_every_api(http: httpx.Client, path: str) -> None:
    circle = {"allowed_token_ids": [50], "ignore_eos": True, "temperature": 0, "max_tokens": 80}
    if path == "/v1/messages":
        circle.pop("allowed_token_ids")
        circle |= {
            "repetition_detection": {"max_pattern_size": 1, "min_count": 2},
            "structured_outputs": {"regex": "a{200}"},
        }
    said = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    if path == "/v1/responses":
        said = {"input": "a", "max_output_tokens": circle.pop("max_tokens")}
    body = http.post(path, json={**said, **circle})
    assert body.status_code == 200, body.text
    got = body.json()
    if path == "/v1/responses":
        assert (got["status"], got["usage"]["output_tokens"]) == ("incomplete", 60)
        return
    if path == "/v1/messages":
        assert got["stop_reason"] == "max_tokens"
        assert got["usage"]["output_tokens"] < 80
        return
    assert got["choices"][0]["finish_reason"] == "repetition"
    assert got["usage"]["completion_tokens"] == 60, "a pattern of one token"
    for off in ({"max_pattern_size": 0}, {}):
        whole = http.post(path, json={**said, **circle, "repetition_detection": off}).json()
        assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 80)
    bad = http.post(path, json={**said, **circle, "repetition_detection": {"max_pattern_size": 3}})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "repetition_detection.min_count")
