"""Words of JSON Schema: which are enforced, which only describe, which are refused; and what values they take.

llguidance refuses some keywords it does not implement and passes over words it does not know, so this table is the
complete list. What is enforced here in terms of other keywords is rewritten by `schema`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NoReturn

from penstock.base.errors import InputError
from penstock.text.grammar.nesting import MAX_REGEX_REPEATS, check_repeats, regex_repeats

MAX_COUNT = 1_000_000
"""Largest minItems, maxItems, minLength, maxLength, minProperties and maxProperties."""
MAX_PATTERN_CHARS = 4_096
MAX_PROPERTIES = 2_000
"""Of one object; compiling takes time with their square."""
EXACT = 1 << 53
"""llguidance holds numbers as doubles, in which larger integers become others."""

EVEN = 92 * 10**17
"""Near the end of 64 bits, and the same in a double's shortest digits."""
_IRREGULAR = re.compile(r"\(\?<?[=!]|\\[1-9k]")

TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Of texts, that llguidance enforces."""
INTEGER_FORMATS = {
    **{f"int{n}": (-(1 << (n - 1)), (1 << (n - 1)) - 1) for n in (8, 16, 32)},
    **{f"uint{n}": (0, (1 << n) - 1) for n in (8, 16, 32)},
    # The library's bounds are doubles that it cuts to 64 bits: the largest one exactly, the least within 1,024.
    "int64": (-(1 << 63) + 1024, (1 << 63) - 1),
    "uint64": (0, (1 << 63) - 1),
}
"""Of numbers (OpenAPI's registry of formats): the smallest and largest. Any other format only describes."""

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
    "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema",
    "discriminator", "example", "xml", "externalDocs",  # of OpenAPI
})  # fmt: skip
"""These only describe, as every word does that begins with x-."""
NAMES = frozenset({"$id", "$anchor", "$dynamicAnchor", "$defs", "definitions", "components"})
"""These give schemas names, for references."""

ONE = ("additionalProperties", "items")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
TABLES = ("properties", "patternProperties")
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COMPILED = frozenset({*ONE, *LISTS, *TABLES, *COUNTS, *NUMBERS,
                      "type", "enum", "const", "required", "pattern", "format", "$ref"})  # fmt: skip
"""llguidance enforces these."""
REWRITTEN = frozenset({
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames",
    "additionalItems", "nullable", "unevaluatedProperties", "uniqueItems", "contains", "minContains", "maxContains",
})  # fmt: skip
"""These are said in terms of `COMPILED`, where that is possible."""
SUPPORTED = COMPILED | REWRITTEN

_ALSO_ONE = ("not", "if", "then", "else", "propertyNames", "additionalItems", "unevaluatedProperties",
             "unevaluatedItems", "contains", "contentSchema")  # fmt: skip
_ALSO_TABLES = ("$defs", "definitions", "dependentSchemas", "dependencies")
HINTS = {
    "x-guidance": "options of the grammar library cannot be set by requests",
    "format": f"known formats: {', '.join(FORMATS)}",
    "$dynamicRef": "write $ref",
    "$recursiveRef": "write $ref",
    "not": "what it forbids cannot be said as what is allowed; write enum, anyOf or bounds instead",
    "if": "what it asks cannot be denied in a grammar; write anyOf instead",
    "uniqueItems": "a grammar does not remember earlier items; leave it out, or write maxItems 1",
    "contains": "a grammar does not look for items; write prefixItems",
    "propertyNames": "it is possible where names are bound by enum, const, pattern, minLength or maxLength only, and "
    "there are no patternProperties, and properties only with enum or const",
    "unevaluatedProperties": "write additionalProperties, without allOf, anyOf, oneOf, if or $ref beside it",
}


def subschemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """(path, schema) of everything directly below one schema, in the order in which it is written.

    Goes where keywords hold schemas, and nowhere else: names of properties are names, and values are data.
    """
    for key, value in schema.items():
        if key in ONE or key in _ALSO_ONE:
            if isinstance(value, list):  # items, before 2020
                for n, item in enumerate(value):
                    yield f"{path}.{key}[{n}]", item
            else:
                yield f"{path}.{key}", value
        elif key in LISTS and isinstance(value, list):
            for n, item in enumerate(value):
                yield f"{path}.{key}[{n}]", item
        elif (key in TABLES or key in _ALSO_TABLES) and isinstance(value, Mapping):
            for name, item in value.items():
                yield f"{path}.{key}.{name}", item
        elif key == "components" and isinstance(value, Mapping) and isinstance(value.get("schemas"), Mapping):
            for name, item in value["schemas"].items():
                yield f"{path}.{key}.schemas.{name}", item


def count(value: Any, path: str) -> int:
    """A value of `COUNTS`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        refuse(path, f"is {show(value)}; whole numbers from 0 to {MAX_COUNT} are possible")
    return value


def number(key: str, value: Any, path: str) -> int | float:
    """A value of `NUMBERS`; whole ones as int."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        refuse(path, f"must be a number, not {show(value)}")
    if key == "multipleOf":
        if value <= 0:
            refuse(path, f"is {show(value)}; it must be above 0")
        _factor(value, path)
    return int(value) if isinstance(value, float) and value.is_integer() and value else value


def _factor(value: int | float, path: str) -> None:
    """The library takes a 32-bit integer and a power of ten, and finds them by multiplying a double."""
    whole, exponent = float(min(value, EXACT)), 0
    while whole % 1 and exponent < 32:
        whole, exponent = whole * 10, exponent + 1
    if whole % 1 or whole >= 1 << 32 or Fraction(int(whole), 10**exponent) != Fraction(str(value)):
        refuse(path, f"is {show(value)}; at most nine digits are possible, and only numbers that a double holds")


def pattern(value: Any, path: str, *, lenient: bool = False) -> None:
    """`lenient`: refuse here what only compiling would find to be no regular expression."""
    if not isinstance(value, str) or len(value) > MAX_PATTERN_CHARS:
        refuse(path, f"must be a regular expression of at most {MAX_PATTERN_CHARS} characters")
    check_repeats(regex_repeats(value), MAX_REGEX_REPEATS, path)
    if lenient and _IRREGULAR.search(value.replace("\\\\", "")):
        refuse(path, "look-around and back-references cannot be enforced")


def names(value: Any, path: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(value) > 10_000:
        refuse(path, f"must be a list of property names, not {show(value)}")


def show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False) if len(repr(value)[:200]) < 200 else repr(value)[:60]
    return text if len(text) <= 60 else text[:57] + "..."


def refuse(path: str, why: str) -> NoReturn:
    short = path if len(path) <= 200 else path[:197] + "..."
    raise InputError(f"{short}: {why}", param=short)
