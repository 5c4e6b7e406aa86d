"""Structured outputs as grammars: what is taken means what it says, what is not is refused where it stands."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.server.parsing.tools import calls_schema, text_or_calls
from penstock.text.grammar.compile import Compiler
from penstock.text.grammar.keywords import ANNOTATIONS, COMPILED, FORMATS, REWRITTEN, subschemas
from penstock.text.grammar.lead import led
from penstock.text.grammar.schema import json_schema_check
from penstock.text.grammar.source import Compiled, grammar_of, lark_grammar, lark_json, lark_literal
from tests.speed import cpu_within
from tests.unit.text.grammar_walk import TOKENS, VOCABULARY, WHOLE, conforms, fresh_cache, walk

CACHE = fresh_cache()

# -- schemas mean what they say -----------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "long name", "x_1"])
PATTERNS = st.sampled_from(["^[ab]{1,3}$", "^a", "b+$", "^(ab|cd)+$", "\\d{2}"])
SCALARS = st.one_of(st.booleans(), st.none(), st.integers(-20, 20), st.sampled_from(["a", "b c", 'q"\\', 1.5]))


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def typed(name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return optional(**fields).map(lambda d: {"type": name, **d})


LARGE_NUMBERS = st.one_of(
    st.integers(2**53 - 2, 2**53 + 9), st.integers(-(2**80), -(2**63)), st.integers(2**63 - 2, 2**64)
)

SMALL, LARGE = st.integers(0, 2), st.integers(2, 4)
LEAVES = st.one_of(
    typed("string", minLength=SMALL, maxLength=LARGE),
    typed("string", pattern=PATTERNS),
    typed("string", format=st.sampled_from(sorted(FORMATS))),
    typed("integer", minimum=st.integers(-5, 5), maximum=st.integers(6, 120), multipleOf=st.sampled_from([2, 5])),
    typed("number", exclusiveMinimum=st.integers(-5, 5), exclusiveMaximum=st.integers(6, 9)),
    typed("number", minimum=st.sampled_from([0, 0.5]), maximum=st.sampled_from([2.25, 1e2])),
    st.builds(lambda c: {"const": c}, SCALARS),
    st.builds(lambda e: {"enum": e}, st.lists(SCALARS, min_size=1, max_size=4)),
    st.builds(lambda e: {"enum": e, "type": ["string", "null"]}, st.just(["a", None, "b"])),
    st.builds(
        lambda t: {"type": t}, st.lists(st.sampled_from(["null", "boolean", "integer"]), min_size=1, unique=True)
    ),
    st.just({"$ref": "#/$defs/shared"}),
    st.just({"type": "string", "minLength": 2, "pattern": "^a*$", "maxLength": 3}),
    st.builds(lambda e: {"enum": e}, st.lists(LARGE_NUMBERS, min_size=1, max_size=3)),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, LARGE_NUMBERS, SMALL),
    st.builds(lambda f: {"type": "integer", "format": f}, st.sampled_from(sorted(WHOLE))),
    st.builds(lambda e: {"not": {"enum": e}}, st.lists(SCALARS, min_size=1, max_size=3)),
    st.builds(lambda low: {"type": "integer", "minimum": low, "exclusiveMinimum": True}, st.integers(-9, 9)),
    st.builds(lambda t: {"type": t, "nullable": True}, st.sampled_from(["integer", "boolean"])),
    st.builds(
        lambda ref: {"$ref": ref}, st.sampled_from(["#/$defs/a%20b~1c", "#/definitions/List[int]", "#/$defs/default"])
    ),
)


def inside(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(NAMES, children, max_size=3)
    return st.one_of(
        typed("array", items=children, minItems=SMALL, maxItems=LARGE),
        typed("array", prefixItems=st.lists(children, min_size=1, max_size=2), items=children, minItems=SMALL),
        typed("object", properties=properties, additionalProperties=st.one_of(st.just(False), children)),
        properties.map(lambda p: {"type": "object", "properties": p, "required": list(p), "maxProperties": len(p)}),
        typed("object", properties=properties, patternProperties=st.dictionaries(PATTERNS, children, max_size=1)),
        typed("object", required=st.lists(NAMES, unique=True, max_size=2), minProperties=SMALL, maxProperties=LARGE),
        st.builds(lambda c: {"anyOf": c}, st.lists(children, min_size=1, max_size=3)),
        st.builds(lambda c: {"oneOf": c}, st.lists(children, min_size=1, max_size=2)),
        st.builds(lambda c: {"allOf": c}, st.lists(children, min_size=1, max_size=2)),
        st.builds(lambda a, b: {**a, **b}, children, children),
        st.builds(
            lambda a, b: {"type": "array", "items": [a], "additionalItems": b, "minItems": 2}, children, children
        ),
        st.builds(lambda a: {"allOf": [{"type": ["integer", "string"]}, {"not": a}]}, children),
        st.builds(
            lambda p, a, b: {
                "type": "object",
                "properties": p,
                "if": {"properties": {"a": a}},
                "then": {"required": ["b"]},
                "else": {"properties": {"b": b}},
            },
            properties,
            children,
            children,
        ),
        typed(
            "object",
            properties=properties,
            dependentRequired=st.just({"a": ["b"]}),
            dependentSchemas=st.fixed_dictionaries({"b": children}),
        ),
        st.builds(
            lambda a: {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": a}, children
        ),
        st.builds(lambda p: {"type": "object", "propertyNames": {"pattern": p}}, PATTERNS),
        st.builds(lambda p: {"type": "object", "properties": p, "unevaluatedProperties": False}, properties),
    )


SCHEMAS = st.recursive(LEAVES, inside, max_leaves=5)
SHARED = {
    "shared": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]},
    "a b/c": {"enum": ["x", 1]},
    "default": {"type": "array", "items": {"$ref": "#/$defs/shared"}, "maxItems": 1},
}
OLDER = {"List[int]": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}}


def test_whatever_is_taken_is_enforced() -> None:
    """Outputs of random schemas conform by an independent reading. What is refused is refused with a path."""
    enforced: set[str] = set()
    checked = 0

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(schema=SCHEMAS, seed=st.integers(0, 2**32))
    def outputs_conform(schema: dict[str, Any], seed: int) -> None:
        nonlocal checked
        schema = {**schema, "$defs": SHARED, "definitions": OLDER}
        grammar = taken(schema)
        out = None if grammar is None else walk(grammar, seed, CACHE)
        if out is not None:
            value = json.loads(out)
            assert conforms(value, schema, schema), f"{out!r} is no instance of {schema}"
            enforced.update(keywords(schema))
            checked += 1

    outputs_conform()
    assert checked > 200
    alike = {"dependencies", "uniqueItems", "contains", "minContains", "maxContains"}
    assert (COMPILED | REWRITTEN) - enforced == alike, "the random schemas do not use every keyword"


def taken(schema: Any) -> str | None:
    try:
        grammar = grammar_of(StructuredOutputs(json=schema))
        CACHE.check(grammar)
    except InputError as error:
        return None if error.param is not None and error.param.startswith("structured_outputs") else str(error)
    return grammar


def keywords(schema: Any) -> set[str]:
    found = set(schema) if isinstance(schema, dict) else set()
    for _, below in subschemas(schema, "") if isinstance(schema, dict) else ():
        found |= keywords(below)
    return found


# -- what is not taken is refused, with its path ------------------------------------------------------------------

J = "structured_outputs.json"
REFUSED: dict[str, tuple[Any, str]] = {
    "loop of references": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, f"{J}.$defs.a.$ref"),
    "loop over anyOf": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        f"{J}.$defs.a.anyOf[0].$ref",
    ),
    "loop to the root": ({"allOf": [{"$ref": "#"}]}, f"{J}.allOf[0].$ref"),
    "external reference": ({"items": {"$ref": "http://127.0.0.1:9/x.json"}}, f"{J}.items.$ref"),
    "file reference": ({"$ref": "file:///etc/passwd"}, f"{J}.$ref"),
    "reference to nothing": ({"$ref": "#/$defs/none"}, f"{J}.$ref"),
    "10,000 properties": ({"properties": {f"p{n}": {} for n in range(10_000)}}, f"{J}.properties"),
    "1,000,000 enum values": ({"properties": {"e": {"enum": list(range(1_000_000))}}}, f"{J}.properties.e.enum"),
    "maxItems 1e9": ({"type": "array", "maxItems": 10**9}, f"{J}.maxItems"),
    "negative count": ({"minLength": -1}, f"{J}.minLength"),
    "count that is true": ({"minItems": True}, f"{J}.minItems"),
    "unknown keyword": ({"properties": {"a": {"type": "string", "foo": 1}}}, f"{J}.properties.a.foo"),
    "not": ({"not": {"pattern": "a"}}, f"{J}.not"),
    "if": ({"anyOf": [{"if": {"format": "uuid"}, "then": False}]}, f"{J}.anyOf[0].if"),
    "uniqueItems": ({"uniqueItems": True}, f"{J}.uniqueItems"),
    "contains": ({"contains": {}}, f"{J}.contains"),
    "propertyNames": ({"propertyNames": {"format": "uuid"}}, f"{J}.propertyNames"),
    "dependentRequired": ({"dependentRequired": {"a": 1}}, f"{J}.dependentRequired.a"),
    "nullable": ({"nullable": 1}, f"{J}.nullable"),
    "unevaluatedProperties": ({"allOf": [{}], "unevaluatedProperties": False}, f"{J}.unevaluatedProperties"),
    "exclusiveMinimum": ({"exclusiveMinimum": "1"}, f"{J}.exclusiveMinimum"),
    "multipleOf": ({"items": {"multipleOf": 2**53 + 1}}, f"{J}.items.multipleOf"),
    "multipleOf of a fraction": ({"multipleOf": 0.07}, f"{J}.multipleOf"),
    "a large number and a factor": (
        {"properties": {"a": {"type": "integer", "minimum": 2**53 + 1, "multipleOf": 3}}},
        f"{J}.properties.a.multipleOf",
    ),
    "an enum that a type empties": (
        {"properties": {"a": {"enum": [2**70], "type": "string"}}, "required": ["a"]},
        f"{J}.properties.a",
    ),
    "required and false": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, J),
    "the library's own options": ({"x-guidance": {"lenient": True}}, f"{J}.x-guidance"),
    "a format that is no text": ({"format": 1}, f"{J}.format"),
    "a dynamic reference": ({"$dynamicRef": "#a"}, f"{J}.$dynamicRef"),
    "unknown type": ({"type": "float"}, f"{J}.type"),
    "bad pattern": ({"properties": {"a": {"items": {"pattern": "[a"}}}}, f"{J}.properties.a.items"),
    "pattern with look-ahead": ({"patternProperties": {"(?=a)": {}}}, J),
    "oneOf that overlaps": ({"items": {"oneOf": [{"type": "string"}, {"maxLength": 1}]}}, f"{J}.items"),
    "a contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, J),
    "deep": (json.loads('{"items":' * 70 + "{}" + "}" * 70), (J + ".items" * 65)[:197] + "..."),
    "not a schema": ([1], J),
    "text that is not JSON": ("{nope", J),
    "nested 100,000 deep": ("[" * 100_000, J),
    "NaN": ({"const": float("nan")}, J),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_that_are_refused(name: str) -> None:
    schema, path = REFUSED[name]
    with cpu_within(5), pytest.raises(InputError) as caught:
        CACHE.check(grammar_of(StructuredOutputs(json=schema)), J)
    param = caught.value.param or ""
    assert param == path, caught.value
    assert str(caught.value).startswith(param[:60])
    assert len(str(caught.value)) < 500


def test_annotations_are_taken_and_change_nothing() -> None:
    schema = {"type": "string", "maxLength": 3, **dict.fromkeys(ANNOTATIONS, "x")}
    out = walk(grammar_of(StructuredOutputs(json=schema)), 1, CACHE)
    assert out is not None
    assert len(json.loads(out)) <= 3
    json_schema_check({"type": "string", "format": "binary", "x-order": 1}, "s")


def test_exactly_one_kind() -> None:
    for asked in (StructuredOutputs(), StructuredOutputs(regex="a", json={}), StructuredOutputs(json_object=False)):
        with pytest.raises(InputError, match="exactly one of"):
            grammar_of(asked)
    with pytest.raises(InputError, match="structural_tag is not supported"):
        grammar_of(StructuredOutputs(structural_tag="x"))
    assert grammar_of(Compiled(text="as it is")) == "as it is"


# -- the other kinds ----------------------------------------------------------------------------------------------

REGEXES = [r"(a+)+b", r"[a-c]{3}/\d+", "a/b\\/c", "x\ny\\\nz", r"(ja|nein)\.", r"\w{2,4}", "é?[^é]{2}", "\\\\\"'"]


@pytest.mark.parametrize("regex", REGEXES)
def test_outputs_match_their_regex(regex: str) -> None:
    for seed in range(8):
        out = walk(grammar_of(StructuredOutputs(regex=regex)), seed, CACHE)
        assert out is not None
        assert re.fullmatch(regex, out.decode()), out


def test_outputs_are_one_of_the_choices() -> None:
    choices = ["yes", "no", "not sure", 'quo"te', "back\\slash", "new\nline", "yes"]
    outs = {walk(grammar_of(StructuredOutputs(choice=choices)), seed, CACHE) for seed in range(60)}
    assert outs == {c.encode() for c in choices}


def test_grammars_in_two_notations() -> None:
    lark = 'start: sum\nsum: sum "+" NUMBER | NUMBER\nNUMBER: /[0-9]{1,3}/\n'  # left-recursive, which is fine
    gbnf = 'root ::= sum\nsum ::= sum "+" number | number\nnumber ::= [0-9] [0-9]? [0-9]?\n'
    for text in (lark, gbnf):
        for seed in range(8):
            out = walk(grammar_of(StructuredOutputs(grammar=text)), seed, CACHE)
            assert out is None or re.fullmatch(rb"\d{1,3}(\+\d{1,3})*", out), out


@pytest.mark.parametrize(
    "asked",
    [
        StructuredOutputs(regex=r"(a)\1"), StructuredOutputs(regex="(?=a)b"), StructuredOutputs(regex="[a"),
        StructuredOutputs(regex="a" * (10 << 20)), StructuredOutputs(regex="a\ud800"), StructuredOutputs(regex="a\\"),
        StructuredOutputs(choice=[]), StructuredOutputs(choice=["a"] * 10_001), StructuredOutputs(choice=[1]),  # type: ignore[list-item]
        StructuredOutputs(grammar=""), StructuredOutputs(grammar="hello"), StructuredOutputs(grammar="start: missing"),
        StructuredOutputs(grammar="root ::= other"), StructuredOutputs(grammar='start: "a'),
        StructuredOutputs(grammar="start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(100_000))),
        StructuredOutputs(grammar="root ::= r0\n" + "".join(f'r{n} ::= "a"\n' for n in range(100_000))),
        StructuredOutputs(grammar='start: %json {"type": "string", "foo": 1}'),
        StructuredOutputs(grammar="start: %json nope"),
        StructuredOutputs(grammar="root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000),
    ],
)  # fmt: skip
def test_other_kinds_that_are_refused(asked: StructuredOutputs) -> None:
    with pytest.raises(InputError) as caught:
        CACHE.check(grammar_of(asked))
    assert (caught.value.param or "").startswith("structured_outputs")
    assert len(str(caught.value)) < 500
    assert "state" not in str(caught.value)


def test_text_until_a_marker_then_a_schema() -> None:
    """The example of the package's docstring."""
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    text = lark_grammar(
        "start: (said call)* SAY\n"
        f"call: {lark_json(schema)} {lark_literal('}}')}\n"
        "SAY: /(.|\\n)*/ & ~/(.|\\n)*ab(.|\\n)*/\n"
        "said[lazy]: /(.|\\n)*ab/\n"
    )
    calls = 0
    for seed in range(60):
        out = walk(text, seed, CACHE)
        if out is not None:
            parts = re.split(r"ab", out.decode("utf-8", "replace"))
            for part in parts[1:]:
                value, end = json.JSONDecoder().raw_decode(part.lstrip())
                assert set(value) == {"x"}
                assert part.lstrip()[end:].startswith("}}")
                calls += 1
    assert calls > 0


