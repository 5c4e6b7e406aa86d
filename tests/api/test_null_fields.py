"""What the official SDKs dump goes back in as it came out: null is the same as nothing, for us and for templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from penstock.text.template import render_chat
from tests.api.conftest import bundled

DEFINED = (
    "{% for m in messages %}[{{ m.role }}{% for key in m if key not in ('role', 'content') %} {{ key }}{% endfor %}]"
    "{{ m.content }}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endif %}"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% endfor %}{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
)
HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
NULLS = {
    "tool_calls": None, "function_call": None, "refusal": None, "audio": None, "annotations": None, "name": None,
    "reasoning_content": None, "reasoning": None, "thinking": None, "tool_call_id": None, "id": None, "status": None,
}  # fmt: skip


def render(*messages: dict[str, Any], tools: Any = None) -> str:
    return render_chat(DEFINED, list(messages), tools=tools, add_generation_prompt=False)


def dumped(**said: Any) -> dict[str, Any]:
    return ChatCompletionMessage(role="assistant", **said).model_dump()


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_a_null_is_no_key_of_a_message(role: str) -> None:
    plain = {"role": role, "content": "x"}
    assert render(plain | NULLS) == render(plain) == f"[{role}]x"
    assert render(plain | {"tool_calls": []}) == f"[{role}]x"


def test_what_openais_client_dumps() -> None:
    assert "refusal" in dumped(content="x")
    assert render(HELLO, dumped(content="x")) == "[user]Hello[assistant]x"
    told = dumped(content=None, tool_calls=[CALL])["tool_calls"][0]
    assert render(HELLO, dumped(content=None, tool_calls=[CALL])) == render(
        HELLO, {"role": "assistant", "content": "", "tool_calls": [{key: told[key] for key in told}]}
    )
    called = render(HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]})
    call = CALL | {"index": None, "function": CALL["function"] | {"strict": None}}
    assert render(HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}) == called
    assert '{"a": null}' in called, "arguments are the model's own words"
    assert render(HELLO, dumped(content=None, refusal="I can't")) == "[user]Hello[assistant refusal]I can't"
    thought = ChatCompletionMessage.model_validate({"role": "assistant", "content": "x", "reasoning_content": None})
    assert render(HELLO, thought.model_dump()) == "[user]Hello[assistant]x"


def test_a_null_inside_of_a_tool_is_only_dropped_where_it_means_nothing() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1, None], "default": None}}, "required": ["a"]}
    function = {"name": "f", "description": None, "parameters": parameters, "strict": None}
    told = render(HELLO, tools=[{"type": "function", "function": function, "cache_control": None}])
    assert '"strict"' not in told
    assert '"description"' not in told
    assert "cache_control" not in told
    assert '"enum": [1, null], "default": null' in told


@pytest.mark.parametrize("key", ["function_call", "audio"])
def test_what_would_vanish_is_refused(http: httpx.Client, key: str) -> None:
    said = {"role": "assistant", "content": "x", key: {"name": "f", "arguments": "{}", "id": "a"}}
    answer = http.post("/v1/chat/completions", json={"messages": [HELLO, said, HELLO], "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"messages[1].{key}")


# -- over HTTP, with --strict -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx.Client]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="ref", max_model_len=512, num_gpu_blocks_override=64, strict=True,
        chat_template=DEFINED, tool_call_parser="hermes",
    )  # fmt: skip
    with LiveServer(config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def count(client: httpx.Client, path: str, body: dict[str, Any]) -> int:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return int(usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


CHAT_NULLS = dict.fromkeys((
    "tools", "tool_choice", "stop", "stream", "stream_options", "response_format", "n", "seed", "user", "logit_bias",
    "logprobs", "top_logprobs", "functions", "function_call", "modalities", "audio", "prediction", "metadata", "store",
    "reasoning_effort", "service_tier", "web_search_options", "parallel_tool_calls", "max_completion_tokens",
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "verbosity", "safety_identifier", "moderation",
))  # fmt: skip
MESSAGES_NULLS = dict.fromkeys((
    "system", "tools", "tool_choice", "thinking", "stop_sequences", "stream", "temperature", "top_p", "top_k",
    "metadata", "service_tier", "container", "mcp_servers", "context_management", "output_config", "cache_control",
))  # fmt: skip
RESPONSES_NULLS = dict.fromkeys((
    "instructions", "max_tool_calls", "previous_response_id", "background", "text", "reasoning", "tools",
    "tool_choice", "include", "truncation", "top_logprobs", "metadata", "prompt", "conversation", "stream", "user",
    "stream_options", "parallel_tool_calls", "store", "service_tier", "temperature", "top_p", "safety_identifier",
))  # fmt: skip


def test_null_fields_of_requests(strict: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": [HELLO], "max_tokens": 1}
    for path, nulls in (("/v1/chat/completions", CHAT_NULLS), ("/v1/messages", MESSAGES_NULLS)):
        assert count(strict, path, body | nulls) == count(strict, path, body)
    body = {"input": "Hello", "max_output_tokens": 1}
    assert count(strict, "/v1/responses", body | RESPONSES_NULLS) == count(strict, "/v1/responses", body)
    text = {"prompt": "Hello", "max_tokens": 1}
    nulls = dict.fromkeys(("suffix", "echo", "best_of", "logprobs", "stop", "n", "logit_bias", "user", "seed"))
    assert count(strict, "/v1/completions", text | nulls) == count(strict, "/v1/completions", text)
    assert strict.post("/v1/completions", json=text | {"foo": 1}).status_code == 400, "it is strict"
    assert strict.post("/v1/completions", json=text | {"foo": None}).status_code == 200


def test_turns_of_anthropics_client_go_back_in(strict: httpx.Client) -> None:
    usage = {"input_tokens": 1, "output_tokens": 1}
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "It is."},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": None}},
    ]  # fmt: skip
    message = Message.model_validate({
        "id": "m", "type": "message", "role": "assistant", "model": "m", "content": blocks, "stop_reason": "tool_use",
        "stop_sequence": None, "usage": usage,
    })  # fmt: skip
    told = [block.model_dump() for block in message.content]
    assert any(value is None for block in told for value in block.values())
    nulls = {"cache_control": None, "citations": None}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "content": None, "is_error": None}
    body: dict[str, Any] = {"max_tokens": 1, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello", **nulls}]},
        {"role": "assistant", "content": told}, {"role": "user", "content": [result | nulls]},
    ]}  # fmt: skip
    plain: dict[str, Any] = {"max_tokens": 1, "messages": [
        HELLO, {"role": "assistant", "content": blocks},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
    ]}  # fmt: skip
    tool = {"name": "f", "input_schema": {"type": "object"}}
    more = {"tools": [tool | dict.fromkeys(("cache_control", "type", "strict", "description", "defer_loading"))]}
    choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}
    output = {"output_config": {"format": None, "effort": None}, "thinking": None}
    assert count(strict, "/v1/messages", body | more | choice | output) == count(
        strict, "/v1/messages", plain | {"tools": [tool]}
    )


def test_items_of_a_response_go_back_in(strict: httpx.Client) -> None:
    part = {"type": "output_text", "text": "It is.", "annotations": []}
    items = [
        ResponseReasoningItem.model_validate(
            {"id": "r", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
        ),
        ResponseOutputMessage.model_validate(
            {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        ),
        ResponseFunctionToolCall(type="function_call", call_id="c", name="f", arguments="{}"),
    ]
    dumps = [item.model_dump() for item in items]
    assert dumps[2]["id"] is None
    assert dumps[2]["status"] is None
    assert dumps[0]["encrypted_content"] is None
    told = {"type": "function_call_output", "call_id": "c", "output": "1", "id": None, "status": None}
    question = HELLO | {"type": None, "id": None, "status": None}
    plain = [item.model_dump(exclude_none=True) for item in items]
    body = {"max_output_tokens": 1, "input": [question, *dumps, told, question]}
    bare = {"max_output_tokens": 1, "input": [HELLO, *plain, {k: v for k, v in told.items() if v is not None}, HELLO]}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body |= {"tools": [tool | dict.fromkeys(("strict", "description", "defer_loading"))]}
    body |= {"text": {"format": None, "verbosity": None}, "reasoning": {"effort": None, "summary": None}}
    assert count(strict, "/v1/responses", body) == count(strict, "/v1/responses", bare | {"tools": [tool]})


def test_answers_of_this_server_go_back_in(http: httpx.Client) -> None:
    chat = http.post("/v1/chat/completions", json={"messages": [HELLO], "max_tokens": 2}).json()
    said = ChatCompletionMessage.model_validate(chat["choices"][0]["message"]).model_dump()
    assert count(http, "/v1/chat/completions", {"messages": [HELLO, said, HELLO], "max_tokens": 1})
    response = Response.model_validate(http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}).json())
    again = [HELLO, *[item.model_dump() for item in response.output], HELLO]
    assert count(http, "/v1/responses", {"input": again, "max_output_tokens": 1})
    message = Message.model_validate(http.post("/v1/messages", json={"messages": [HELLO], "max_tokens": 2}).json())
    turns = [HELLO, {"role": "assistant", "content": message.model_dump()["content"]}, HELLO]
    assert count(http, "/v1/messages", {"messages": turns, "max_tokens": 1})
