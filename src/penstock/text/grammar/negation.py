"""What a schema forbids, as a schema of what is left: for `not`, and for the other branch of `if`.

Where the whole complement cannot be said, a part of it is returned, so that whatever is written does conform; what
comes out of here must therefore not be denied again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.text.grammar.keywords import EXACT

Schema = dict[str, Any] | bool
_KINDS = ("null", "boolean", "number", "string", "array", "object")
_DUAL = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum",
}  # fmt: skip
_COUNTED = {"Length": "string", "Items": "array", "Properties": "object"}
MAX_DEPTH = 16
MAX_STEPS = 2_000
"""Schemas that are denied in one document: through references, there may be any number."""
MAX_TEXT_CHARS = 200
"""Of a text that is forbidden, and ten times as many of all at one place."""


class CannotDenyError(Exception):
    """No part of the complement can be said."""


class Denier:
    """Denies schemas of one document, in compiled form.

    Attributes:
        approximate: ids of schemas that are only parts of what was asked, and so cannot be denied.
    """

    def __init__(self, follow: Callable[[str], Any]) -> None:
        """`follow` gives the schema of a reference."""
        self.approximate: set[int] = set()
        self._follow = follow
        self._left = MAX_STEPS

    def denied(self, schema: Any, depth: int = 0) -> Schema:
        """A schema all of whose instances are no instances of `schema`. Raises CannotDenyError."""
        self._left -= 1
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH or self._left < 0 or id(schema) in self.approximate:
            raise CannotDenyError
        options: list[Schema] = []
        for key, value in schema.items():
            try:
                options += _keyword(key, value, lambda part: self.denied(part, depth + 1), self._follow)
            except CannotDenyError:
                continue
        options = [option for option in options if option is not False]
        if not options:
            if all(key == "$comment" for key in schema):
                return False
            raise CannotDenyError
        return options[0] if len(options) == 1 else {"anyOf": options}


def _keyword(key: str, value: Any, deny: Callable[[Any], Schema], follow: Callable[[str], Any]) -> list[Schema]:
    match key:
        case "$ref":
            return [deny(follow(value))]
        case "type":
            kept = {value} if isinstance(value, str) else set(value)
            if "integer" in kept:
                kept.add("number")  # numbers that are not whole cannot be told apart
            left = [kind for kind in _KINDS if kind not in kept]
            return [{"type": left}] if left else []
        case "const":
            return [_unlike([value])]
        case "enum":
            return [_unlike(value)]
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties":
            return [option for name, part in value.items() for option in _property(name, part, deny)]
        case "anyOf":
            return [{"allOf": [deny(part) for part in value]}]
        case "allOf":
            return [option for part in value for option in _maybe(part, deny)]
    if key in _DUAL:
        return [{"type": "number", _DUAL[key]: value}]
    if key[:3] in ("min", "max") and key[3:] in _COUNTED:
        if key == f"min{key[3:]}":
            return [{"type": _COUNTED[key[3:]], f"max{key[3:]}": value - 1}] if value else []
        return [{"type": _COUNTED[key[3:]], f"min{key[3:]}": value + 1}]
    raise CannotDenyError


def _maybe(part: Any, deny: Callable[[Any], Schema]) -> list[Schema]:
    try:
        return [deny(part)]
    except CannotDenyError:
        return []


def _property(name: str, part: Any, deny: Callable[[Any], Schema]) -> list[Schema]:
    return [
        {"type": "object", "properties": {name: other}, "required": [name]}
        for other in _maybe(part, deny)
        if other is not False
    ]


def _unlike(values: Sequence[Any]) -> Schema:
    """Any value but these. Lists and objects are left out altogether if one of the values is such."""
    kinds = {_kind(value) for value in values}
    options: list[Schema] = []
    rest = [kind for kind in _KINDS if kind not in kinds]
    if rest:
        options.append({"type": rest})
    if "boolean" in kinds:
        options += [{"const": flag} for flag in (False, True) if not any(value is flag for value in values)]
    if "number" in kinds:
        options += _between(sorted({value for value in values if _kind(value) == "number"}))
    if "string" in kinds:
        texts = [value for value in values if isinstance(value, str)]
        if max(map(len, texts)) <= MAX_TEXT_CHARS and sum(map(len, texts)) <= 10 * MAX_TEXT_CHARS:
            options.append({"type": "string", "pattern": f"^(?:{_other_texts(texts)})$"})
    if not options:
        raise CannotDenyError
    return options[0] if len(options) == 1 else {"anyOf": options}


def _between(points: list[int | float]) -> list[Schema]:
    if any(abs(point) > EXACT for point in points):
        return []
    bounds = [None, *points, None]
    out: list[Schema] = []
    for low, high in pairwise(bounds):
        gap: dict[str, Any] = {"type": "number"}
        if low is not None:
            gap["exclusiveMinimum"] = low
        if high is not None:
            gap["exclusiveMaximum"] = high
        out.append(gap)
    return out


def _other_texts(texts: Sequence[str]) -> str:
    """A regular expression for every text but these."""
    if not texts:
        return "(?s:.)*"
    below: dict[str, list[str]] = {}
    for text in texts:
        if text:
            below.setdefault(text[0], []).append(text[1:])
    options = [f"{_escaped(first)}(?:{_other_texts(rest)})" for first, rest in below.items()]
    options.append(f"[^{''.join(map(_escaped, below))}](?s:.)*" if below else "(?s:.)+")
    if "" not in texts:
        options.append("")
    return "|".join(options)


def _escaped(char: str) -> str:
    return char if char.isalnum() else f"\\x{{{ord(char):X}}}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"
