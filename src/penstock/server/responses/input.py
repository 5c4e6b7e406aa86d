"""What a Responses request says, in the shapes of chat: items as messages, formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.base.errors import InputError
from penstock.server.parsing.namespaces import shown_name
from penstock.server.schema.forms import Form, only, string_in
from penstock.server.schema.responses import ResponsesRequest
from penstock.server.turns.asking import new_id
from penstock.text.custom import arguments_of

MAX_ITEMS = 10_000
_REFERENCE = "item_reference"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PREFIX = {
    "message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_",
    "custom_tool_call": "ctc_", "custom_tool_call_output": "ctco_",
}  # fmt: skip


Find = Callable[[str], dict[str, Any] | None]
"""By an id: the item of a stored response's output."""


def input_items(given: str | list[dict[str, Any]] | None, find: Find) -> list[dict[str, Any]]:
    """The items of a request's `input`, each with an id and a type. Raises InputError."""
    if given is None:
        raise InputError("input is missing", param="input")
    if isinstance(given, str):
        if not given:
            raise InputError("input must not be empty", param="input")
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not 1 <= len(given) <= MAX_ITEMS:
        raise InputError(f"input has {len(given)} items; 1 to {MAX_ITEMS} are possible", param="input")
    return [_named(item, f"input[{i}]", find) for i, item in enumerate(given)]


def _named(item: dict[str, Any], where: str, find: Find) -> dict[str, Any]:
    kind = item.get("type") or ("message" if "role" in item or "id" not in item else _REFERENCE)
    if kind == _REFERENCE:
        meant = string_in(item, "id", where)
        found = find(meant)
        if found is None:
            raise InputError(
                f"{where} refers to {meant[:80]!r}, which is in the output of no stored response: it never was, was "
                "deleted, or is too old; send the item itself", param=f"{where}.id",
            )  # fmt: skip
        return found
    if not isinstance(kind, str) or kind not in _PREFIX:
        raise InputError(
            f"{where}.type is {str(kind)[:40]!r}; possible are {', '.join(_PREFIX)}, {_REFERENCE}",
            param=f"{where}.type",
        )
    given = item.get("id")
    item_id = given if isinstance(given, str) and 0 < len(given) <= 128 else new_id(_PREFIX[kind])
    return {**item, "id": item_id, "type": kind}


def chat_messages(
    items: Sequence[Mapping[str, Any]], instructions: str | None = None, *, num_stored: int = 0
) -> list[dict[str, Any]]:
    """Chat's messages. `num_stored`: how many of `items` come from a stored response, for the paths in errors.

    `instructions` and the system and developer messages that lead are one system message: most templates take only
    one, in front. Calls and thoughts belong to one assistant message with the text beside them.
    Raises InputError.
    """
    made = _Messages()
    for i, item in enumerate(items):
        where = f"input[{i - num_stored}]" if i >= num_stored else "previous_response_id"
        match item["type"]:
            case "message":
                made.message(item, where)
            case "function_call":
                made.call(item, where, string_in(item, "arguments", where, empty=True))
            case "custom_tool_call":
                made.call(item, where, arguments_of(string_in(item, "input", where, empty=True)))
            case "function_call_output" | "custom_tool_call_output":
                made.output(item, where)
            case "reasoning":
                made.reasoning(item, where)
    out = made.out
    lead = 0
    while lead < len(out) and out[lead]["role"] == "system":
        lead += 1
    texts = [instructions] if instructions else []
    texts += [_plain(m["content"]) for m in out[:lead]]
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*system, *out[lead:]]


class _Messages:
    def __init__(self) -> None:
        self.out: list[dict[str, Any]] = []
        self._open = False
        """Whether the last message is an assistant's that may still get text or calls."""

    def _assistant(self, fresh: bool) -> dict[str, Any]:
        if fresh or not self._open:
            self.out.append({"role": "assistant", "content": None})
            self._open = True
        return self.out[-1]

    def message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InputError(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            last = self.out[-1] if self._open else {}
            self._assistant(last.get("content") is not None or "tool_calls" in last)["content"] = content
        else:
            self.out.append({"role": _ROLES[role], "content": content})
            self._open = False

    def call(self, item: Mapping[str, Any], where: str, arguments: str) -> None:
        call_id = string_in(item, "call_id", where)
        function = {"name": shown_name(item, where), "arguments": arguments}
        calls = self._assistant(False).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def output(self, item: Mapping[str, Any], where: str) -> None:
        content = _content(item.get("output"), f"{where}.output")
        self.out.append({"role": "tool", "tool_call_id": string_in(item, "call_id", where), "content": content})
        self._open = False

    def reasoning(self, item: Mapping[str, Any], where: str) -> None:
        texts = []
        for part in item.get("content") or item.get("summary") or []:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise InputError(f"{where}.content must be a list of reasoning_text parts", param=f"{where}.content")
            texts.append(part["text"])
        if texts:
            self._assistant(True)["reasoning_content"] = "\n".join(texts)


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where} must be a string or a list of text parts", param=where)
    parts = []
    for j, part in enumerate(content):
        at = f"{where}[{j}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXTS:
            raise InputError(f"{at}.type is {str(kind)[:40]!r}; only text is read, no images", param=f"{at}.type")
        parts.append({"type": "text", "text": string_in(part, _TEXTS[kind], at, empty=True)})
    return parts[0]["text"] if len(parts) == 1 else parts


def _plain(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def form(body: ResponsesRequest) -> Form | None:
    """What the answer is bound to. Raises InputError."""
    given = body.text.format if body.text is not None else None
    return only((body.form(), None if given is None else given.form("text.format", "schema")))
