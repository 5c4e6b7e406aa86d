"""What a tool's schema says of its parameters, for formats that do not write JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.text.grammar.references import References

ALL = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
_MAX_REFS = 16
_WORDS = {"True": "true", "False": "false", "None": "null"}


def parameter_kinds(schema: Any, name: str) -> frozenset[str]:
    """JSON types that parameter `name` may have; all of them if the schema does not say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found: list[References] = []

    def follow(reference: str) -> Any:
        if not found:
            found.append(References(schema, ""))
        place = found[0].find(reference, found[0].root)
        return place.schema if place is not None else None

    return _kinds(properties.get(name) if isinstance(properties, Mapping) else None, follow, _MAX_REFS)


def _kinds(schema: Any, follow: Callable[[str], Any], left: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or left == 0:
        return ALL
    if isinstance(schema.get("$ref"), str):
        return _kinds(follow(schema["$ref"]), follow, left - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return (frozenset((kind,)) | ({"null"} if schema.get("nullable") is True else set())) & ALL or ALL
    if isinstance(kind, list):
        return frozenset(k for k in kind if isinstance(k, str)) & ALL or ALL
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return frozenset().union(*(_kinds(part, follow, left - 1) for part in schema[word][:_MAX_REFS])) or ALL
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema[k] for k in ("const",) if k in schema]
    return frozenset(map(_kind_of, values)) or ALL


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def json_of(text: str, kinds: frozenset[str]) -> str:
    """A parameter's text as JSON of one of `kinds`; a string, if it can be nothing else.

    A type that the schema does not allow is taken all the same where it allows no string: the client checks.
    """
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
        kind = _kind_of(value)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if kind == "number" and math.isfinite(value) and value == int(value) and "integer" in kinds:
        kind = "integer"
    # Text in quotation marks is a string with quotation marks in it: strings stand there as they are.
    fits = kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
    return bare if fits or "string" not in kinds else json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> float:
    raise ValueError(word)


def escaped(text: str) -> str:
    """`text` as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