def test_a_compiler_without_an_encoder_writes_forced_text() -> None:
    matcher = Compiler(VOCABULARY).compile(grammar_of(StructuredOutputs(choice=['{"ab": true, "x": null}'])))
    assert matcher.compute_ff_bytes() == b'{"ab": true, "x": null}'
    assert matcher.compute_ff_tokens()


# -- blanks -------------------------------------------------------------------------------------------------------

LIST = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
HOLDS_JSON = {
    "json": (StructuredOutputs(json=LIST), ""),
    "json, as text": (StructuredOutputs(json=json.dumps(LIST)), ""),
    "json_object": (StructuredOutputs(json_object=True), ""),
    "calls that are required": (
        StructuredOutputs(json=calls_schema({"f": LIST}, parallel=True)),
        '[{"name": "f", "arguments": ',
    ),
    "a strict tool, where a call is free": (
        StructuredOutputs(grammar=text_or_calls("<t>", ('{"name": "', '", "arguments": ', "}"), {"f": LIST})),
        'a <t>{"name": "f", "arguments": ',
    ),
    "%json in Lark": (StructuredOutputs(grammar=f'start: "x" json\njson: %json {json.dumps(LIST)}\n'), "x"),
    "two of them": (
        StructuredOutputs(grammar=f'start: %json {{"const": "%json"}} %json  {json.dumps(LIST)} "end"\n'),
        '"%json"',
    ),
    "behind a thought": (StructuredOutputs(json=LIST), "hm</think>"),
}


@pytest.mark.parametrize("name", HOLDS_JSON)
def test_blanks_in_json_are_bounded_everywhere(name: str) -> None:
    asked, before = HOLDS_JSON[name]
    grammar = grammar_of(asked)
    if before.endswith("</think>"):
        grammar = led("start: thought @answer\nthought[lazy]: /(.|\\n)*<\\/think>/\n", grammar)
    matcher = Compiler(VOCABULARY).compile(grammar)
    for inside in ("{", '{"a"', '{"a":', '{"a":[', '{"a":[1', '{"a":[1,', '{"a":[1]'):
        for blanks in (" " * 99, "\n" * 99, "\n" + " " * 99, " \n" * 99):
            one = matcher.deep_copy()
            assert one.try_consume_tokens(ids := spelled(before + inside)) == len(ids)
            assert one.try_consume_tokens(spelled(blanks)) <= 33


def spelled(text: str) -> list[int]:
    return [TOKENS.index(char.encode()) for char in text]
