"""`tools` and `tool_choice` of a request: checks, and what they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.base.errors import InputError
from penstock.text.grammar.schema import as_tool, json_schema_check
from penstock.text.grammar.source import lark_literal
from penstock.text.messages import plain

MAX_TOOLS = 128
MAX_NAME_CHARS = 64
MAX_TOOL_BYTES = 128 << 10
MAX_ALL_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Choice:
    """What tool_choice asks for: text only, what the model likes, at least one call, or a call of `names[0]`.

    `names`: the tools that may be called.
    """

    kind: Literal["none", "auto", "required", "named"]
    names: tuple[str, ...] = ()


def check_tools(tools: Any, tool_choice: Any = None) -> list[dict[str, Any]]:
    """The tools of a request as plain data, without their nulls; [] for none.

    Raises InputError, with the path of what has to change as `param`.
    """
    if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str | bytes)):
        raise InputError("tools must be a list of tools", param="tools")
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are possible", param="tools")
    out = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(tools)]
    seen: dict[str, int] = {}
    for n, tool in enumerate(out):
        name = tool["function"]["name"]
        if name in seen:
            where = f"tools[{n}].function.name"
            raise InputError(f"{where} is {name!r}, as is that of tools[{seen[name]}]; names must differ", param=where)
        seen[name] = n
    size = sum(len(json.dumps(tool)) for tool in out)
    if size > MAX_ALL_BYTES:
        raise InputError(f"tools has {size} bytes in all; at most {MAX_ALL_BYTES} are possible", param="tools")
    read_choice(out, tool_choice)
    return out


def read_choice(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any = None) -> Choice:
    """What `tool_choice` means for checked `tools`. Raises InputError with `param` tool_choice."""
    names = tuple(str(tool["function"]["name"]) for tool in tools or ())
    if tool_choice is None:
        return Choice("auto" if names else "none", names)
    if tool_choice in ("none", "auto"):
        return Choice(tool_choice if names else "none", names)
    if tool_choice == "required":
        if not names:
            raise InputError("tool_choice is required, but there are no tools", param="tool_choice")
        return Choice("required", names)
    if isinstance(tool_choice, Mapping):
        if tool_choice.get("type") == "function":
            return Choice("named", (_named(tool_choice, names, "tool_choice"),))
        if tool_choice.get("type") == "allowed_tools":
            return _allowed(tool_choice, names)
    raise InputError(
        "tool_choice must be none, auto, required, or an object of type function that names one of the tools",
        param="tool_choice",
    )


def _allowed(choice: Mapping[str, Any], names: tuple[str, ...]) -> Choice:
    inner = choice.get("allowed_tools", choice)
    mode, listed = (inner.get("mode"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise InputError("tool_choice of type allowed_tools needs a mode, auto or required, and a list of tools",
                         param="tool_choice")  # fmt: skip
    chosen = [_named(tool, names, f"tool_choice.tools[{n}]") for n, tool in enumerate(listed)]
    return Choice(mode, tuple(dict.fromkeys(chosen)))


def bound_by(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> dict[str, str]:
    """What binds the output -> where a client has written it, if `tool_choice` names a tool."""
    choice = read_choice(tools, tool_choice)
    if choice.kind != "named":
        return {}
    place = next(n for n, tool in enumerate(tools or ()) if tool["function"]["name"] == choice.names[0])
    return dict.fromkeys(
        ("structured_outputs.json", "structured_outputs.grammar"), f"tools[{place}].function.parameters"
    )


def _named(choice: Any, names: tuple[str, ...], where: str) -> str:
    inner = choice.get("function", choice.get("custom", choice)) if isinstance(choice, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if name not in names:
        said = (
            "there are no tools" if not names else "the tools are " + ", ".join(names[:8]) + ("..." * (len(names) > 8))
        )
        shown = repr(name[:MAX_NAME_CHARS]) if isinstance(name, str) else "no name"
        raise InputError(f"{where} names {shown}, but {said}", param="tool_choice")
    return str(name)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise InputError(f"{where} must be an object", param=where)
    if tool.get("type", "function") != "function":
        raise InputError(f"{where}.type must be function; this server runs no tools of its own", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InputError(f"{where}.function must be an object with a name", param=f"{where}.function")
    where += ".function"
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        said = f"has {len(name)} characters" if isinstance(name, str) and len(name) > MAX_NAME_CHARS else "is not one"
        raise InputError(
            f"{where}.name {said}: 1 to {MAX_NAME_CHARS} letters, digits, _ and - are possible", param=f"{where}.name"
        )
    if function.get("description") is not None and not isinstance(function["description"], str):
        raise InputError(f"{where}.description must be a string", param=f"{where}.description")
    if function.get("strict") is not None and not isinstance(function["strict"], bool):
        raise InputError(f"{where}.strict must be true or false", param=f"{where}.strict")
    _parameters(function.get("parameters"), f"{where}.parameters")
    inner = {key: value for key, value in function.items() if value is not None}
    copied: dict[str, Any] = plain({**tool, "type": "function", "function": inner}, where.removesuffix(".function"))
    size = len(json.dumps(copied))
    if size > MAX_TOOL_BYTES:
        raise InputError(f"{where} has {size} bytes; at most {MAX_TOOL_BYTES} are possible", param=where)
    return copied


def _parameters(schema: Any, where: str) -> None:
    """A tool's parameters are an object. What else the schema says matters where decoding is bound by it."""
    if schema is None:
        return
    if not isinstance(schema, Mapping):
        raise InputError(f"{where} must be a JSON schema, which is an object", param=where)
    if schema.get("type", "object") != "object":
        raise InputError(f"{where}.type must be object: arguments have names", param=f"{where}.type")
    properties = schema.get("properties")
    if properties is None:
        return
    if not isinstance(properties, Mapping):
        raise InputError(f"{where}.properties must be an object", param=f"{where}.properties")
    for name, value in properties.items():
        if not isinstance(value, Mapping | bool):
            at = f"{where}.properties.{str(name)[:MAX_NAME_CHARS]}"
            raise InputError(f"{at} must be a JSON schema, which is an object", param=at)


