"""Whole numbers of any size stay what they are in a schema, or are refused where they stand."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import pytest

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.text.grammar.numbers import decimals, integers
from penstock.text.grammar.source import grammar_of, portable
from tests.unit.text.grammar_walk import conforms, fresh_cache, walk

CACHE = fresh_cache()
N = 2**53 + 1
"""The first whole number that no double holds."""


def outputs(schema: Any, num: int = 12) -> list[Any]:
    grammar = grammar_of(StructuredOutputs(json=schema))
    CACHE.check(grammar)
    outs = [walk(grammar, seed, CACHE) for seed in range(num)]
    return [json.loads(out) for out in outs if out is not None]


SCHEMAS: dict[str, Any] = {
    "a constant": {"const": 1183472938475029391},
    "more than 64 bits": {"const": 10**30},
    "100 digits": {"type": "integer", "minimum": 10**99, "maximum": 10**99 + 10**50},
    "two neighbours": {"enum": [1183472938475029384, 1183472938475029391, "a", None, 5]},
    "bounds": {"type": "integer", "minimum": N, "maximum": N + 2},
    "bounds below zero": {"type": "integer", "minimum": -(2**70) - 1, "maximum": -(2**70) + 1},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 2**60, "exclusiveMaximum": 2**60 + 2},
    "an older exclusive bound": {"type": "integer", "minimum": N, "exclusiveMinimum": True, "maximum": N + 1},
    "bounds as floats": {"type": "integer", "minimum": 1e20, "maximum": 1e20},
    "without a type": {"minimum": 2**64 - 1, "maximum": 2**64},
    "all of 64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "within lists": {"const": [N, {"a": N + 2}]},
    "an enum and bounds": {"enum": [N, N + 1, N + 2, 3], "minimum": N + 1, "type": "integer"},
    "optional properties": {
        "type": "object", "properties": {"id": {"const": N}, "n": {"maximum": 3}, "o": {"const": 2 * N}},
        "required": ["o"], "additionalProperties": {"type": "boolean"},
    },
    "all optional": {"type": "object", "properties": {f"p{n}": {"const": N + n} for n in range(40)},
                     "additionalProperties": False},
    "other properties": {"type": "object", "properties": {"ab": {"type": "null"}},
                         "additionalProperties": {"const": N}},
    "items": {"type": "array", "prefixItems": [{"const": N}, {}], "items": {"enum": [N + 1]}, "minItems": 1,
              "maxItems": 4},
    "no more items": {"type": "array", "prefixItems": [{"const": N}], "items": False},
    "recursion": {"$ref": "#/$defs/t", "$defs": {"t": {
        "type": "object",
        "properties": {"v": {"const": N}, "next": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}},
        "required": ["v", "next"], "additionalProperties": False}}},
    "beside what says nothing": {"type": "integer", "maximum": 9, "minimum": 5, "default": 10**40, "examples": [N]},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_numbers_stay_what_they_are(name: str) -> None:
    schema = SCHEMAS[name]
    found = outputs(schema)
    assert found
    # The independent reading compares doubles with integers exactly, as Python does.
    assert all(conforms(value, schema, schema) for value in found), found


def test_numbers_with_a_fraction() -> None:
    grammar = grammar_of(StructuredOutputs(json={"type": "number", "minimum": N, "maximum": N + 1}))
    outs = [walk(grammar, seed, CACHE) for seed in range(12)]
    found = [Decimal(out.decode()) for out in outs if out is not None]
    assert found
    assert all(N <= value <= N + 1 for value in found)


def test_both_ends_are_reached() -> None:
    assert set(outputs({"type": "integer", "minimum": N, "maximum": N + 1}, 30)) == {N, N + 1}
    assert set(outputs({"enum": [N, N + 1]}, 30)) == {N, N + 1}


def test_a_schema_as_text_or_within_a_grammar() -> None:
    assert outputs(json.dumps({"const": N}), 2) == [N, N]
    grammar = 'start: "<" %json {"const": ' + str(N) + '} ">" %json {"enum": [' + str(N + 2) + "]}\n"
    out = walk(grammar_of(StructuredOutputs(grammar=grammar)), 1, CACHE)
    assert out == f"<{N}>{N + 2}".encode()


def test_a_schema_travels_as_text() -> None:
    asked = portable(StructuredOutputs(json={"const": 10**30}))
    assert isinstance(asked.json, str)
    assert str(10**30) in asked.json
    with pytest.raises(InputError, match="is not JSON"):
        portable(StructuredOutputs(json={"const": float("inf")}))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"items": {"type": "integer", "minimum": N, "multipleOf": 3}}, "items.multipleOf"),
        ({"items": {"allOf": [{"const": N}, {"type": "integer"}]}}, "items.allOf"),
        ({"oneOf": [{"const": N}, {"const": N + 1}]}, "oneOf"),
        ({"type": "object", "properties": {"a": {"const": N}}, "minProperties": 2}, "minProperties"),
        ({"maxLength": N}, "maxLength"),
        ({"minItems": 2**70}, "minItems"),
        ({"multipleOf": N}, "multipleOf"),
        ({"multipleOf": 10**400}, "multipleOf"),
        ({"type": "integer", "minimum": N, "maximum": N - 1}, None),
        ({"properties": {"a": {"enum": [N], "type": "string"}}, "required": ["a"]}, "properties.a"),
    ],
)
def test_what_cannot_be_exact_is_refused(schema: Any, place: str | None) -> None:
    with pytest.raises(InputError) as caught:
        grammar_of(StructuredOutputs(json=schema))
    assert caught.value.param == "structured_outputs.json" + (f".{place}" if place else "")


def test_ranges_are_exact() -> None:
    """Every number around random bounds, and the bounds of other lengths."""
    rng = random.Random(5)
    for _ in range(300):
        low = rng.choice([None, rng.randrange(-1200, 1200)])
        high = rng.choice([None, rng.randrange(-1200, 1200)])
        whole, parts = "|".join(integers(low, high)), "|".join(decimals(low, high))
        for n in {rng.randrange(-1300, 1300) for _ in range(60)} | {
            low or 0,
            high or 0,
            (low or 0) - 1,
            (high or 0) + 1,
        }:
            inside = (low is None or n >= low) and (high is None or n <= high)
            assert bool(whole and re.fullmatch(whole, str(n))) == inside, (low, high, n, whole)
            if parts and re.fullmatch(parts, f"{n}.5"):
                value = n + (0.5 if n >= 0 else -0.5)
                assert low is None or value >= low
                assert high is None or value <= high
