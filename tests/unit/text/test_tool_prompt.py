"""Tools in plain words, for templates that show none."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.text.roles import known_roles
from penstock.text.template import render_chat
from penstock.text.tool_prompt import has_calls, with_tools

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather in a Städtchen", "strict": False,
                                      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
NAMES = ("weather", "now")
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "9 degrees"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
    {"role": "user", "content": "And now?"},
]
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
"""As Gemma's: user and assistant in turns, and no other role."""


@pytest.mark.parametrize("kind", ["auto", "required", "named"])
def test_the_model_is_told_what_there_is_and_how_to_answer(kind: str) -> None:
    names = NAMES if kind != "named" else ("now",)
    user = {"role": "user", "content": "Hello"}
    [said] = with_tools([user], TOOLS, kind, names)
    text = said["content"]
    assert text.endswith("\n\nHello")
    assert '{"name": "now"}' in text
    assert ("Städtchen" in text) == (kind != "named")
    assert "strict" not in text
    system, same = with_tools([{"role": "system", "content": "Be kind."}, user], TOOLS, kind, names)
    assert same == user
    assert system["content"].startswith("Be kind.\n\nYou can call functions:\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    [said] = with_tools(parts, TOOLS, kind, names)
    assert [p["text"] for p in said["content"]][1:] == ["Hello"]
    assert parts[0]["content"] == [{"type": "text", "text": "Hello"}], "what was given is left alone"


def test_calls_and_results_of_earlier_turns_are_words_in_turn() -> None:
    assert has_calls(TALK)
    assert not has_calls(TALK[:1])
    said = with_tools(TALK, TOOLS, "none", ())
    assert [m["role"] for m in said] == ["user", "assistant", "user"]
    line = '{"name": "weather", "arguments": {"city": "Köln"}}'
    assert said[1] == {"role": "assistant", "content": f"{line}\n{line}"}
    text = render_chat(STRICT, known_roles(STRICT, said))
    assert text.index("Result of weather:") < text.index("9 degrees") < text.index("rain") < text.index("And now?")
    said = with_tools(TALK[:3], TOOLS, "auto", NAMES)
    assert said[2]["content"] == "Result of weather:\n\n9 degrees"


@pytest.mark.parametrize(
    "messages",
    [[], [3], [{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "assistant", "tool_calls": 3}],
     [{"role": "assistant", "tool_calls": [3]}], [{"role": "tool"}, {"role": "user", "content": None}], [{}], [None]],
)  # fmt: skip
def test_what_is_no_message_is_left_to_others(messages: list[Any]) -> None:
    has_calls(messages)
    with_tools(messages, TOOLS, "auto", NAMES)
