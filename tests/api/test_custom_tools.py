"""/v1/chat/completions: custom tools and allowed tools, as Responses has them (`test_responses_tools.py`)."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from penstock.base.errors import InputError
from penstock.engine.stream import Delta
from penstock.server.openai.chat import Chat
from penstock.server.parsing.events import CallArguments, CallStart, Content, Event
from penstock.server.turns.turn import Piece
from penstock.text.messages import read_messages
from tests.api.test_responses_tools import sdk, url

__all__ = ["sdk", "url"]

WORDS = "Do it."
NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}


def shell(syntax: str = "", definition: str = "", **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"name": "shell", "description": "Runs a command"}
    if syntax:
        said["format"] = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": said | more}


TEXT = shell(format={"type": "text"})
REGEX, LARK = shell("regex", 'ls "[a-z]{3}"'), shell("lark", 'start: "rm " /[a-z]{2}/ "\\n"')
NAMED = {"type": "custom", "custom": {"name": "shell"}}


def ask(sdk: openai.OpenAI, **more: Any) -> Any:
    asked: dict[str, Any] = {
        "model": "nano", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 100, "extra_body": {"seed": 3},
    }  # fmt: skip
    return sdk.chat.completions.create(**(asked | more))


@pytest.mark.parametrize(
    ("tool", "pattern"), [(REGEX, 'ls "[a-z]{3}"'), (LARK, "rm [a-z]{2}\n")], ids=["regex", "lark"]
)
def test_a_grammar_binds_the_input(sdk: openai.OpenAI, tool: Any, pattern: str) -> None:
    for choice in (NAMED, "required"):
        asked = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        [chosen] = ask(sdk, **asked).choices
        [call] = chosen.message.tool_calls
        assert (call.type, call.custom.name) == ("custom", "shell")
        assert re.fullmatch(pattern, call.custom.input)
        assert chosen.finish_reason in ("tool_calls", "stop")
        said = [call for chunk in ask(sdk, stream=True, **asked) for call in chunk.choices[0].delta.tool_calls or ()]
        assert said[0].id
        assert {call.type for call in said} == {"custom"}
        assert all(call.function is None for call in said)
        assert said[0].custom["name"] == "shell"
        assert "".join(call.custom["input"] for call in said) == call.custom.input


def test_a_free_text_and_every_sample_of_a_stream(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"tools": [TEXT, NOW], "tool_choice": NAMED, "n": 2, "max_tokens": 60}
    whole = ask(sdk, **asked)
    inputs = {choice.index: "" for choice in whole.choices}
    for chunk in ask(sdk, stream=True, **asked):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                inputs[choice.index] += call.custom["input"]
    assert inputs == {choice.index: choice.message.tool_calls[0].custom.input for choice in whole.choices}
    assert any(inputs.values())


@pytest.mark.parametrize("allowed", ["now", "shell"])
def test_only_allowed_tools_are_called(sdk: openai.OpenAI, allowed: str) -> None:
    one = NAMED if allowed == "shell" else {"type": "function", "function": {"name": "now"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    for seed in range(3):
        [chosen] = ask(sdk, tools=[NOW, REGEX], tool_choice=choice, extra_body={"seed": seed}).choices
        names = {getattr(call, call.type).name for call in chosen.message.tool_calls}
        assert names == {allowed}


def test_a_conversation_goes_on_behind_a_custom_call(sdk: openai.OpenAI, url: str) -> None:
    first = ask(sdk, tools=[REGEX], tool_choice=NAMED).choices[0].message
    messages: list[Any] = [{"role": "user", "content": WORDS}, first.model_dump()]
    messages.append({"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "abc"})
    raw = sdk.chat.completions.with_raw_response.create(model="nano", messages=messages, tools=[REGEX], max_tokens=2)  # type: ignore[list-item]
    assert raw.headers.get("x-ignored-fields") is None
    answer = httpx.post(url + "/apply-template", json={"messages": messages, "tools": [REGEX]})
    shown = answer.json()["prompt"]
    assert json.dumps({"input": first.tool_calls[0].custom.input}) in shown
    assert answer.headers.get("x-ignored-fields") is None
    assert '"input"' in shown.partition("</tools>")[0]  # the tool itself, as a function


def test_a_call_without_its_input_is_refused() -> None:
    bad: list[Any] = [{"type": "custom", "id": "x", "custom": {"name": "shell"}}]
    with pytest.raises(InputError, match="needs custom with a name and an input"):
        read_messages([{"role": "assistant", "content": None, "tool_calls": bad}])


@pytest.mark.parametrize(
    ("tool", "choice", "param"),
    [
        ({"type": "custom"}, None, "tools[0].custom"),
        ({"type": "custom", "name": "shell"}, None, "tools[0].custom"),
        (shell(name="a b"), None, "tools[0].custom.name"),
        (shell(description=3), None, "tools[0].custom.description"),
        (shell(format={"type": "json"}), None, "tools[0].custom.format.type"),
        (shell(format={"type": "grammar", "syntax": "regex", "definition": "a"}), None,
         "tools[0].custom.format.grammar"),
        (shell("regex"), None, "tools[0].custom.format.grammar.definition"),
        (shell("gbnf", "a"), None, "tools[0].custom.format.grammar.syntax"),
        (shell("regex", "(["), NAMED, "tools[0].custom.format"),
        (shell("lark", "start: ["), NAMED, "tools[0].custom.format"),
        (LARK, None, "tool_choice"),
        (TEXT, {"type": "custom", "custom": {"name": "other"}}, "tool_choice"),
        (TEXT, {"type": "custom", "custom": "shell"}, "tool_choice"),
        (TEXT, {"type": "custom"}, "tool_choice"),
        (TEXT, {"type": "other"}, "tool_choice"),
        ({"type": "web_search"}, None, "tools[0].type"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(sdk: openai.OpenAI, tool: Any, choice: Any, param: str) -> None:
    more = {} if choice is None else {"tool_choice": choice}
    with pytest.raises(openai.BadRequestError) as error:
        ask(sdk, tools=[tool], **more)
    assert error.value.param == param
    assert param in str(error.value)


def test_responses_names_its_own_places(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        sdk.responses.create(model="nano", input=WORDS, tools=[{"type": "custom", "name": "a b"}])
    assert error.value.param == "tools[0].name"


def test_an_input_comes_when_its_call_has_ended_sample_by_sample() -> None:
    chat = object.__new__(Chat)
    chat._custom, chat._inputs, chat._reasons = {"shell": False, "raw": True}, {}, True

    def said(sample: int, *events: Event, end: str | None = None) -> list[dict[str, Any]]:
        deltas = chat._deltas(Piece(sample, list(events), Delta(sample), end))
        return [delta["tool_calls"][0] if "tool_calls" in delta else delta for delta in deltas]

    opened = said(0, CallStart(0, "a", "shell"), CallArguments(0, '{"input": "l'))
    assert opened == [{"index": 0, "id": "a", "type": "custom", "custom": {"name": "shell", "input": ""}}]
    assert said(1, CallStart(0, "b", "raw"), CallArguments(0, "x"))[0]["id"] == "b"
    assert said(0, CallArguments(0, 's"}')) == []
    ended, function, arguments = said(0, CallStart(1, "c", "now"), CallArguments(1, "{}"))
    assert ended == {"index": 0, "type": "custom", "custom": {"input": "ls"}}
    assert function["function"]["name"] == "now"
    assert arguments == {"index": 1, "function": {"arguments": "{}"}}
    assert said(0, end="tool_calls") == []
    assert said(1, CallArguments(0, "y"), Content("."), end="stop") == [
        {"index": 0, "type": "custom", "custom": {"input": "xy"}}, {"content": "."},
    ]  # fmt: skip
