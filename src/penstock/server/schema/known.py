"""The fields of objects within requests: what is not here is named to the client, with its path, or refused.

Structs say their own; objects that are passed on as they are have a `Shape`, under the name of their field in `inner`
of the request's struct. Templates see whole messages, so a message may have fields that only its template knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

Shape = Mapping[str, Any]
"""The fields of an object, or of every object of a list, and the shapes of their values; None: they are free."""


def names(*free: str, **inner: Shape | None) -> Shape:
    return {**dict.fromkeys(free), **inner}


PAUSE = 256
"""Items of a list between two pauses."""


class Open(dict[str, Any]):
    """A shape with fields besides those that are known."""


_PART = names("type", "text", "refusal", "cache_control")
"""A part of a chat message. Prefixes are cached without being told, so what asks for it is fulfilled."""
MESSAGES: Shape = Open(content=_PART)
_FORMAT = names("type", grammar=names("definition", "syntax"))
TOOLS: Shape = names("type", function=names("name", "description", "parameters", "strict"),
                     custom=names("name", "description", format=_FORMAT))  # fmt: skip
_NAMED = names("type", "name", function=names("name"), custom=names("name"))
TOOL_CHOICE: Shape = names("type", "name", "mode", function=names("name"), custom=names("name"), tools=_NAMED,
                           allowed_tools=names("mode", tools=_NAMED))  # fmt: skip

_ITEM_PART = names("type", "text", "refusal", "annotations", "logprobs")
ITEMS: Shape = names(
    "type", "id", "role", "status", "phase", "call_id", "name", "namespace", "arguments", "encrypted_content", "input",
    content=_ITEM_PART, output=_ITEM_PART, summary=names("type", "text"),
)  # fmt: skip
_FLAT = ("type", "name", "description", "parameters", "strict")
FLAT_TOOLS: Shape = names(*_FLAT, format=names("type", "syntax", "definition"), tools=names(*_FLAT))

_TEXT = ("type", "text", "citations", "cache_control")
_BLOCK = names(
    *_TEXT, "thinking", "signature", "data", "id", "name", "input", "tool_use_id", "is_error", "caller",
    content=names(*_TEXT),
)  # fmt: skip
ANTHROPIC: Shape = names(
    system=_BLOCK, messages=names("role", content=_BLOCK),
    tools=names("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"),
    tool_choice=names("type", "name", "disable_parallel_tool_use"), thinking=names("type"),
    output_config=names("effort", format=names("type", "name", "schema")),
    output_format=names("type", "name", "schema"),
)  # fmt: skip
"""Of `thinking`, no budget: only `max_tokens` bounds it."""


@cache
def shape_of(kind: type[msgspec.Struct]) -> Shape:
    """What a struct takes."""
    given: Mapping[str, Shape] = getattr(kind, "inner", {})
    hints = get_type_hints(kind)
    return {name: given.get(name) or _of_type(hints[name]) for name in kind.__struct_encode_fields__}


def _of_type(hint: Any) -> Shape | None:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return shape_of(hint)
    return next(filter(None, map(_of_type, get_args(hint))), None)


def unknown(value: Any, shape: Shape | None, path: str) -> Iterator[tuple[str, Any] | None]:
    """(path, value) of every field that `shape` does not have, at any depth below `value`, which is at `path`.

    None, every now and then: this may be interrupted.
    """
    if shape is None:
        return
    if isinstance(value, list):
        for n, item in enumerate(value):
            if n % PAUSE == PAUSE - 1:
                yield None
            if isinstance(item, dict | list):
                yield from unknown(item, shape, f"{path}[{n}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in shape:
                if isinstance(item, dict | list):
                    yield from unknown(item, shape[name], f"{path}.{name}")
            elif item is not None and not isinstance(shape, Open):
                yield f"{path}.{name}", item
