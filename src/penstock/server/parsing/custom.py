"""`tools` and `tool_choice` with custom tools, whose input is a text: shown to the model and checked as functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.base.errors import InputError
from penstock.server.parsing.namespaces import Names, spread
from penstock.server.parsing.tools import check_tools, read_choice
from penstock.text.custom import ARGUMENT, as_function

NO_CUSTOM: Mapping[str, bool] = {}


@dataclass(frozen=True)
class Tools:
    """`listed`: all as functions, as `check_tools` takes them. `custom`: names of those that are none -> whether the
    arguments of a call are the input itself; `grammars`: in Lark, of the input of some of these; `names`: places in
    `listed` -> as the client calls them; `spaces`: names in `listed` -> namespace and name (in Responses)."""

    listed: list[dict[str, Any]] | None = None
    custom: Mapping[str, bool] = field(default_factory=dict)
    grammars: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    spaces: Mapping[str, Names] = field(default_factory=dict)


def read_tools(tools: list[dict[str, Any]] | None, *, nested: bool) -> Tools:
    """`nested`: what a tool says is in an object under its type, as in chats; in Responses it stands beside it.

    Raises InputError for any tool that would have to run on the server: it runs none by itself.
    """
    if tools is None:
        return Tools()
    made: list[dict[str, Any]] = []
    grammars: dict[str, str] = {}
    custom: dict[str, bool] = {}
    names: dict[str, str] = {}
    spaces: dict[str, Names] = {}
    flat = ((f"tools[{i}]", tool, None) for i, tool in enumerate(tools)) if nested else spread(tools)
    for i, (where, tool, within) in enumerate(flat):
        ours = f"tools[{i}].function"
        kind = tool.get("type", "function" if nested else None)
        if kind == "custom":
            at = f"{where}.custom" if nested else where
            said = tool.get("custom") if nested else tool
            if not isinstance(said, Mapping):
                raise InputError(f"{at} must be an object with a name", param=at)
            function, lark = as_function(said, at, nested=nested)
            made.append(function)
            name = str(said.get("name"))
            custom[name] = lark is not None
            if lark is not None:
                grammars[name] = lark
            inner = f"parameters.properties.{ARGUMENT}"
            names |= {f"{ours}.{field}": f"{at}.format" for field in (inner, "parameters", "strict")}
            names |= {f"{ours}.{field}": f"{at}.{field}" for field in ("name", "description")}
        elif kind == "function":
            kept = ("name", "description", "parameters", "strict")
            inner_fields = {k: tool[k] for k in kept if tool.get(k) is not None}
            made.append(tool if nested else {"type": "function", "function": inner_fields})
        else:
            raise InputError(
                f"{where}.type is {str(tool.get('type'))[:40]!r}, which would run on the server, and this one runs no "
                "tools: leave it out; only function and custom tools are possible here", param=f"{where}.type",
            )  # fmt: skip
        if not nested:
            names[ours] = where
        if within is not None:
            spaces[tool["name"]] = within
    return Tools(made, custom, grammars, names, spaces)


def as_functions(choice: str | dict[str, Any] | None, tools: Tools) -> str | dict[str, Any] | None:
    """`tool_choice` for `check_tools`.

    Raises InputError, also where a tool with a grammar in Lark may be called and is not named: only a whole answer can
    be bound to one.
    """
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind in ("function", "custom"):
            said = choice.get(kind, choice)
            return {"type": "function", "function": {"name": said.get("name") if isinstance(said, dict) else None}}
        if kind != "allowed_tools":
            raise InputError(
                'tool_choice must be "auto", "none", "required", or an object of type function or custom that names '
                "one of the tools, or of type allowed_tools with a mode and tools", param="tool_choice",
            )  # fmt: skip
    if not tools.grammars:
        return choice
    asked = read_choice(check_tools(tools.listed, choice), choice)
    if asked.kind == "required" and len(asked.names) == 1:
        return {"type": "function", "function": {"name": asked.names[0]}}
    found = next((name for name in asked.names if name in tools.grammars), None)
    if asked.kind in ("auto", "required") and found is not None:
        raise InputError(
            f"the grammar of {found} is possible only where tool_choice names it or it is the one tool and required; "
            "do so, or write it as a regex", param="tool_choice",
        )  # fmt: skip
    return choice
