"""What a chat template shows of its model: how it writes tool calls and thoughts. Found by trying the template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from penstock.base.errors import InputError
from penstock.server.parsing.engine import OutputParser
from penstock.server.parsing.events import CallArguments, CallStart, Event
from penstock.server.parsing.formats import FORMATS, THOUGHTS
from penstock.server.parsing.reader import Format, Thoughts
from penstock.text.template import render_chat

_NAME, _QUESTION = "probe_for_tools", "Is this the probe?"
_GIVEN = {"city": "Köln <1>", "days": 3}
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "City"},
        "days": {"type": "integer", "description": "Days"},
    },
    "required": ["city"],
}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Probe", "parameters": _SCHEMA}}
_IDS = ("abcdefgh1", f"functions.{_NAME}:0")
"""Mistral's templates take only ids of nine characters, Kimi's write the id where others write the name."""

State = Literal["opened", "closed", ""]


@lru_cache(maxsize=32)
def reads_tools(template: str) -> bool:
    """Whether the template shows the model what tools there are."""
    try:
        return _NAME in render_chat(template, [{"role": "user", "content": _QUESTION}], tools=[_TOOL])
    except InputError:
        return False


@lru_cache(maxsize=32)
def find_format(template: str) -> Format | None:
    """The format in which the template itself writes a call; if it writes none, that which its text teaches."""
    for text in _written(template):
        for format in FORMATS.values():
            parser = OutputParser(format, None, {_NAME: _SCHEMA})
            if _calls([*parser.feed(text), *parser.finish()]) == [(_NAME, _GIVEN)]:
                return format
    return next((f for f in FORMATS.values() if _has(template, f.signs)), None)


def leaves_marks_out(template: str) -> bool:
    """Whether the model is one of those that mostly write calls without the marks that its template asks for.

    Qwen 2.5 and its Coder share one template; the Coder writes bare or fenced JSON (`docs/log.md`). Later models of the
    family think, and were taught the marks.
    """
    return (
        "You are Qwen, created by Alibaba Cloud" in template and "<tool_call>" in template and "<think>" not in template
    )


@lru_cache(maxsize=32)
def find_thoughts(template: str) -> Thoughts | None:
    """The marks of thoughts that the template knows, if only to leave thoughts out."""
    return next((t for t in THOUGHTS.values() if _has(template, t.signs)), None)


def thought_state(template: str, thoughts: Thoughts, kwargs: Mapping[str, Any], prompt_text: str) -> State:
    """Whether the prompt ends inside a thought, or behind one that it has closed itself.

    `prompt_text`: its end; if that is not known, the template's generation prompt with `kwargs` is looked at.
    """
    if not prompt_text:
        try:
            prompt_text = _generation_prompt(template, json.dumps(kwargs, sort_keys=True))
        except (InputError, TypeError, ValueError):
            return ""
    tail = prompt_text.rstrip()
    if tail.endswith(thoughts.open):
        return "opened"
    return "closed" if tail.endswith(thoughts.close) else ""


@lru_cache(maxsize=64)
def _generation_prompt(template: str, kwargs: str) -> str:
    return render_chat(template, [{"role": "user", "content": _QUESTION}], kwargs=json.loads(kwargs))


def _written(template: str) -> list[str]:
    """What the template writes for a call, from the end of the question on."""
    out = []
    for call_id in _IDS:
        call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": _GIVEN}}
        flat = {"name": _NAME, "arguments": _GIVEN}  # some templates read these
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": "", "tool_calls": [call | flat]},
        ]
        try:
            text = render_chat(template, messages, tools=[_TOOL], add_generation_prompt=False)
        except InputError:
            continue
        out.append(text[text.rfind(_QUESTION) + len(_QUESTION) :])
    return out


def _calls(events: list[Event]) -> list[tuple[str, Any]]:
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = ["".join(e.text for e in events if isinstance(e, CallArguments) and e.index == n)
                 for n in range(len(names))]  # fmt: skip
    try:
        return list(zip(names, map(json.loads, arguments), strict=True))
    except ValueError:
        return []


def _has(template: str, signs: tuple[tuple[str, ...], ...]) -> bool:
    return any(all(sign in template for sign in group) for group in signs)
