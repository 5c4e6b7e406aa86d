"""Whether a schema has any finite instance: one that always requires another one within itself has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.text.grammar.keywords import TYPES


def has_instances(form: Mapping[str, Any]) -> bool:
    """Of a schema in compiled form. True where that is not clear: what is unsatisfiable otherwise, compiling finds."""
    definitions: Mapping[str, Any] = form.get("$defs", {})
    finite: set[str] = set()
    users: dict[str, set[str]] = {}
    for name, schema in definitions.items():
        for used in _used(schema):
            users.setdefault(used, set()).add(name)
    todo = list(definitions)
    while todo:
        name = todo.pop()
        if name not in finite and _ends(definitions[name], finite):
            finite.add(name)
            todo += users.get(name, ())
    return _ends(form, finite)


def _ends(schema: Any, finite: set[str]) -> bool:
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return True  # false is unsatisfiable, but that is for the compiler to say
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
        return False
    if not all(_ends(part, finite) for part in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_ends(part, finite) for part in schema[key]):
            return False
    said = schema.get("type", TYPES)
    kinds = {said} if isinstance(said, str) else set(said)
    if kinds - {"object", "array"}:
        return True
    return ("object" in kinds and _object_ends(schema, finite)) or ("array" in kinds and _array_ends(schema, finite))


def _object_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(_ends(properties.get(name, rest), finite) for name in schema.get("required", ()))


def _array_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    needed = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
    return all(_ends(part, finite) for part in needed)


def _used(schema: Any) -> set[str]:
    found: set[str] = set()
    todo = [schema]
    while todo:
        at = todo.pop()
        if isinstance(at, Mapping):
            if isinstance(at.get("$ref"), str):
                found.add(at["$ref"].rpartition("/")[2])
            todo += at.values()
        elif isinstance(at, list):
            todo += at
    return found
