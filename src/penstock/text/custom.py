"""Custom tools: their input is a text, free or bound to a grammar, and no JSON.

The model is shown a function with one argument, `input`, since that is what it was taught to call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.base.errors import InputError

ARGUMENT = "input"


def as_function(tool: Mapping[str, Any], where: str, *, nested: bool = False) -> tuple[dict[str, Any], str | None]:
    """The function that is shown for a custom tool, and the Lark grammar of its input if it has one. Raises InputError.

    A regular expression becomes a pattern of the argument, which binds it wherever a call can be bound. `nested`: a
    grammar is an object within the format, as in chats.
    """
    format = tool.get("format") or {"type": "text"}
    kind = format.get("type") if isinstance(format, Mapping) else None
    if kind not in ("text", "grammar"):
        raise InputError(f"{where}.format.type must be text or grammar", param=f"{where}.format.type")
    argument: dict[str, Any] = {"type": "string"}
    function: dict[str, Any] = {"name": tool.get("name"), "description": tool.get("description")}
    lark = None
    if kind == "grammar":
        at = f"{where}.format.grammar" if nested else f"{where}.format"
        grammar = format.get("grammar") if nested else format
        if not isinstance(grammar, Mapping):
            raise InputError(f"{at} must be an object with a definition and a syntax", param=at)
        definition, syntax = grammar.get("definition"), grammar.get("syntax")
        if not isinstance(definition, str) or not definition:
            raise InputError(f"{at}.definition must be a text", param=f"{at}.definition")
        if syntax not in ("lark", "regex"):
            raise InputError(f"{at}.syntax must be lark or regex", param=f"{at}.syntax")
        if syntax == "regex":
            argument["pattern"] = f"^(?:{definition})$"
            function["strict"] = True
        else:
            lark = definition
            function["description"] = (
                f"{function['description'] or ''}\nThe input follows this grammar:\n{lark}".strip()
            )
    function["parameters"] = {
        "type": "object", "properties": {ARGUMENT: argument}, "required": [ARGUMENT], "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": function}, lark


def arguments_of(text: str) -> str:
    """A call's input as the arguments of the function."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


def input_of(arguments: str, bound: bool) -> str:
    """What a call's arguments say. `bound`: they are the input itself. Of a call that was cut off: what there is."""
    if bound:
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        begun = arguments.partition(":")[2].lstrip()
        for cut in range(7):  # an escape has six characters
            try:
                return str(json.loads(begun[: len(begun) - cut] + '"'))
            except ValueError:
                continue
        return ""
    found = value.get(ARGUMENT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments
