"""References in JSON schemas mean what they mean in their own document, wherever that document is put."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.server.parsing.tools import bound_schemas, calls_schema
from penstock.text.grammar.schema import compiled_form, json_schema_check
from penstock.text.grammar.source import grammar_of
from tests.unit.text.grammar_walk import fresh_cache, walk

CACHE = fresh_cache()
COLOUR = {"L": {"enum": ["red", "blue"]}}
KEYWORDS = [
    "default", "enum", "const", "examples", "properties", "required", "$defs", "definitions", "items", "type", "$ref",
    "$id", "$anchor", "allOf", "anyOf", "not", "if", "additionalProperties", "patternProperties", "title",
    "description", "x-guidance", "$comment", "$schema", "nullable", "format", "components",
]  # fmt: skip


def values(schema: Any, num: int = 8) -> list[Any]:
    grammar = grammar_of(StructuredOutputs(json=schema))
    CACHE.check(grammar)
    outs = [walk(grammar, seed, CACHE) for seed in range(num)]
    return [json.loads(out) for out in outs if out is not None]


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": {**schema, **more}}}


def calls(tools: list[dict[str, Any]], num: int = 12) -> list[tuple[str, Any]]:
    names = [one["function"]["name"] for one in tools]
    found = values(calls_schema(bound_schemas(tools, names), parallel=False), num)
    return [(call["name"], call["arguments"]) for [call] in found]


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_parameter_may_have_the_name_of_a_keyword(name: str) -> None:
    """Also beside another tool that is named as a definition is."""
    tools = [tool("f", {name: {"$ref": "#/$defs/L"}}, **{"$defs": COLOUR}), tool("L", {"secret": {"const": 42}})]
    found = calls(tools)
    assert {one for one, _ in found} == {"f", "L"}
    for one, arguments in found:
        assert arguments in ([{name: "red"}, {name: "blue"}] if one == "f" else [{"secret": 42}])
    assert all(set(value) == {name} for value in values(tool("f", {name: {"type": "null"}})["function"]["parameters"]))


def test_data_that_looks_like_a_schema_stays_data() -> None:
    data = {"$ref": "#/$defs/L", "$id": "x", "properties": {"a": {"$ref": "#/nowhere"}}}
    schema = {"a": {"const": data}, "b": {"enum": [data]}, "c": {"type": "null", "default": data, "examples": [data]}}
    assert calls([tool("f", schema)], 4) == [("f", {"a": data, "b": data, "c": None})] * 4


REFERENCES: dict[str, dict[str, Any]] = {
    "a definition": {"$ref": "#/$defs/a", "$defs": {"a": {"const": 7}}},
    "an older definition": {"$ref": "#/definitions/a", "definitions": {"a": {"const": 7}}},
    "OpenAPI": {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"const": 7}}}},
    "a property": {"$ref": "#/properties/a", "type": "integer", "properties": {"a": {"const": 7}}},
    "an item of a list": {"$ref": "#/$defs/a/anyOf/1", "$defs": {"a": {"anyOf": [{"const": 6}, {"const": 7}]}}},
    "a space": {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"const": 7}}},
    "a space as it is": {"$ref": "#/$defs/a b", "$defs": {"a b": {"const": 7}}},
    "a tilde, encoded": {"$ref": "#/$defs/a%7E0b", "$defs": {"a~b": {"const": 7}, "a~0b": {"const": 8}}},
    "a slash": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 7}}},
    "a tilde before a one": {"$ref": "#/$defs/a~01", "$defs": {"a~1": {"const": 7}, "a/": {"const": 8}}},
    "brackets": {"$ref": "#/$defs/Response[Item]", "$defs": {"Response[Item]": {"const": 7}}},
    "brackets, encoded": {"$ref": "#/$defs/Response%5BItem%5D", "$defs": {"Response[Item]": {"const": 7}}},
    "a per cent sign": {"$ref": "#/$defs/100%25", "$defs": {"100%": {"const": 7}}},
    "a per cent sign as it is": {"$ref": "#/$defs/a%20b", "$defs": {"a%20b": {"const": 7}}},
    "an empty name": {"$ref": "#/$defs/", "$defs": {"": {"const": 7}}},
    "not English": {"$ref": "#/$defs/gr%C3%B6%C3%9Fe", "$defs": {"größe": {"const": 7}}},
    "names of keywords": {"$ref": "#/$defs/properties", "$defs": {"properties": {"$ref": "#/$defs/enum"},
                                                                  "enum": {"const": 7}}},
    "below another": {"$ref": "#/$defs/a/$defs/b", "$defs": {"a": {"$defs": {"b": {"const": 7}}}}},
    "an anchor": {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 7}}},
    "an anchor of draft 7": {"$ref": "#here", "definitions": {"a": {"$id": "#here", "const": 7}}},
    "its own address": {"$id": "https://a.example/s.json", "$ref": "https://a.example/s.json#/$defs/a",
                        "$defs": {"a": {"const": 7}}},
    "its own address, relative": {"$id": "https://a.example/s.json", "$ref": "s.json#/$defs/a",
                                  "$defs": {"a": {"const": 7}}},
    "an address within": {"$id": "https://a.example/s.json", "$ref": "b/t.json",
                          "$defs": {"a": {"$id": "https://a.example/b/t.json", "$ref": "#/$defs/c",
                                          "$defs": {"c": {"const": 7}}}, "c": {"const": 8}}},
    "an anchor within": {"$ref": "t.json#x", "$defs": {
        "a": {"$id": "t.json", "$defs": {"c": {"$anchor": "x", "const": 7}}}, "c": {"$anchor": "x", "const": 8}}},
    "a folder as an address": {"$id": "x/", "$ref": "#/$defs/a",
                               "$defs": {"a": {"$id": "y/", "$ref": "z", "$defs": {"b": {"$id": "z", "const": 7}}}}},
}  # fmt: skip


TABLES = ("$defs", "definitions", "components")


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_found(name: str) -> None:
    """At the top of a document, and in that of a tool beside others with equal addresses and names."""
    schema = REFERENCES[name]
    assert values(schema, 3) == [7] * 3
    wrong = json.loads(json.dumps(schema).replace("7", "9"))
    if "$id" not in schema and schema["$ref"][:7] != "#/prope":
        tools = [
            tool(f"f{n}", {"v": {"$ref": schema["$ref"]}}, **{key: one[key] for key in TABLES if key in one})
            for n, one in enumerate((wrong, schema, wrong))
        ]
        found = {(name, arguments["v"]) for name, arguments in calls(tools, 30)}
        assert found == {("f0", 9), ("f1", 7), ("f2", 9)}


def test_tools_with_one_address() -> None:
    more: dict[str, Any] = {"$id": "https://a.example/tool.json"}
    tools = [
        tool("f", {"v": {"$ref": "#/$defs/x"}}, **more, **{"$defs": {"x": {"const": 1}}}),
        tool("g", {"v": {"$ref": "tool.json#/$defs/x"}}, **more, **{"$defs": {"x": {"const": 2}}}),
    ]
    assert {(name, arguments["v"]) for name, arguments in calls(tools)} == {("f", 1), ("g", 2)}


def test_recursion_stays_within_a_tool() -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
            "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "tree", "parameters": tree}}, tool("other", {"x": {"const": 1}})]

    def is_tree(value: Any) -> bool:
        return set(value) <= {"kids"} and all(map(is_tree, value.get("kids", [])))

    found = calls(tools, 40)
    assert any(arguments.get("kids") for _, arguments in found)
    assert all(is_tree(arguments) if name == "tree" else arguments == {"x": 1} for name, arguments in found)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#/$defs/x"}, "s.$ref"),
        ({"$ref": "#nobody"}, "s.$ref"),
        ({"$ref": "other.json"}, "s.$ref"),
        ({"$ref": "#/$defs/x", "$defs": {"x": 5}}, "s.$ref"),
        ({"$ref": "#/enum/0", "enum": ["x"]}, "s.$ref"),
        ({"$ref": 5}, "s.$ref"),
        ({"$ref": "http://[", "$id": "http://["}, "s.$ref"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"items": {"$ref": "file:///etc/passwd"}}}}, "s.$defs.x.items.$ref"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"minLength": -1}}}, "s.$defs.x.minLength"),
        ({"anyOf": [{"$ref": "#"}]}, "s.anyOf[0].$ref"),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"allOf": [{"$ref": "#/$defs/y"}]}, "y": {"$ref": "#/$defs/x"}}},
            "s.$defs.y.$ref",
        ),
    ],
)
def test_references_that_are_refused(schema: Any, place: str) -> None:
    with pytest.raises(InputError) as caught:
        json_schema_check(schema, "s")
    assert caught.value.param == place


def test_definitions_that_nobody_names_say_nothing() -> None:
    """OpenAPI documents bring many."""
    assert values({"const": 7, "$defs": {"a": {"uniqueItems": True}, "b": {"$ref": "other.json"}}}, 2) == [7, 7]


def test_what_compiling_finds_is_told_in_the_clients_words() -> None:
    schema = {"items": {"$ref": "#/$defs/a%20b"}, "$defs": {"a b": {"properties": {"c": {"pattern": "(?=x)"}}}}}
    with pytest.raises(InputError) as caught:
        CACHE.check(grammar_of(StructuredOutputs(json=schema)), "structured_outputs.json")
    assert caught.value.param == "structured_outputs.json.$defs.a b.properties.c"
    tools = [tool("g", {}), tool("f", {"c": {"type": "string", "pattern": "(?=x)"}})]
    tools[1]["function"]["strict"] = True
    bound = calls_schema(bound_schemas(tools, ["g", "f"]), parallel=True)
    with pytest.raises(InputError) as caught:
        CACHE.check(grammar_of(StructuredOutputs(json=bound)), "structured_outputs.json")
    assert caught.value.param == "tools[1].function.parameters.properties.c"


def test_a_schema_that_refers_to_itself_often_stays_small() -> None:
    defs = {f"d{n}": {"properties": {f"p{k}": {"$ref": f"#/$defs/d{k}"} for k in range(40)}} for n in range(40)}
    form = compiled_form({"$ref": "#/$defs/d0", "$defs": defs}, "s")
    assert len(form["$defs"]) == 40
    assert len(json.dumps(form)) < 100_000
