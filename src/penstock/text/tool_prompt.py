"""Tools as plain words, for models whose chat template shows none: beside what the user says, and in what was said.

Such a model was not trained to call. It can still be told what there is and how to answer; where a call is required
decoding is bound to its form, and what is left to the model is to choose well (llama.cpp's "generic" chat format does
the same).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_AUTO = (
    'To call one, answer with nothing but {"name": FUNCTION, "arguments": {...}}. If none of them helps, answer in '
    "plain words."
)
_REQUIRED = 'Answer with nothing but a list of calls: [{"name": FUNCTION, "arguments": {...}}].'
_NAMED = "Answer with nothing but a JSON object of this function's arguments."


def with_tools(
    messages: Sequence[Any], tools: Sequence[Mapping[str, Any]], kind: str, names: Sequence[str]
) -> list[Any]:  # fmt: skip
    """The messages, with words about `tools` in them; calls and results of earlier turns become words, too.

    `kind`: "none", "auto", "required" or "named", of the functions `names`. A system message in front, or else the
    first of the user, gets the words. What is no message is left to whoever reads them.
    """
    out = _said(messages)
    if kind == "none" or not names:
        return out
    at = next((i for i, m in enumerate(out) if _role(m) in ("system", "developer", "user")), None)
    if at is not None:
        out[at] = _joined(_words(tools, kind, names), out[at], behind=_role(out[at]) != "user")
    return out


def has_calls(messages: Sequence[Any]) -> bool:
    """Whether a tool was called, or has answered."""
    return any(_role(m) == "tool" or (_role(m) == "assistant" and m.get("tool_calls")) for m in messages)


def _words(tools: Sequence[Mapping[str, Any]], kind: str, names: Sequence[str]) -> str:
    listed = [tool["function"] for tool in tools if tool["function"]["name"] in names]
    lines = [
        json.dumps({k: f[k] for k in ("name", "description", "parameters") if k in f}, ensure_ascii=False)
        for f in listed
    ]
    how = {"auto": _AUTO, "required": _REQUIRED, "named": _NAMED}[kind]
    return "You can call functions:\n" + "\n".join(lines) + "\n" + how


def _said(messages: Sequence[Any]) -> list[Any]:
    """Calls as the JSON that was asked for, results as what a user says; neighbours that a user says are one message,
    since templates want turns."""
    out: list[Any] = []
    called: dict[str, str] = {}
    told = False
    for message in messages:
        role = _role(message)
        if role == "assistant" and message.get("tool_calls"):
            message = _calls(message, called)
        elif role == "tool":
            name = called.get(str(message.get("tool_call_id")), message.get("name") or "the function")
            message = _joined(f"Result of {name}:", {"role": "user", "content": message.get("content")})
            if told:
                message, out = _merged(out[-1], message), out[:-1]
        elif role == "user" and told:
            message, out = _merged(out[-1], message), out[:-1]
        told = role == "tool"
        out.append(message)
    return out


def _calls(message: Mapping[str, Any], called: dict[str, str]) -> Mapping[str, Any]:
    lines = []
    calls = message["tool_calls"]
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return message
        called[str(call.get("id"))] = str(function.get("name"))
        given = function.get("arguments")
        with suppress(ValueError):  # a model's own words, valid or not
            given = json.loads(given) if isinstance(given, str) else given
        lines.append(json.dumps({"name": function.get("name"), "arguments": given}, ensure_ascii=False))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return _joined("\n".join(lines), rest, behind=True)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Mapping[str, Any]:
    content = first.get("content")
    if isinstance(content, str):
        return _joined(content, second)
    return {**first, "content": [*_parts(content), *_parts(second.get("content"))]}


def _joined(words: str, message: Mapping[str, Any], *, behind: bool = False) -> dict[str, Any]:
    """`words` in front of what a message says, or behind it; as a part of their own where it has parts."""
    content = message.get("content")
    if isinstance(content, list):
        part = {"type": "text", "text": words}
        return {**message, "content": [*content, part] if behind else [part, *content]}
    if not isinstance(content, str) or not content:
        return {**message, "content": words} if content in (None, "") else dict(message)
    return {**message, "content": f"{content}\n\n{words}" if behind else f"{words}\n\n{content}"}


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else ""
