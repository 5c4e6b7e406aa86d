"""JSON schemas: which keywords are taken. What would be ignored is refused, with its path.

llguidance refuses some keywords it does not implement, and passes over words it does not know; this table is the
complete list of what it enforces (draft 2020-12). Words that only describe are taken and have no effect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from penstock.base.errors import InputError
from penstock.text.grammar.nesting import MAX_REGEX_REPEATS, check_repeats, regex_repeats

MAX_SCHEMA_CHARS = 1 << 20
MAX_DEPTH = 64
MAX_PROPERTIES = 2_000
"""Of one object; compiling takes time with their square. All together: `MAX_SUBSCHEMAS`."""
MAX_SUBSCHEMAS = 10_000
MAX_ENUM = 10_000
"""Values of all `enum`s together."""
MAX_COUNT = 1_000_000
"""Largest minItems, maxItems, minLength, maxLength, minProperties and maxProperties."""
MAX_PATTERN_CHARS = 4_096

TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id",
    "discriminator",
})  # fmt: skip
_ONE = ("additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
SUPPORTED = frozenset({*_ONE, *_LISTS, *_TABLES, *_COUNTS, *_NUMBERS,
                       "type", "enum", "const", "required", "pattern", "format", "$ref"})  # fmt: skip
_HINTS = {
    "nullable": 'write "type": ["...", "null"]',
    "x-guidance": "options of the grammar library cannot be set by requests",
    "additionalItems": "write prefixItems and items",
    "dependencies": "write anyOf",
    "not": "say what is allowed instead",
    "format": f"known formats: {', '.join(FORMATS)}",
}


def json_schema_check(schema: Any, path: str) -> None:
    """Refuse what would not be enforced. `path` is how the client calls the schema; errors name the place below it.

    Looks at the schema only: what cannot be compiled, patterns for example, is found by compiling. Fetches nothing.
    Raises: InputError.
    """
    if not isinstance(schema, Mapping):
        _refuse(path, f"must be a JSON schema (an object), not {_show(schema)}")
    _Check(schema, path).run()


def subschemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """(path, schema) of everything directly below one schema, in the order in which it is written."""
    for key, value in schema.items():
        if key in _ONE:
            yield f"{path}.{key}", value
        elif key in _LISTS and isinstance(value, list):
            for n, item in enumerate(value):
                yield f"{path}.{key}[{n}]", item
        elif key in _TABLES and isinstance(value, Mapping):
            for name, item in value.items():
                yield f"{path}.{key}.{name}", item


class _Check:
    def __init__(self, root: Mapping[str, Any], path: str) -> None:
        self._root = root
        self._path = path
        self._num_schemas = 0
        self._num_values = 0
        self._edges: dict[int, list[int]] = {}
        """Which schemas say of the same value: a loop among them says nothing."""

    def run(self) -> None:
        self._schema(self._root, self._path, 0)

    def _schema(self, schema: Any, path: str, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            _refuse(path, f"must be a JSON schema (an object, true or false), not {_show(schema)}")
        if depth > MAX_DEPTH:
            _refuse(path, f"lies deeper than {MAX_DEPTH} levels")
        self._num_schemas += 1
        if self._num_schemas > MAX_SUBSCHEMAS:
            _refuse(path, f"the schema has more than {MAX_SUBSCHEMAS} schemas in it")
        for key, value in schema.items():
            self._keyword(schema, key, value, f"{path}.{key}")
        if "$ref" in schema:
            self._loops(schema, f"{path}.$ref")
        for below, item in subschemas(schema, path):
            self._schema(item, below, depth + 1)

    def _keyword(self, schema: Mapping[str, Any], key: str, value: Any, path: str) -> None:
        if key in ANNOTATIONS:
            if key == "$id" and schema is not self._root:
                _refuse(path, "is only taken at the top of a schema")
        elif key not in SUPPORTED:
            _refuse(path, f"the keyword {_show(key)} is not supported" + (f"; {_HINTS[key]}" if key in _HINTS else ""))
        elif key in _COUNTS:
            if not _whole(value) or not 0 <= value <= MAX_COUNT:
                _refuse(path, f"is {_show(value)}; whole numbers from 0 to {MAX_COUNT} are possible")
        elif key in _NUMBERS:
            _number(key, value, path)
        elif key in _LISTS:
            if not isinstance(value, list) or not value:
                _refuse(path, f"must be a list of at least one schema, not {_show(value)}")
        elif key in _TABLES:
            if not isinstance(value, Mapping):
                _refuse(path, f"must be an object of schemas, not {_show(value)}")
            if len(value) > MAX_PROPERTIES:
                _refuse(path, f"has {len(value)} entries; at most {MAX_PROPERTIES} are possible")
            if key == "patternProperties":
                for pattern in value:
                    _pattern(pattern, f"{path}.{pattern}")
        elif key == "items" and isinstance(value, list):
            _refuse(path, "is a list; write prefixItems (and items for what follows)")
        elif key == "pattern":
            _pattern(value, path)
        elif key == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                _refuse(path, f"is {_show(value)}; references have the form #/$defs/name, and nothing is ever fetched")
            self._target(value, path)
        elif key not in _ONE:
            self._plain(key, value, path)

    def _plain(self, key: str, value: Any, path: str) -> None:
        if key == "type":
            listed = value if isinstance(value, list) else [value]
            if not listed or not all(isinstance(t, str) and t in TYPES for t in listed):
                _refuse(path, f"is {_show(value)}; the types are {', '.join(TYPES)}, or a list of them")
        elif key == "enum":
            if not isinstance(value, list) or not value:
                _refuse(path, f"must be a list of at least one value, not {_show(value)}")
            self._num_values += len(value)
            if self._num_values > MAX_ENUM:
                _refuse(path, f"the schema has {self._num_values} enum values or more; at most {MAX_ENUM} are possible")
        elif key == "format":
            if value not in FORMATS:
                _refuse(path, f"the format {_show(value)} is not supported; {_HINTS['format']}")
        elif key == "required" and (
            not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(value) > MAX_ENUM
        ):
            _refuse(path, f"must be a list of property names, not {_show(value)}")

    def _target(self, ref: str, path: str) -> Any:
        """The schema a reference names. Raises: InputError if there is none."""
        found: Any = self._root
        for part in ref.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                _refuse(path, f"{_show(ref)} names nothing in this schema")
        if not isinstance(found, Mapping | bool):
            _refuse(path, f"{_show(ref)} is not a schema")
        return found

    def _loops(self, schema: Mapping[str, Any], path: str) -> None:
        """Follow what is said of the same value. Raises: InputError if that leads back to `schema`."""
        todo: list[Any] = [schema]
        seen: set[int] = set()
        while todo:
            at = todo.pop()
            if not isinstance(at, Mapping):
                continue
            near: list[Any] = [item for key in _LISTS[:3] if isinstance(at.get(key), list) for item in at[key]]
            if isinstance(at.get("$ref"), str) and at["$ref"][:1] == "#":
                near.append(self._target(at["$ref"], path))
            for item in near:
                if item is schema:
                    _refuse(path, "the reference leads back to itself, so it says nothing")
                if id(item) not in seen:
                    seen.add(id(item))
                    todo.append(item)


def _pattern(value: Any, path: str) -> None:
    if not isinstance(value, str) or len(value) > MAX_PATTERN_CHARS:
        _refuse(path, f"must be a regular expression of at most {MAX_PATTERN_CHARS} characters")
    check_repeats(regex_repeats(value), MAX_REGEX_REPEATS, path)


def _number(key: str, value: Any, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(path, f"must be a number, not {_show(value)}")
    if key == "multipleOf" and value <= 0:
        _refuse(path, f"is {_show(value)}; it must be above 0")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False) if len(repr(value)[:200]) < 200 else repr(value)[:60]
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(path: str, why: str) -> NoReturn:
    short = path if len(path) <= 200 else path[:197] + "..."
    raise InputError(f"{short}: {why}", param=short)


Compile = Callable[[str], str | None]


def locate(schema: Any, path: str, fails: Callable[[Any], str | None]) -> str:
    """The path of the smallest part that `fails` on its own for the same reason as the whole (`fails` returns it)."""
    reason, found = fails(schema), path
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, Mapping) and key in schema}
    while isinstance(schema, Mapping):
        for below, item in subschemas(schema, found):
            if isinstance(item, Mapping) and fails({**shared, **item}) == reason:
                schema, found = item, below
                break
        else:
            break
    return found
