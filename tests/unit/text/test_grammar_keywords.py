"""Keywords of JSON Schema: the table in docs/concepts is true, and tools of others stay usable."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.server.parsing.tools import bound_schemas, calls_schema
from penstock.text.grammar.keywords import ANNOTATIONS, FORMATS, INTEGER_FORMATS, NAMES, SUPPORTED
from penstock.text.grammar.schema import compiled_form
from penstock.text.grammar.source import grammar_of
from tests.speed import cpu_within
from tests.unit.text.grammar_walk import conforms, fresh_cache, walk

CACHE = fresh_cache()
PAGE = Path(__file__).parents[3] / "docs/concepts/structured-output.md"
VALUES: dict[str, Any] = {
    "type": "string", "enum": [1], "const": 1, "properties": {"a": False}, "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"a": False}, "items": False, "prefixItems": [False], "pattern": "a", "allOf": [False],
    "anyOf": [False], "oneOf": [False], "$ref": "#/$defs/a", "format": "uuid", "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": False}, "dependencies": {"a": ["b"]}, "not": {"type": "string"}, "if": {"type": "string"},
    "propertyNames": {"pattern": "a"}, "unevaluatedProperties": False,
}  # fmt: skip
BESIDE: dict[str, Any] = {
    "additionalItems": {"items": [True]}, "if": {"then": False}, "nullable": {"type": "string"},
    "$ref": {"$defs": {"a": {"type": "null"}}},
}  # fmt: skip
CANNOT = {
    "not": {"pattern": "a"}, "if": {"pattern": "a"}, "propertyNames": {"format": "uuid"}, "uniqueItems": True,
    "contains": {}, "unevaluatedProperties": False,
}  # fmt: skip


def table() -> dict[str, list[str]]:
    rows = re.findall(r"(?m)^\| (enforced where|enforced|refused|ignored|names)[^|]*\| (.*) \|$", PAGE.read_text())
    return {kind: re.findall(r"`([^`]+)`", words) for kind, words in rows}


def test_the_table_is_complete() -> None:
    rows = table()
    parts = {"then", "else", "minContains", "maxContains"}  # of if and contains
    assert set(rows["enforced"]) | set(rows["enforced where"]) == SUPPORTED - parts
    assert set(rows["ignored"]) == ANNOTATIONS | {"x-anything"}
    assert set(rows["names"]) == NAMES
    said = re.findall(r"`([^`]+)`", PAGE.read_text().split("Formats of texts")[1].split("Any other")[0])
    assert set(said) == {*FORMATS, *INTEGER_FORMATS}


@pytest.mark.parametrize("word", table()["enforced"])
def test_enforced(word: str) -> None:
    value = VALUES.get(word, True if word == "nullable" else False if word == "additionalItems" else 1)
    beside = BESIDE.get(word, {})
    with_it, without = compiled_form({**beside, word: value}, "s"), compiled_form(beside, "s")
    assert with_it != without


@pytest.mark.parametrize("word", table()["enforced where"])
def test_enforced_or_refused(word: str) -> None:
    if word in VALUES:
        beside = BESIDE.get(word, {})
        assert compiled_form({**beside, word: VALUES[word]}, "s") != compiled_form(beside, "s")
    beside = {"then": False, "allOf": [True]}
    with pytest.raises(InputError) as caught:
        compiled_form({**beside, word: CANNOT[word]}, "s")
    assert caught.value.param == f"s.{word}"


@pytest.mark.parametrize("word", [*table()["refused"], "foo", "id2", "$recursiveAnchor"])
def test_refused(word: str) -> None:
    with pytest.raises(InputError) as caught:
        compiled_form({"items": {word: {}}}, "s")
    assert caught.value.param == f"s.items.{word}"


@pytest.mark.parametrize("word", [*table()["ignored"], *table()["names"]])
@pytest.mark.parametrize("value", ["x", 10**40, {"$ref": "nowhere"}, [None]])
def test_ignored(word: str, value: Any) -> None:
    assert compiled_form({"type": "string", word: value}, "s") == {"type": "string"}


def test_what_has_no_effect_is_taken() -> None:
    for beside in ({"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}, {"contains": {}, "minContains": 0},
                   {"if": {"pattern": "a"}}, {"additionalItems": False}, {"nullable": True}, {"nullable": False},
                   {"unevaluatedProperties": True}, {"minContains": 2}, {"exclusiveMinimum": False}):  # fmt: skip
        form = compiled_form(beside, "s")
        assert form in ({}, {"maxItems": 1}, {"additionalProperties": True}), beside


MCP: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False,
    "properties": {
        "ids": {"type": "array", "items": {"type": "integer", "format": "int64"}, "uniqueItems": True, "maxItems": 2},
        "mode": {"type": "string", "enum": ["a", "b"], "default": "a", "x-order": 1},
        "who": {"type": "string", "required": True, "pattern": "^(?!-)[a-z]*$", "maxLength": 4},
        "what": {"oneOf": [{"type": "string", "maxLength": 2}, {"maxLength": 1, "type": "string"}]},
        "old": {"type": "any"}, "far": {"$ref": "https://example.com/x.json"}, "odd": {"foo": 1, "minLength": -1},
        "not": {"not": {"pattern": "a"}, "type": "boolean"}, "list": {"type": "array", "contains": {"const": 1}},
    },
    "required": ["ids", "mode", "who", "what"],
}  # fmt: skip


def test_tools_of_others_stay_usable() -> None:
    """What can be enforced is; the same is refused where a tool is strict, with its path."""
    tool = {"type": "function", "function": {"name": "f", "parameters": MCP}}
    grammar = grammar_of(StructuredOutputs(json=calls_schema(bound_schemas([tool], ["f"]), parallel=False)))
    CACHE.check(grammar)
    outs = [walk(grammar, seed, CACHE, most=900) for seed in range(20)]
    found = [json.loads(out)[0]["arguments"] for out in outs if out is not None]
    assert len(found) > 3
    kept = {key: MCP["properties"][key] for key in ("mode",)}
    for value in found:
        assert set(MCP["required"]) <= set(value) <= set(MCP["properties"])
        assert conforms(value, {"properties": {**kept, "ids": {"maxItems": 2, "items": {"type": "integer"}}}}, {})
        assert len(value["who"]) <= 4
        assert len(value["what"]) <= 2
    for name, place in {"ids": "ids.uniqueItems", "who": "who.required", "old": "old.type", "far": "far.$ref",
                        "not": "not.not", "list": "list.contains"}.items():  # fmt: skip
        one = {"type": "object", "properties": {name: MCP["properties"][name]}}
        strict = {"type": "function", "function": {"name": "f", "parameters": one, "strict": True}}
        with pytest.raises(InputError) as caught:
            bound_schemas([strict], ["f"])
        assert caught.value.param == f"tools[0].function.parameters.properties.{place}"


def many(count: int) -> dict[str, Any]:
    return {f"a{n}": {"const": n} for n in range(count)}


HARD: dict[str, Any] = {
    "an enum of 10,001": {"enum": list(range(10_001))},
    "allOf of anyOf": {"allOf": [{"anyOf": [{"properties": {f"a{n}": {"const": k}}, "required": [f"a{n}"],
                                             "type": "object"} for k in (0, 1)]} for n in range(20)]},
    "many that depend": {"type": "object", "dependentRequired": {f"a{n}": [f"b{n}"] for n in range(20)}},
    "many conditions": {"type": "object", "allOf": [{"if": {"properties": {"k": {"const": n}}, "required": ["k"]},
                                                     "then": {"required": [f"a{n}"]}} for n in range(12)]},
    "a long way to deny": {"not": {"$ref": "#/$defs/d0"}, "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"}
                                                                    for n in range(1_900)}},
    "many ways to deny": {"not": {"$ref": "#/$defs/d0"}, "$defs": {
        "d15": {"type": "null"}, **{f"d{n}": {"properties": {f"p{k}": {"$ref": f"#/$defs/d{n + 1}"} for k in range(10)}}
                                    for n in range(15)}}},
    "names of a loop": {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "large numbers everywhere": {"properties": {f"p{n}": {"const": 2**60 + 1} for n in range(400)}},
    "a pattern that excludes a length": {"type": "string", "pattern": "^a{5}$", "maxLength": 2},
    "two patterns": {"type": "string", "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]},
    "lengths": {"type": "string", "minLength": 5, "maxLength": 1},
    "items": {"type": "array", "minItems": 5, "maxItems": 1},
    "bounds": {"type": "integer", "minimum": 5, "maximum": 1},
    "no whole number": {"type": "integer", "minimum": 0.2, "maximum": 0.8},
    "no multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
    "an empty enum": {"enum": []},
    "an enum that a type empties": {"enum": ["a"], "type": "integer"},
    "nothing": {"not": {}},
    "required and false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "required of a reference to false": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}},
                                         "required": ["a"], "$defs": {"n": False}},
    "an object in itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "a list in itself": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"},
                                                              "minItems": 1}}},
    "a list without end": {"const": json.loads("[" * 90 + "]" * 90), "items": {"multipleOf": 5e-324}},
    "a denormal factor": {"multipleOf": 5e-324},
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_what_nothing_satisfies_or_what_is_too_much_is_refused_at_once(name: str) -> None:
    with cpu_within(1), pytest.raises(InputError) as caught:
        CACHE.check(grammar_of(StructuredOutputs(json=HARD[name])), "structured_outputs.json")
    assert str(caught.value.param).startswith("structured_outputs.json")
    assert len(str(caught.value)) < 500


def test_recursion_that_ends_is_taken() -> None:
    for schema in (
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
        {"type": "object", "properties": {"a": {"type": ["object", "null"], "properties": {"b": {"$ref": "#"}},
                                                "required": ["b"]}}, "required": ["a"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"const": 1}]},
                                        "b": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1}}},
    ):  # fmt: skip
        CACHE.check(grammar_of(StructuredOutputs(json=schema)))
