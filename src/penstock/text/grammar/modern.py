"""One schema's keywords in the words of the newest draft, in the order in which they are written.

What older drafts and OpenAPI 3.0 say otherwise is said anew (`items` as a list, `exclusiveMinimum: true`, `nullable`,
`dependencies`); what only describes is left out; what has no effect as it is used is left out too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from penstock.text.grammar.keywords import (
    ANNOTATIONS,
    HINTS,
    MAX_PROPERTIES,
    NAMES,
    names,
    pattern,
    refuse,
    show,
)


class Keyword(NamedTuple):
    """A keyword, its value, and what the client calls it. The keyword `also` holds one more schema for the value."""

    key: str
    value: Any
    path: str


_LAST = ("format", "propertyNames", "also")
"""These change or read what other keywords have said."""
_MAX_STEPS = 8
"""From one reference to the next."""
_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "then", "else", "$ref", "dependentSchemas", "dependencies")


def modern(schema: Mapping[str, Any], path: str) -> list[Keyword]:
    """Raises: InputError for old words with values of a wrong kind."""
    found = [entry for key, value in schema.items() for entry in _entries(schema, key, value, path)]
    return sorted(found, key=lambda entry: entry.key in _LAST)


def _entries(schema: Mapping[str, Any], key: str, value: Any, path: str) -> Iterator[Keyword]:
    at = f"{path}.{key}"
    if key in ANNOTATIONS or key in NAMES or (key.startswith("x-") and key != "x-guidance"):
        return
    match key:
        case "id" if isinstance(value, str):  # draft 4; a reference that needs it finds nothing
            return
        case "type" if schema.get("nullable") is True:
            listed = value if isinstance(value, list) else [value]
            yield Keyword(key, [*listed, *(["null"] if "null" not in listed else [])], at)
        case "nullable" if isinstance(value, bool):
            return  # without a type beside it, it says nothing (OpenAPI 3.0.3)
        case "minimum" | "maximum" if schema.get(_exclusive(key)) is True:
            yield Keyword(_exclusive(key), value, at)
        case "exclusiveMinimum" | "exclusiveMaximum" if isinstance(value, bool):
            return
        case "items" if isinstance(value, list):
            if value:
                yield Keyword("prefixItems", value, at)
        case "additionalItems":
            if isinstance(schema.get("items"), list):
                yield Keyword("items", value, at)
        case "if" if "then" in schema or "else" in schema:
            yield Keyword(key, (value, schema.get("then", True), schema.get("else", True)), at)
        case "if" | "then" | "else":
            return  # parts of the one above, or without effect
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            if not isinstance(value, Mapping):
                refuse(at, f"must be an object, not {show(value)}")
            for name, needed in value.items():
                yield from _dependent(name, needed, f"{at}.{name}", only_names=key == "dependentRequired")
        case "uniqueItems" if value is False or schema.get("maxItems") in (0, 1):
            return
        case "contains" if schema.get("minContains") == 0 and "maxContains" not in schema:
            return
        case "minContains" | "maxContains":
            return  # say how often what `contains` asks for comes
        case "unevaluatedProperties" if value is True or not any(word in schema for word in _IN_PLACE):
            if "additionalProperties" not in schema:
                yield Keyword("additionalProperties", value, at)
        case _:
            yield Keyword(key, value, at)


def _exclusive(key: str) -> str:
    return f"exclusive{key.capitalize()}"


def _dependent(name: str, needed: Any, path: str, *, only_names: bool) -> Iterator[Keyword]:
    if only_names or isinstance(needed, list):
        names(needed, path)
        if needed:
            present: dict[str, Any] = {"required": [name, *needed]}
            yield Keyword("also", {"anyOf": [{"properties": {name: False}}, present]}, path)
    else:
        present = {"allOf": [{"required": [name]}, needed]}
        yield Keyword("also", {"anyOf": [{"properties": {name: False}}, present]}, path)


def bind_names(out: dict[str, Any], bound: Any, follow: Callable[[str], Any], path: str) -> None:
    """Say in `out`, a schema in compiled form, that all names conform to `bound`, another one. Raises: InputError."""
    for _ in range(_MAX_STEPS):
        if isinstance(bound, Mapping) and "$ref" in bound and set(bound) <= {"$ref", "$comment"}:
            bound = follow(bound["$ref"])
    said = {key: value for key, value in bound.items() if key != "$comment"} if isinstance(bound, dict) else {}
    kinds = said.pop("type", "string")
    if bound is False or not ({kinds} if isinstance(kinds, str) else set(kinds)) & {"string"}:
        out["maxProperties"] = 0
        return
    if not said:
        return
    properties, rest = out.get("properties", {}), out.get("additionalProperties", True)
    if "patternProperties" in out:
        _refuse_names(path)
    if set(said) in ({"enum"}, {"const"}):
        allowed = [name for name in said.get("enum", [said.get("const")]) if isinstance(name, str)]
        if len(allowed) > MAX_PROPERTIES:
            _refuse_names(path)
        kept = {name: part if name in allowed else False for name, part in properties.items()}
        out["properties"] = {**kept, **{name: rest for name in allowed if name not in kept}}
        out["additionalProperties"] = False
        return
    if properties or not set(said) <= {"pattern", "minLength", "maxLength"} or ("pattern" in said and len(said) > 1):
        _refuse_names(path)
    expression = said.get("pattern", f"^(?s:.){{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$")
    pattern(expression, path)
    out["patternProperties"] = {expression: rest}
    out["additionalProperties"] = False


def _refuse_names(path: str) -> None:
    refuse(path, f"cannot be enforced; {HINTS['propertyNames']}")
