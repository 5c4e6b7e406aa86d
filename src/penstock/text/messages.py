"""A conversation as clients send it -> plain data a template can read."""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.base.errors import InputError
from penstock.text.custom import arguments_of
from penstock.text.template_meter import MAX_NODES

MAX_DEPTH = 64

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a model's earlier reasoning; templates read the first two."""
_LOST = {
    "function_call": "was replaced by tool_calls; send it as one of those",
    "audio": "cannot be read by this model; send what was said as content",
}
"""Of a message, what no template shows, though it is part of what was said."""


def read_messages(messages: Any, *, parts: bool = False) -> list[dict[str, Any]]:
    """Checked copies with `content` as one string.

    Text parts are joined by a newline (as vLLM does); with `parts`, several parts stay a list for templates that read
    one, but for system messages, which those templates print as they are. A missing content is "" for messages that
    carry tool calls or reasoning, and a refusal is what was said. Arguments of tool calls that are a JSON object in a
    string become that object, which templates expect. A key that is null is no key: templates ask which there are, and
    clients write null for what there is not.
    Raises: InputError naming the message and part.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InputError("messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{i}]", parts) for i, message in enumerate(messages)]


def _message(message: Any, where: str, parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object, not {type(message).__name__}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise InputError(f"{where}.role must be a name such as system, user, assistant or tool", param=f"{where}.role")
    rest = {key: value for key, value in message.items() if key != "content" and value is not None}
    if rest.get("tool_calls") == []:
        del rest["tool_calls"]
    for key, why in _LOST.items():
        if key in rest:
            raise InputError(f"{where}.{key} {why}", param=f"{where}.{key}")
    out: dict[str, Any] = plain(rest, where)
    reasoning = next((out[key] for key in _REASONING if out.get(key) is not None), None)
    if reasoning is not None:
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    content = message.get("content")
    if content is None and isinstance(out.get("refusal"), str):
        content = out["refusal"]
    if content is None and (out.get("tool_calls") or reasoning is not None):
        content = ""
    texts = _texts(content, f"{where}.content")
    listed = parts and len(texts) > 1 and role not in ("system", "developer")
    out["content"] = [{"type": "text", "text": text} for text in texts] if listed else "\n".join(texts)
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(out["tool_calls"], f"{where}.tool_calls")
    # In a client's order: templates that print a whole message show what the client sent.
    order = [key for key in message if key in out]
    return {key: out[key] for key in dict.fromkeys([*order, *out])}


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [str.__str__(content)]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InputError(f"{where} must be a string or a list of text parts", param=where)
    texts = []
    for j, part in enumerate(content):
        at = f"{where}[{j}]"
        if not isinstance(part, Mapping):
            raise InputError(f"{at} must be an object with a type", param=at)
        kind = part.get("type")
        if kind != "text":
            raise InputError(
                f"{at} has type {str(kind)[:40]!r}; only text parts are read, no images or sound", param=at
            )
        if not isinstance(part.get("text"), str):
            raise InputError(f"{at}.text must be a string", param=f"{at}.text")
        texts.append(str.__str__(part["text"]))
    return texts


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InputError(f"{where} must be a list of objects", param=where)
    out = []
    for call in calls:
        call = _told(call if call.get("type") != "custom" else _as_function(call, where))
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if isinstance(arguments, dict):
                arguments = plain(arguments, f"{where}.function.arguments")
                call = call | {"function": function | {"arguments": arguments}}
        out.append(call)
    return out


def _as_function(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call of a custom tool as templates know calls."""
    said = call.get("custom")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str) or not isinstance(said.get("input"), str):
        raise InputError(f"{where} has a call of type custom; it needs custom with a name and an input", param=where)
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": {"name": said["name"], "arguments": arguments_of(said["input"])}}


def read_tools(tools: Any) -> list[Any] | None:
    """Checked copies of tool descriptions, or None. Raises: InputError."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError("tools must be a list of objects", param="tools")
    return [_told(plain(tool, f"tools[{i}]")) for i, tool in enumerate(tools)]


def _told(item: dict[str, Any]) -> dict[str, Any]:
    """A tool or a call without null keys, its own and its function's. In schemas and arguments null is a value."""
    out = {key: value for key, value in item.items() if value is not None}
    function = out.get("function")
    if isinstance(function, dict):
        out["function"] = {key: value for key, value in function.items() if value is not None}
    return out


def plain(value: Any, where: str) -> Any:
    """A copy made of JSON's own types only, so that a template gets no object with methods of its own.

    Raises: InputError if it holds anything else, is nested deeper than 64 or has more than 100,000 elements.
    """
    left = [MAX_NODES]

    def copy(item: Any, depth: int) -> Any:
        left[0] -= 1
        if depth > MAX_DEPTH or left[0] < 0:
            raise InputError(
                f"{where} is nested deeper than {MAX_DEPTH} or has more than {MAX_NODES} elements", param=where
            )
        if item is None or isinstance(item, bool):
            return item
        if isinstance(item, str):
            return str.__str__(item)
        if isinstance(item, numbers.Integral):
            return int(item)
        if isinstance(item, numbers.Real):
            return float(item)
        if isinstance(item, Mapping):
            if not all(isinstance(key, str) for key in item):
                raise InputError(f"{where}: the keys of an object must be strings", param=where)
            return {str.__str__(key): copy(x, depth + 1) for key, x in item.items()}
        if isinstance(item, list | tuple):
            return [copy(x, depth + 1) for x in item]
        raise InputError(f"{where} holds a {type(item).__name__}, which JSON does not have", param=where)

    return copy(value, 0)


def strings(value: Any) -> Iterator[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
