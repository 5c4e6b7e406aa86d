"""/api/...: Ollama's API, with its official client where it is installed, and by hand for what that hides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock.base.errors import InputError
from penstock.core.output import CompletionOutput, RequestMetrics, RequestOutput
from penstock.core.sampling import SamplingParams, StructuredOutputs
from penstock.server.call import Prompt
from penstock.server.live import LiveServer
from penstock.server.ollama.input import chat_messages, sampling, template_kwargs
from penstock.server.ollama.run import OllamaRun
from penstock.server.schema.ollama import OllamaChatRequest, OllamaOptions
from penstock.server.turns.asking import Caller, Options, make_call
from tests.api.fronts import FRONTS, HELLO, ONCE, events
from tests.api.scripted import SCRIPT, ScriptedTurn

CHAT = FRONTS["/api/chat"]


@pytest.fixture
def ollama(live: LiveServer) -> Iterator[Any]:
    package = pytest.importorskip("ollama", reason="the official client is not installed")
    client = package.Client(host=live.url, timeout=60)
    yield client
    client._client.close()


# -- the official client ---------------------------------------------------------------------------------------------


def test_the_client_chats(ollama: Any) -> None:
    options = {"num_predict": 8, "temperature": 0}
    messages = [{"role": "user", "content": HELLO}]
    whole = ollama.chat("nano:latest", messages, options=options)
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 8)
    assert whole.total_duration >= whole.eval_duration > 0
    assert whole.prompt_eval_count > 5
    parts = list(ollama.chat("nano", messages, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]


def test_the_client_generates_embeds_and_looks_around(ollama: Any) -> None:
    raw = ollama.generate("nano", ONCE, raw=True, options={"num_predict": 6, "temperature": 0})
    assert raw.response
    bound = ollama.generate(
        "nano", HELLO, format={"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
                               "additionalProperties": False}, options={"num_predict": 60},
    )  # fmt: skip
    assert isinstance(json.loads(bound.response)["age"], int)
    vectors = ollama.embed("nano", ["a cat", "a dog"])
    assert len(vectors.embeddings) == 2
    assert vectors.prompt_eval_count > 1
    assert ollama.embeddings("nano", "a cat").embedding == pytest.approx(vectors.embeddings[0])
    assert [model.model for model in ollama.list().models] == ["nano"]
    assert ollama.ps().models[0].context_length == 512
    shown = ollama.show("nano")
    assert "completion" in shown.capabilities
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == 512
    assert ollama.pull("nano").status == "success"


def test_the_client_understands_errors(ollama: Any) -> None:
    import ollama as package

    for call, status, said in (
        (lambda: ollama.chat("llama9", [{"role": "user", "content": "x"}]), 404, "not served here"),
        (lambda: ollama.chat("nano", [{"role": "user", "content": "x"}], options={"temperature": -1}), 400,
         "options.temperature"),
        (lambda: ollama.generate("nano", "x", suffix="y"), 400, "cannot fill in"),
        (lambda: ollama.pull("llama9"), 404, "not served here"),
    ):  # fmt: skip
        with pytest.raises(package.ResponseError, match=said) as error:
            call()
        assert error.value.status_code == status


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_streams_are_the_default_and_lines_have_its_fields(http: httpx.Client) -> None:
    body = CHAT.body()
    del body["stream"]
    answer = http.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = events(answer.text)
    assert set(lines[0]) == {"model", "created_at", "message", "done"}
    assert set(lines[-1]) == {
        "model", "created_at", "message", "done", "done_reason", "total_duration", "load_duration", "prompt_eval_count",
        "prompt_eval_duration", "eval_count", "eval_duration",
    }  # fmt: skip


def test_nothing_to_answer_loads(http: httpx.Client) -> None:
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": "", "keep_alive": 0})):
        answer = http.post(path, json={"model": "nano"} | body).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_a_larger_context_than_there_is_is_named(http: httpx.Client) -> None:
    body = CHAT.body()
    body["options"]["num_ctx"] = 512
    assert "x-ignored-fields" not in http.post("/api/chat", json=body).headers
    body["options"] |= {"num_ctx": 4096, "num_thread": 4}
    named = http.post("/api/chat", json=body).headers["x-ignored-fields"]
    assert set(named.split(", ")) == {"options.num_ctx", "options.num_thread"}


def test_logprobs(http: httpx.Client) -> None:
    body = CHAT.body() | {"logprobs": True, "top_logprobs": 3}
    whole = http.post("/api/chat", json=body).json()
    assert len(whole["logprobs"]) == whole["eval_count"] == 6
    assert len(whole["logprobs"][0]["top_logprobs"]) == 3
    lines = events(http.post("/api/chat", json=body | {"stream": True}).text)
    assert [one for line in lines for one in line.get("logprobs", [])] == whole["logprobs"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "said"),
    [
        ("/api/chat", {"format": "yaml"}, 400, "format"),
        ("/api/chat", {"format": {"type": 5}}, 400, "format"),
        ("/api/chat", {"think": True}, 400, "does not support thinking"),
        ("/api/chat", {"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {"options": {"num_predict": -7}}, 400, "options.num_predict"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "images"),
        ("/api/chat", {"temperature": 1}, 400, "options"),
        ("/api/chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
        ("/api/chat", {"top_logprobs": 3}, 400, "top_logprobs"),
        ("/api/generate", {"context": [1, 2]}, 400, "/api/chat"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, 400, "template"),
        ("/api/generate", {"images": ["aGk="]}, 400, "images"),
        ("/api/create", {}, 400, "no library of models"),
        ("/api/nothing", {}, 404, "nothing at"),
    ],
)
def test_what_cannot_be_done_is_said(http: httpx.Client, path: str, fields: Any, status: int, said: str) -> None:
    body = FRONTS[path].body() | fields if path in FRONTS else fields
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert said in answer.json()["error"]


def test_inputs_are_cut_only_if_truncate_says_so(http: httpx.Client) -> None:
    long = " ".join(f"word{i}" for i in range(600))
    refused = http.post("/api/embed", json={"input": long})
    assert refused.status_code == 400
    assert "tokens" in refused.json()["error"]
    cut = http.post("/api/embed", json={"input": long, "truncate": True}).json()
    assert cut["prompt_eval_count"] == 512
    # What is left is the beginning: the same vector as with another end.
    other = http.post("/api/embed", json={"input": long + " and so on", "truncate": True}).json()
    assert other["embeddings"] == cut["embeddings"]


# -- messages, calls and thoughts ------------------------------------------------------------------------------------


def test_results_find_the_calls_they_answer() -> None:
    call = {"function": {"name": "a", "arguments": {"x": "ö"}}}
    found = chat_messages([
        {"role": "assistant", "content": "", "thinking": "hm",
         "tool_calls": [call, {"id": "mine", "function": {"name": "b", "arguments": {}}}, call]},
        {"role": "tool", "content": "1", "tool_name": "b"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3", "tool_name": "a"},
    ])  # fmt: skip
    assert found[0]["reasoning_content"] == "hm"
    assert [c["id"] for c in found[0]["tool_calls"]] == ["call_0_0", "mine", "call_0_2"]
    assert json.loads(found[0]["tool_calls"][0]["function"]["arguments"]) == {"x": "ö"}
    assert [m["tool_call_id"] for m in found[1:]] == ["mine", "call_0_0", "call_0_2"]


@pytest.mark.parametrize("calls", [5, [5], [{}], [{"function": {"name": "a", "arguments": "x"}}]])
def test_calls_that_are_none_are_refused_by_name(calls: Any) -> None:
    with pytest.raises(InputError) as error:
        chat_messages([{"role": "assistant", "tool_calls": calls}])
    assert str(error.value.param).startswith("messages[0].tool_calls")


def test_options_are_sampling_parameters() -> None:
    options = OllamaOptions(num_predict=-1, seed=-1, repeat_penalty=1.5, top_k=3, stop=[])
    found = sampling(OllamaChatRequest(options=options, format="json"), {"temperature": 0.5, "top_k": 9})
    assert found == SamplingParams(
        max_tokens=None, repetition_penalty=1.5, top_k=3, temperature=0.5,
        structured_outputs=StructuredOutputs(json_object=True),
    )  # fmt: skip
    assert template_kwargs("high") == {"enable_thinking": True, "reasoning_effort": "high"}
    assert template_kwargs(False) == {"enable_thinking": False}


def scripted_run(live: LiveServer, **options: Any) -> OllamaRun:
    assert live.server is not None
    caller = Caller(server=live.server)
    call = make_call(caller, Prompt([5] * 7), SamplingParams(), Options(), "ollama.chat", "x")
    turn: Any = ScriptedTurn(call, SCRIPT, **options)
    done = CompletionOutput(0, "", [1] * 6, finish_reason="stop")
    metrics = RequestMetrics(arrival_s=0.0, scheduled_s=1.0, first_token_s=3.0, finished_s=7.0)
    turn.stream = SimpleNamespace(unread_chars=0, output=RequestOutput("x", None, [5] * 7, None, [done], True, metrics))
    return OllamaRun(caller, turn, "m", chat=True, top_logprobs=None)


def test_calls_and_thoughts_come_apart_and_whole(live: LiveServer) -> None:
    whole = asyncio.run(scripted_run(live).answer())
    message: Any = whole.message
    assert (message.content, message.thinking) == ("It is höt 🦊", "First I look.")
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("weather", {"city": "Bern"}), ("time", {})
    ]  # fmt: skip
    assert whole.done_reason == "stop"
    assert (whole.prompt_eval_duration, whole.eval_duration) == (2_000_000_000, 4_000_000_000)

    async def read() -> str:
        return b"".join([line async for line in scripted_run(live).frames()]).decode()

    lines = events(asyncio.run(read()))
    assert "".join(line["message"]["content"] for line in lines) == message.content
    assert "".join(line["message"].get("thinking", "") for line in lines) == message.thinking
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Bern"}, {}]
    assert [line["done"] for line in lines] == [False, False, False, True]
