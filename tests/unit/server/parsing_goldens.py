"""Outputs of models as their formats write them, and what they mean."""

from __future__ import annotations

import json
from typing import NamedTuple

from penstock.server.parsing import CallArguments, CallStart, Content, OutputParser, Reasoning
from penstock.server.parsing.formats import FORMATS, THOUGHTS

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": ["number", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"$ref": "#/$defs/place"},
            "exact": {"type": "boolean"},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
}


class Golden(NamedTuple):
    format: str
    text: str
    calls: list
    content: str = ""


BERLIN = {"city": "Berlin", "days": 3}
NASTY = {
    "city": 'a "b" \\ }] </tool_call> {[ \n ü 🦙',
    "tags": ["[", "}"],
    "where": {"x": {"y": [1, None, True, -2.5e3]}},
}
LLAMA = {"s": "ü\n🦙", "a": 2}
N, W = ("now", {}), ("get_weather", BERLIN)


def j(value):
    return json.dumps(value, ensure_ascii=False)


def call(name, arguments, key="arguments"):
    return f'{{"name": "{name}", "{key}": {j(arguments)}}}'


LONG = [
    Golden("hermes", f"<tool_call>\n{call(*W)}\n</tool_call>", [W]),
    Golden("hermes", f"Let me see.\n\n<tool_call>\n{call(*W)}\n</tool_call>\n<tool_call>\n{call(*N)}\n</tool_call>",
           [W, N], "Let me see."),
    Golden("hermes", f"<tool_call>{call('get_weather', NASTY)}</tool_call>", [("get_weather", NASTY)]),
    Golden("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
    Golden("hermes", f'<tool_call>{{"name": "f", "arguments": {j(j(LLAMA))}}}</tool_call> ok', [("f", LLAMA)], "ok"),
    Golden("hermes",
           '<tool_call>{"name": "f", "arguments": "\\u007b\\"s\\": \\"\\ud83e\\udd99\\ud800x\\"}"}</tool_call>',
           [("f", {"s": "🦙\ufffdx"})]),
    Golden("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
           [("f", {"a": 1})]),
    Golden("hermes", '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}</tool_call>',
           [N, N]),
    Golden("llama3_json", call("get_weather", BERLIN, "parameters"), [W]),
    Golden("llama3_json", f"<|python_tag|>{call('f', {'a': 1}, 'parameters')}; {call('now', {}, 'parameters')}",
           [("f", {"a": 1}), N]),
    Golden("llama3_json", f"Sure:\n  {call('get_weather', NASTY, 'parameters')}", [("get_weather", NASTY)], "Sure:"),
    Golden("llama3_json", f'{{"function": {{"name": "f"}}, "parameters": {j(LLAMA)}}}', [("f", LLAMA)]),
    Golden("llama3_json", f'{{"parameters": {j(LLAMA)}, "function": {{"name": "f", "parameters": {{}}}}}}',
           [("f", LLAMA)]),
    Golden("mistral", f"[TOOL_CALLS] [{call(*W)}, {call(*N)}]", [W, N]),
    Golden("mistral", f"[TOOL_CALLS]get_weather[ARGS]{j(NASTY)}[TOOL_CALLS]now[ARGS]{{}}",
           [("get_weather", NASTY), N]),
    Golden("mistral", f"Wait.[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{j({'a': 1})}[TOOL_CALLS]now{{}}",
           [("f", {"a": 1}), N], "Wait."),
    Golden("pythonic", '[get_weather(city="Berlin", days=3), now()]', [W, N]),
    Golden("pythonic", "<|python_start|>[get_weather(city='it\\'s \"ü\" \\x41\\u00df\\U0001F999\\n', days=-3,"
           " scale=None, tags=['a', \"b\",], where={'x': {\"y\": (1, 2.5e3, .5)}}, exact=True)]<|python_end|>",
           [("get_weather", {"city": 'it\'s "ü" Aß🦙\n', "days": -3, "scale": None, "tags": ["a", "b"],
             "where": {"x": {"y": [1, 2500.0, 0.5]}}, "exact": True})]),
    Golden("pythonic", '<function_calls>\nf(a=1, s="""x\n"y" """)\nnow()\n</function_calls>',
           [("f", {"a": 1, "s": 'x\n"y" '}), N]),
    Golden("qwen3_coder", "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n<b>\"York\"\n\n"
           "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=where>\n{\"x\": [1]}\n</parameter>\n"
           "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
           "</tool_call>",
           [("get_weather", {"city": 'New\n<b>"York"\n', "days": 3, "where": {"x": [1]}, "exact": True}), N],
           "I look."),
    Golden("qwen3_coder",
           "<function=f>\n<parameter=s>\n\n</parameter>\n<parameter=other>\n[1]\n</parameter></function>",
           [("f", {"s": "", "other": [1]})]),
    Golden("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
           f"{j(NASTY)}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
           "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [("get_weather", NASTY), N]),
    Golden("deepseek_v3", "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
           "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
           [("f", {"a": 1}), N], "Yes."),
    Golden("granite", f"<|tool_call|>[{call(*W)}, {call(*N)}]", [W, N]),
    Golden("granite", f"<function_call> {call(*W)}", [W]),
    Golden("internlm", f"Ok\n<|action_start|><|plugin|>\n{call('get_weather', NASTY, 'parameters')}<|action_end|>\n",
           [("get_weather", NASTY)], "Ok"),
    Golden("phi4_mini_json", f"functools[{call(*W)}, {call(*N)}]", [W, N]),
    Golden("phi4_mini_json", f"<|tool_call|>[{call(*W)}]<|/tool_call|>", [W]),
    Golden("kimi_k2", "Hm<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
           f"<|tool_call_argument_begin|>{j(NASTY)}<|tool_call_end|><|tool_call_begin|>functions.now:1"
           "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
           [("get_weather", NASTY), N], "Hm"),
    Golden("glm45", "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value> New\n\"York\" </arg_value>\n"
           "<arg_key>tags</arg_key>\n<arg_value>[\"a\"]</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
           [("get_weather", {"city": ' New\n"York" ', "tags": ["a"]}), N]),
    Golden("openai", f"[{call(*W)}, {call(*N)}]", [W, N]),
    Golden("openai", call("get_weather", NASTY), [("get_weather", NASTY)]),
    Golden("gemma4", '<|tool_call>call:get_weather{city:<|"|>a "b" \\ü<|"|>,days:3,where:{x:[<|"|>y<|"|>,true]}}'
           "<tool_call|><|tool_call>call:now{}<tool_call|>",
           [("get_weather", {"city": 'a "b" \\ü', "days": 3, "where": {"x": ["y", True]}}), N]),
    Golden("bare", call(*W), [W]),
    Golden("bare", f"I look.\n```json\n{call('get_weather', NASTY)}\n```\nDone.", [("get_weather", NASTY)],
           "I look.Done."),
    Golden("bare", f"<tools>\n{call(*W)}\n{call(*N)}\n</tools>", [W, N]),
    Golden("bare", f"```\n[{call(*W)},\n {call(*N)}]```", [W, N]),
    Golden("bare", f"[{call(*W)}, {call(*N)}]", [W, N]),
    Golden("bare", '{"type": "function", "function": {"arguments": {"a": 1}, "name": "f"}}\n' + call(*N),
           [("f", {"a": 1}), N]),
]  # fmt: skip

SHORT = [
    Golden("hermes", 'A\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})], "A"),
    Golden("llama3_json", '{"name": "f", "parameters": {"s": "}\\""}}; {"name":"now"}', [("f", {"s": '}"'}), N]),
    Golden("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS] [{"name": "now"}]', [("f", {"a": 1}), N]),
    Golden("pythonic", "[f(a=1, s='\\'\\u00e9]'), now()]", [("f", {"a": 1, "s": "'é]"}), N]),
    Golden("qwen3_coder", "<function=f><parameter=s>\n<\n</parameter><parameter=a>1</parameter></function>",
           [("f", {"s": "<", "a": 1})]),
    Golden("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>", [("f", {"a": 1})]),
    Golden("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', [("f", {"a": 1})]),
    Golden("internlm", '<|action_start|><|plugin|>{"name": "now"}<|action_end|>', [N]),
    Golden("phi4_mini_json", 'functools functools[{"name": "now"}]', [N], "functools"),
    Golden("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|>",
           [("f", {"a": 1})]),
    Golden("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value><</arg_value></tool_call>", [("f", {"s": "<"})]),
    Golden("openai", '[{"name": "f", "arguments": {"a": 1}}, {"name": "now"}]', [("f", {"a": 1}), N]),
    Golden("gemma4", '<|tool_call>call:f{s:<|"|><|<|"|>,a:1}<tool_call|>', [("f", {"s": "<|", "a": 1})]),
    Golden("bare", 'A\n```json\n{"name": "f", "arguments": {"a": 1}}\n```', [("f", {"a": 1})], "A"),
]  # fmt: skip

THOUGHT = "\nHm, <tool_call> or </thin?\n"
TEXTS = [
    "", " ", "\n\n", "Hello.", " Hello \n", "a <tool_ca", "<tool_call>", "<tool_call> is a marker", "[TOOL_CALLS]",
    "[TOOL_CALLS", "{}", "[]", '{"name": "nobody", "arguments": {"a": 1}}', '{"answer": 42}', "[1, 2]", "[a](b)",
    'x {"name": "f"}', "functools.reduce(f, [1])", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    "<tool_call>{\"name\": 3}</tool_call>", "<function=nobody><parameter=a>1</parameter></function>", "[nobody(a=1)]",
    "<｜tool▁call▁begin｜>nobody<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<|tool_call>call:nobody{a:1}<tool_call|>",
    "<|tool_calls_section_begin|>?", "```json\n{\"a\": 1}\n```\n", "<think>", "a <think>b</think>", "1 < 2 <= 3 <",
]  # fmt: skip
"""Outputs that hold no call: every format tells them as they are."""


def make(format, thoughts=None, **options):
    return OutputParser(FORMATS[format] if format else None, THOUGHTS[thoughts] if thoughts else None, TOOLS, **options)


class Parsed(NamedTuple):
    content: str
    reasoning: str
    calls: list
    unfinished: bool


def parse(parser, pieces):
    """What a parser tells, ids left out: they are random. Checks what must hold for every stream of events."""
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content, reasoning, calls = [], [], []
    for event in events:
        match event:
            case Content(text):
                assert text
                content.append(text)
            case Reasoning(text):
                assert text
                reasoning.append(text)
            case CallStart(index, call_id, name):
                assert index == len(calls)
                assert call_id
                calls.append([name, []])
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[index][1].append(text)
    assert parser.called == bool(calls)
    told = [(name, "".join(arguments)) for name, arguments in calls]
    return Parsed("".join(content), "".join(reasoning), told, parser.unfinished)
