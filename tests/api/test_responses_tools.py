"""/v1/responses: custom tools, allowed tools, and objects of the official SDKs as input again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from penstock.base.errors import InputError
from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from penstock.server.parsing.custom import as_functions, read_tools
from penstock.server.parsing.events import CallArguments, CallStart
from penstock.server.responses.events import ResponseWriter, replay
from penstock.server.responses.input import chat_messages
from penstock.text.custom import arguments_of, input_of
from tests.api.conftest import bundled
from tests.unit.server.test_parsing_templates import HERMES

WORDS = "Do it."
NOW = {"type": "function", "name": "now", "description": "The time", "parameters": None, "strict": None}
TOOL = {"type": "custom", "name": "shell", "description": "Runs a command"}
REGEX = TOOL | {"format": {"type": "grammar", "syntax": "regex", "definition": 'ls "[a-z]{3}"'}}
LARK = TOOL | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "rm " /[a-z]{2}/ "\\n"'}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", max_model_len=1024, num_gpu_blocks_override=256, chat_template=HERMES
    )
    with LiveServer(config) as server:
        yield server.url


@pytest.fixture(scope="module")
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(sdk: openai.OpenAI, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "nano", "input": WORDS, "max_output_tokens": 100, "extra_body": {"seed": 3}}
    return sdk.responses.create(**(asked | more))


# -- custom tools ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "pattern"), [(REGEX, 'ls "[a-z]{3}"'), (LARK, "rm [a-z]{2}\n")], ids=["regex", "lark"]
)
def test_a_grammar_binds_the_input(sdk: openai.OpenAI, tool: Any, pattern: str) -> None:
    for choice in ({"type": "custom", "name": "shell"}, "required"):
        response = ask(sdk, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        assert response.output
        for call in response.output:
            assert (call.type, call.name) == ("custom_tool_call", "shell")
            assert re.fullmatch(pattern, call.input), call.input
        assert response.tools[0].name == "shell"


def test_text_is_what_the_tool_gets(sdk: openai.OpenAI) -> None:
    [call] = ask(sdk, tools=[TOOL], tool_choice={"type": "custom", "name": "shell"}, max_output_tokens=60).output
    assert call.type == "custom_tool_call"
    assert not call.input.startswith('{"input"')


def test_a_stream_adds_up(sdk: openai.OpenAI) -> None:
    more: dict[str, Any] = {"tools": [REGEX], "tool_choice": "required"}
    whole = ask(sdk, **more).output[0]
    events = list(ask(sdk, stream=True, **more))
    kinds = [event.type for event in events]
    assert "response.custom_tool_call_input.delta" in kinds
    done = next(event for event in events if event.type == "response.custom_tool_call_input.done")
    assert done.input == whole.input == "".join(e.delta for e in events if e.type.endswith("tool_call_input.delta"))
    assert events[-1].response.output[0].input == whole.input
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_conversation_goes_on_behind_a_custom_call(sdk: openai.OpenAI) -> None:
    first = ask(sdk, tools=[REGEX], tool_choice="required")
    items = [{"role": "user", "content": WORDS}, *(item.model_dump() for item in first.output)]
    items.append({"type": "custom_tool_call_output", "call_id": first.output[0].call_id, "output": "abc"})
    assert ask(sdk, input=items, tools=[REGEX], tool_choice="none").output_text is not None
    by_id = ask(sdk, input=items[-1:], tools=[REGEX], tool_choice="none", previous_response_id=first.id)
    assert by_id.status in ("completed", "incomplete")


@pytest.mark.parametrize(
    ("tool", "choice", "said"),
    [
        (LARK, "auto", "tool_choice names it"),
        (LARK, None, "tool_choice names it"),
        (TOOL | {"format": {"type": "yaml"}}, "required", "tools[0].format.type"),
        (TOOL | {"format": {"type": "grammar", "syntax": "peg", "definition": "x"}}, "required", "format.syntax"),
        (TOOL | {"format": {"type": "grammar", "syntax": "regex"}}, "required", "format.definition"),
        (TOOL | {"format": {"type": "grammar", "syntax": "regex", "definition": "("}}, "required", "tools[0].format"),
        ({"type": "web_search"}, None, "tools[0].type"),
        (TOOL, {"type": "custom", "name": "other"}, "other"),
        (TOOL, {"type": "mcp"}, "tool_choice"),
    ],
)
def test_what_cannot_be_done_is_said(sdk: openai.OpenAI, tool: Any, choice: Any, said: str) -> None:
    more = {} if choice is None else {"tool_choice": choice}
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        ask(sdk, tools=[tool], **more)


def test_a_regex_binds_also_where_the_model_decides() -> None:
    tools = read_tools([REGEX], nested=False)
    assert tools.listed is not None
    function = tools.listed[0]["function"]
    assert function["strict"] is True
    assert function["parameters"]["properties"]["input"]["pattern"] == '^(?:ls "[a-z]{3}")$'
    assert as_functions("auto", tools) == "auto"
    assert as_functions({"type": "custom", "name": "shell"}, tools) == {
        "type": "function", "function": {"name": "shell"}
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "a", 'a "b"\n\\ ö 🦊', "{}", "x" * 100])
def test_an_input_survives_its_json_whatever_is_cut(text: str) -> None:
    arguments = arguments_of(text)
    assert input_of(arguments, False) == text
    assert input_of(arguments, True) == arguments
    for end in range(len(arguments)):
        assert text.startswith(input_of(arguments[:end], False)), end
    escaped = json.dumps({"input": text})  # with \uXXXX
    for end in range(len(escaped)):
        assert text.encode("utf-16", "surrogatepass").startswith(
            input_of(escaped[:end], False).encode("utf-16", "surrogatepass")
        )


def test_a_replay_is_the_stream() -> None:
    ids = iter(["ctc_1"])
    writer = ResponseWriter(lambda prefix: next(ids), {"shell": False})
    begun = {"id": "r", "status": "in_progress", "output": []}
    events = [writer.say("created", response=begun), writer.say("in_progress", response=begun)]
    events += writer.feed([CallStart(0, "call", "shell"), CallArguments(0, '{"input": '), CallArguments(0, '"ls"}')])
    events += writer.finish()
    assert writer.items == [{
        "id": "ctc_1", "type": "custom_tool_call", "status": "completed", "call_id": "call", "name": "shell",
        "input": "ls",
    }]  # fmt: skip
    again = replay({"id": "r", "status": "completed", "output": writer.items})
    assert [e for e in again if "item" in e or "delta" in e] == [e for e in events if "item" in e or "delta" in e]


# -- allowed tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", ["now", "shell"])
def test_only_allowed_tools_are_called(sdk: openai.OpenAI, allowed: str) -> None:
    kind = {"now": "function", "shell": "custom"}[allowed]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": kind, "name": allowed}]}
    for seed in range(3):
        response = ask(sdk, tools=[NOW, REGEX], tool_choice=choice, extra_body={"seed": seed})
        assert {item.name for item in response.output} == {allowed}
    assert response.tool_choice.model_dump() == choice


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "mode": "some", "tools": [{"type": "function", "name": "now"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "later"}]},
    ],
)
def test_bad_allowances(sdk: openai.OpenAI, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(sdk, tools=[NOW], tool_choice=choice)
    assert error.value.param == "tool_choice"


# -- what SDKs dump --------------------------------------------------------------------------------------------------


def test_responses_take_what_their_sdk_dumps(sdk: openai.OpenAI) -> None:
    """With all its nulls, and strictly: nothing of it may be a field that nobody knows."""
    first = ask(sdk)
    called = ask(sdk, tools=[NOW], tool_choice="required")
    items: list[Any] = [{"role": "user", "content": WORDS}]
    items += [item.model_dump() for response in (first, called) for item in response.output]
    items.append({"type": "function_call_output", "call_id": called.output[-1].call_id, "output": "noon",
                  "id": None, "status": None})  # fmt: skip
    raw = sdk.responses.with_raw_response.create(model="nano", input=items, max_output_tokens=4)
    assert raw.headers.get("x-ignored-fields") is None
    tools = [tool.model_dump() for tool in called.tools]
    raw = sdk.responses.with_raw_response.create(model="nano", input=items, tools=tools, max_output_tokens=4)
    assert raw.headers.get("x-ignored-fields") is None


def test_a_refusal_is_what_was_said() -> None:
    from openai.types.responses import ResponseOutputMessage, ResponseOutputRefusal, ResponseReasoningItem

    refusal = ResponseOutputMessage(
        id="m", role="assistant", status="completed", type="message",
        content=[ResponseOutputRefusal(refusal="I cannot.", type="refusal")],
    )  # fmt: skip
    thought = ResponseReasoningItem(id="r", summary=[], type="reasoning")
    found = chat_messages([thought.model_dump(), refusal.model_dump()])
    assert found == [{"role": "assistant", "content": "I cannot."}]
    with pytest.raises(InputError, match="refusal must be a string"):
        chat_messages([{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": None}]}])


def test_chats_take_what_their_sdk_dumps(sdk: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "now"}}
    asked: dict[str, Any] = {"model": "nano", "max_tokens": 30}
    user: Any = {"role": "user", "content": WORDS}
    plain = sdk.chat.completions.create(messages=[user], **asked).choices[0].message
    called = sdk.chat.completions.create(messages=[user], tools=[tool], tool_choice="required", **asked)
    call = called.choices[0].message
    assert call.tool_calls
    result: Any = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "noon"}
    messages: Any = [user, plain.model_dump(), user, call.model_dump(), result]
    raw = sdk.chat.completions.with_raw_response.create(messages=messages, **asked)
    assert raw.headers.get("x-ignored-fields") is None
    assert raw.parse().choices[0].message.role == "assistant"


def test_messages_take_what_their_sdk_dumps(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "nano", "max_tokens": 30}
        user = {"role": "user", "content": WORDS}
        tool = {"name": "now", "description": "The time", "input_schema": {"type": "object", "properties": {}}}
        plain = client.messages.create(messages=[user], **asked)
        called = client.messages.create(messages=[user], tools=[tool], tool_choice={"type": "any"}, **asked)
        dumped: list[Any] = [{"role": m.role, "content": [b.model_dump() for b in m.content]} for m in (plain, called)]
        call: Any = called.content[-1]
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "noon"}]}
        messages: Any = [user, dumped[0], user, dumped[1], result]
        raw = client.messages.with_raw_response.create(messages=messages, **asked)
        assert raw.headers.get("x-ignored-fields") is None
