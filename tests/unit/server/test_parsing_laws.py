"""However an output is split, what is told of it is the same; for every format, every golden output and much junk."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.parsing import OutputParser
from penstock.server.parsing.formats import FORMATS, THOUGHTS
from penstock.server.parsing.formats.bare import loosely
from tests.speed import cpu_within
from tests.unit.server.parsing_goldens import LONG, NASTY, SHORT, TEXTS, THOUGHT, TOOLS, j, make, parse

IDS = [f"{g.format}-{n}" for n, g in enumerate(LONG)]
CALLING = [name for name in FORMATS if not FORMATS[name].whole]


@pytest.mark.parametrize("golden", LONG + SHORT, ids=[*IDS, *(f"{g.format}-short" for g in SHORT)])
def test_a_golden_output_means_what_it_says(golden):
    got = parse(make(golden.format), [golden.text])
    assert [(name, json.loads(arguments)) for name, arguments in got.calls] == golden.calls
    assert got.content == golden.content
    assert not got.unfinished


def test_every_format_has_goldens():
    assert {g.format for g in LONG} == {g.format for g in SHORT} == set(CALLING)


@pytest.mark.parametrize("golden", LONG, ids=IDS)
def test_every_split_in_two_and_into_characters(golden):
    text = golden.text
    whole = parse(make(golden.format), [text])
    assert parse(make(golden.format), list(text)) == whole
    for i in range(1, len(text)):
        assert parse(make(golden.format), [text[:i], text[i:]]) == whole


@pytest.mark.parametrize("golden", SHORT, ids=lambda g: g.format)
def test_every_split_in_three(golden):
    text = golden.text
    whole = parse(make(golden.format), [text])
    for i in range(1, len(text)):
        for k in range(i + 1, len(text)):
            assert parse(make(golden.format), [text[:i], text[i:k], text[k:]]) == whole


UNCALLED = [
    '{"name": "f"}', '{"name": "f", "description": "x", "parameters": {"type": "object"}}', '[{"name": "now"}]',
    '{"name": "f", "parameters": {"a": 1}}', '{"type": "function", "function": {"name": "f", "description": "x"}}',
    '{"name": "f", "arguments": "a"}', '{"name": "f", "arguments": null}', '{"name": "Bob", "arguments": {}}',
    '```json\n{"name": "f", "age": 3}\n```', "```python\nf(1)\n```", "<tools>\n{}\n</tools>", "```", "[",
    'Like {"name": "f", "arguments": {}}, so', '{"arguments": {"a": 1}}', '{"name": "f", "arguments"',
]  # fmt: skip


@pytest.mark.parametrize("format", [FORMATS["bare"], loosely(FORMATS["hermes"])], ids=["bare", "loosely"])
@pytest.mark.parametrize("text", TEXTS + UNCALLED)
def test_json_that_is_no_call_of_a_tool_stays_text(format, text):
    """Not even one with a tool's name in it: declarations and examples have that, too."""
    for pieces in ([text], list(text)):
        got = parse(OutputParser(format, None, TOOLS), pieces)
        assert (got.content, got.calls) == (text, [])


@pytest.mark.parametrize(
    "golden", [g for g in LONG + SHORT if g.format in ("hermes", "bare")], ids=lambda g: g.text[:20]
)
def test_calls_with_marks_and_without_in_one_format(golden):
    format, text = loosely(FORMATS["hermes"]), golden.text
    whole = parse(OutputParser(format, None, TOOLS), [text])
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == golden.calls
    assert (whole.content, whole.unfinished) == (golden.content, False)
    for i in range(1, len(text)):
        assert parse(OutputParser(format, None, TOOLS), [text[:i], text[i:]]) == whole


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("text", TEXTS)
def test_text_without_calls_comes_out_as_it_is(name, text):
    for pieces in ([text], list(text)):
        got = parse(make(name), pieces)
        assert (got.content, got.calls) == (text, [])


@pytest.mark.parametrize("thoughts", THOUGHTS)
def test_thoughts_and_calls_in_every_split(thoughts):
    marks = THOUGHTS[thoughts]
    golden = SHORT[0]
    text = f"{marks.open}{THOUGHT}{marks.close}\n\n{golden.text}"
    whole = parse(make("hermes", thoughts), [text])
    assert whole.reasoning == THOUGHT.strip()
    assert (whole.content, len(whole.calls)) == ("A", 1)
    assert parse(make("hermes", thoughts), list(text)) == whole
    for i in range(1, len(text)):
        assert parse(make("hermes", thoughts), [text[:i], text[i:]]) == whole
    opened = text.removeprefix(marks.open)
    assert parse(make("hermes", thoughts, opened=True), list(opened)) == whole