def schemas(tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The schemas of the arguments of the tools that are named. A tool without one takes no arguments."""
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    by_name = {tool["function"]["name"]: tool["function"].get("parameters") or none for tool in tools}
    return {name: by_name[name] for name in names}


def bound_schemas(tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """`schemas`, ready to be parts of another: references stay within each, errors name it as the client does.

    What cannot be enforced is passed over where a tool is not `strict`: tools of others (MCP) say what they like, and
    must stay usable. Raises InputError for the rest.
    """
    out = {}
    for n, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] in names:
            [schema] = schemas([tool], [function["name"]]).values()
            where, lenient = f"tools[{n}].function.parameters", not function.get("strict")
            json_schema_check(schema, where, lenient=lenient)
            out[function["name"]] = as_tool(schema, where, lenient=lenient)
    return out


def calls_schema(tools: Mapping[str, Any], *, parallel: bool) -> dict[str, Any]:
    """A list of at least one call as a JSON schema. `tools`: those of `bound_schemas`."""
    one = [
        {"type": "object", "properties": {"name": {"const": name}, "arguments": schema},
         "required": ["name", "arguments"], "additionalProperties": False}
        for name, schema in tools.items()
    ]  # fmt: skip
    out: dict[str, Any] = {"type": "array", "items": {"anyOf": one}, "minItems": 1}
    return out if parallel else out | {"maxItems": 1}


def text_or_calls(
    opener: str, shape: tuple[str, str, str] | None, tools: Mapping[str, Any], plain: bool = False
) -> str:
    """A grammar in Lark: any text, in which `opener` begins a call that its tool's schema allows.

    `plain`: so does the JSON of a call as far as its arguments (`json_wire.plain_call`), wherever it stands. Without a
    `shape` nothing else does.
    """
    lines = ["start: call* TEXT", r"TEXT: /(.|\n)*/", r"BLANK: /\s{0,16}/"]
    calls = []
    if shape is not None:
        before, between, after = map(lark_literal, shape)
        lines.append(f"head[lazy]: TEXT {lark_literal(opener)}")
        calls.append(f"head {before} ({' | '.join(f'tool_{n}' for n in range(len(tools)))}) {after}")
        lines += [
            f"tool_{n}: {lark_literal(name)} {between} %json {json.dumps(schema)}"
            for n, (name, schema) in enumerate(tools.items())
        ]
    if plain:
        for n, (name, schema) in enumerate(tools.items()):  # names are letters, digits, _ and -
            lines.append(rf'plain_{n}[lazy]: TEXT /\{{\s*"name":\s*"{name}"\s*,\s*"arguments":/')
            calls.append(f'plain_{n} BLANK %json {json.dumps(schema)} BLANK "}}"')
    return "\n".join([*lines, f"call: {' | '.join(calls)}"]) + "\n"
