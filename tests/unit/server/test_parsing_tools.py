"""Tools and tool_choice of hostile and mistaken clients: each refusal names the path of what has to change."""

from __future__ import annotations

import json

import pytest

from penstock.base.errors import InputError
from penstock.server.parsing import check_tools
from penstock.server.parsing.kinds import ALL, json_of, parameter_kinds


def tool(name="f", **more):
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(("tools", "param"), [
    ("x", "tools"), ([1], "tools[0]"), ([{"type": "web_search"}], "tools[0].type"),
    ([{"type": "function"}], "tools[0].function"), ([tool(None)], "tools[0].function.name"),
    ([tool("")], "tools[0].function.name"), ([tool("a b")], "tools[0].function.name"),
    ([tool("ü")], "tools[0].function.name"), ([tool("a\n")], "tools[0].function.name"),
    ([tool("x" * 65)], "tools[0].function.name"), ([tool("x" * (1 << 20))], "tools[0].function.name"),
    ([tool(), tool("g"), tool()], "tools[2].function.name"),
    ([tool(str(n)) for n in range(129)], "tools"), ([tool(str(n)) for n in range(1000)], "tools"),
    ([tool(), tool("g", description=1)], "tools[1].function.description"),
    ([tool(strict="yes")], "tools[0].function.strict"), ([tool(parameters=[])], "tools[0].function.parameters"),
    ([tool(parameters="{}")], "tools[0].function.parameters"),
    ([tool(parameters={"type": "string"})], "tools[0].function.parameters.type"),
    ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
    ([tool(parameters={"properties": {"a": 1}})], "tools[0].function.parameters.properties.a"),
    ([tool(description="x" * (1 << 18))], "tools[0].function"),
    ([tool(str(n), description="x" * (1 << 16)) for n in range(20)], "tools"),
])  # fmt: skip
def test_bad_tools_are_refused(tools, param):
    with pytest.raises(InputError) as caught:
        check_tools(tools)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


def test_deep_and_wide_schemas_are_refused():
    deep: dict = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InputError, match=r"tools\[0\]"):
        check_tools([tool(parameters=deep)])


@pytest.mark.parametrize("choice", [
    "maybe", 3, [], {}, {"type": "function"}, {"type": "function", "function": {"name": "h"}},
    {"type": "function", "function": 3}, {"type": "allowed_tools"}, {"type": "function", "name": "x" * (1 << 20)},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "h"}]}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
])  # fmt: skip
def test_bad_choices_are_refused(choice):
    with pytest.raises(InputError) as caught:
        check_tools([tool(), tool("g")], choice)
    assert caught.value.param == "tool_choice"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_without_tools_is_refused(choice):
    with pytest.raises(InputError) as caught:
        check_tools(None, choice)
    assert caught.value.param == "tool_choice"


def test_good_tools_pass():
    assert check_tools(None) == check_tools([], "auto") == check_tools(None, "none") == []
    given = [tool("a-B_9", description=None, strict=True, parameters={"type": "object", "properties": {"a": True}})]
    told = check_tools(given, {"type": "function", "name": "a-B_9"})
    assert told == [tool("a-B_9", strict=True, parameters={"type": "object", "properties": {"a": True}})]
    assert check_tools([tool(str(n)) for n in range(128)])


@pytest.mark.parametrize(("schema", "kinds"), [
    ({"type": "string"}, {"string"}), ({"type": ["string", "null"]}, {"string", "null"}), ({}, ALL), (True, ALL),
    ({"type": "string", "nullable": True}, {"string", "null"}), ({"enum": ["a", 1]}, {"string", "integer"}),
    ({"const": 1.5}, {"number"}), ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
    ({"$ref": "#/$defs/n"}, {"integer"}), ({"$ref": "#/$defs/loop"}, ALL), ({"$ref": "http://x"}, ALL),
    ({"$ref": "#/$defs/a%20b~1"}, {"null"}), ({"$ref": "x.json#/$defs/n"}, {"integer"}),
    ({"$ref": "#/$defs/none"}, ALL), ({"type": 3}, ALL), ({"type": "any"}, ALL), ({"oneOf": []}, ALL),
])  # fmt: skip
def test_kinds_of_parameters(schema, kinds):
    definitions = {"n": {"type": "integer"}, "a b/": {"type": "null"}, "loop": {"$ref": "#/$defs/loop"}}
    assert parameter_kinds({"$id": "x.json", "properties": {"a": schema}, "$defs": definitions}, "a") == kinds


def test_kinds_of_nonsense():
    for nonsense in (None, 3, {"properties": 3}, {"properties": {"a": 3}}):
        assert parameter_kinds(nonsense, "a") == ALL


@pytest.mark.parametrize(("text", "kinds", "value"), [
    (" 3 ", {"integer"}, 3), ("3.0", {"integer"}, 3.0), ("3", {"number"}, 3), ("3.5", {"integer"}, 3.5),
    ("True", {"boolean"}, True), ("None", {"null", "string"}, None), ("None", {"string"}, "None"),
    ("[1, {}]", {"array"}, [1, {}]), ("[1", {"array"}, "[1"), ("x", {"integer"}, "x"), ("3", {"string", "null"}, "3"),
    ('"x"', ALL, '"x"'), ("3", ALL, 3), (" x ", ALL, " x "), ("NaN", ALL, "NaN"), ("Infinity", {"number"}, "Infinity"),
    ('"x"', {"string"}, '"x"'), ("", {"integer"}, ""), ("[" * 9999, ALL, "[" * 9999), ("9" * 5000, ALL, "9" * 5000),
])  # fmt: skip
def test_parameters_become_json(text, kinds, value):
    assert json.loads(json_of(text, frozenset(kinds))) == value