def mutated(draw, text):
    """A golden output with a few cuts, repeats, insertions and a truncation."""
    junk = st.sampled_from([*'"\\{}[]()<>|=,:\n ', "<tool_call>", "</tool_call>", "null", "ü", "\\u", "\\ud800", "'"])
    for _ in range(draw(st.integers(0, 4))):
        a, b = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        text = draw(st.sampled_from([
            text[:a] + text[b:] if b - a < 8 else text[:a] + text[a + 1 :],
            text[:a] + draw(junk) + text[a:], text[:b], text + text[a:b], text[:a] + text[a:b] + text[a:],
        ]))[:2000]  # fmt: skip
    return text


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_any_text_in_any_pieces(data):
    golden = data.draw(st.sampled_from(LONG + SHORT))
    name = data.draw(st.sampled_from([golden.format, golden.format, *FORMATS]))
    thoughts = data.draw(st.sampled_from([None, None, *THOUGHTS]))
    options = {
        "opened": data.draw(st.booleans()), "parallel": data.draw(st.booleans()),
        "hidden": data.draw(st.sampled_from([(), ("<|im_end|>", '"')])),
    }  # fmt: skip
    text = mutated(data.draw, golden.text)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(12))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(make(name, thoughts, **options), [text])
    assert parse(make(name, thoughts, **options), pieces) == whole
    assert parse(make(name, thoughts, **options), list(text)) == whole


@pytest.mark.parametrize("golden", LONG, ids=IDS)
def test_cut_off_anywhere(golden):
    """What has been told is never taken back: the shorter output's events begin the longer one's."""
    full = parse(make(golden.format), [golden.text])
    for i in range(len(golden.text)):
        got = parse(make(golden.format), [golden.text[:i]])
        for (name, arguments), (full_name, full_arguments) in zip(got.calls, full.calls, strict=False):
            assert name == full_name
            assert full_arguments.startswith(arguments) or arguments == "{}"
        if got.calls and got.calls[-1][1] != full.calls[len(got.calls) - 1][1]:
            assert got.unfinished


MILLION = 1_000_000
BIG = {
    "text": "a <b {c [d\n" * (MILLION // 11),
    "arguments": '<tool_call>{"name": "f", "arguments": {"s": "' + "x\\n" * (MILLION // 3) + '"}}</tool_call>',
    "brackets": '<tool_call>{"name": "f", "arguments": ' + "[" * MILLION,
    "openers": "<tool_call>" * (MILLION // 11),
    "late name": '<tool_call>{"arguments": {"s": "' + "x" * MILLION + '"}, "name": "f"}',
    "keys": '<tool_call>{"arguments":' * (MILLION // 24),
    "functions": '<tool_call>{"function":' + '{"function":' * (MILLION // 12),
    "blanks": " \n" * (MILLION // 2),
    "half markers": "<tool_cal" * (MILLION // 9),
}


@pytest.mark.parametrize("what", BIG)
def test_a_megabyte_takes_linear_time(what):
    """At once, and in pieces of seven characters; far below what quadratic work would take."""
    text = BIG[what]
    with cpu_within(15):
        parse(make("hermes", "qwen3"), [text])
    small = text[: MILLION // 10]
    with cpu_within(15):
        parse(make("hermes", "qwen3"), [small[i : i + 7] for i in range(0, len(small), 7)])


def test_only_the_first_call_without_parallel():
    golden = LONG[1]
    got = parse(make("hermes", parallel=False), list(golden.text))
    assert [name for name, _ in got.calls] == ["get_weather"]
    assert got.content == golden.content


def test_arguments_come_while_they_are_written():
    parser = make("hermes")
    parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "')
    assert [event.text for event in parser.feed("Ber")] == ["Ber"]
    assert [event.text for event in parser.feed("lin")] == ["lin"]


def test_string_parameters_of_xml_come_while_they_are_written():
    parser = make("qwen3_coder")
    parser.feed("<tool_call><function=get_weather><parameter=city>\n")
    assert [event.text for event in parser.feed('B"er')] == ['B\\"er']


def test_invalid_arguments_are_passed_on():
    broken = '{"city": Berlin, "days": 3,}'
    got = parse(make("hermes"), list(f'<tool_call>\n{{"name": "get_weather", "arguments": {broken}}}\n</tool_call>'))
    assert got.calls == [("get_weather", broken)]
    cut = parse(make("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": [1}\n</tool_call>\nDone.'])
    assert cut.calls == [("f", '{"a": [1}\n')]
    assert cut.content == "Done."


def test_json_arguments_are_the_models_own_text():
    odd = '{ "city" :"Berlin","days":  3.0 }'
    got = parse(make("hermes"), list(f'<tool_call>{{"name":"get_weather","arguments":{odd}}}</tool_call>'))
    assert got.calls == [("get_weather", odd)]


def test_ids():
    for name, shape in (("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[A-Za-z0-9]{9}")):
        golden = next(g for g in LONG if g.format == name and len(g.calls) == 2)
        events = make(name).feed(golden.text)
        ids = [event.id for event in events if hasattr(event, "id")]
        assert len(set(ids)) == 2
        for one in ids:
            import re

            assert re.fullmatch(shape, one)
    kimi = next(g for g in LONG if g.format == "kimi_k2")
    ids = [event.id for event in make("kimi_k2").feed(kimi.text) if hasattr(event, "id")]
    assert ids == ["functions.get_weather:0", "functions.now:1"]


def test_hidden_ends_of_turns_never_show():
    text = f'<tool_call>{{"name": "f", "arguments": {j(NASTY)}}}</tool_call><|im_end|>'
    for pieces in ([text], list(text)):
        assert parse(make("hermes", hidden=("<|im_end|>", "<|end|>")), pieces).content == ""
    assert parse(make("hermes", hidden=("<|im_end|>",)), list("a <|im_en")).content == "a <|im_en"
