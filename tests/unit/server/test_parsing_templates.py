"""A template writes a call, the parser reads it back: the same calls. And templates show which parser they need."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from penstock.base.errors import InputError
from penstock.config.server import ServerConfig
from penstock.core.sampling import SamplingParams, StructuredOutputs
from penstock.server.parsing import (
    OutputParser,
    check_tools,
    params_for,
    parser_for,
    shown,
    takes_bare,
    tool_support,
)
from penstock.server.parsing.formats import FORMATS, THOUGHTS
from penstock.server.parsing.template_format import find_format, find_thoughts, reads_tools
from penstock.text.grammar.source import grammar_of
from penstock.text.template import render_chat
from tests.shared import shared
from tests.unit.server.parsing_goldens import TOOLS, make, parse
from tests.unit.text.published import template as read

ALL = [{"type": "function", "function": {"name": name, "description": "Does it", "parameters": schema}}
       for name, schema in TOOLS.items()]  # fmt: skip
PLACE = [{"type": "function", "function": {"name": "find", "description": "Finds", "parameters": {
    "type": "object", "properties": {
        "text": {"type": "string", "description": "Text"}, "count": {"type": "integer", "description": "Count"},
        "exact": {"type": "boolean", "description": "Exact"},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags"},
        "near": {"type": "object", "description": "At"},
    }}}}, {"type": "function", "function": {"name": "now", "description": "Time", "parameters": {
        "type": "object", "properties": {}}}}]  # fmt: skip
GIVEN = [
    {"text": "Köln", "count": 3, "exact": True, "tags": ["a", "b"], "near": {"lat": -1.5}},
    {"text": 'a "b" \\ \n\t{[(<>)]}\' 🦙 é', "count": -12},
    {"text": "", "tags": []},
    {},
]
HERMES = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
XML = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
GLM = """[gMASK]{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}
<think></think>
{%- endif %}{% endif %}"""
DEEPSEEK = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<｜{{ m.role }}｜>{{ m.content }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>
{{- c.function.name }}
```json
{{ c.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}
{%- if m.role == "user" %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- {"name": c.function.name, "arguments": c.function.arguments, "id": c.id} | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"""
KIMI = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}
{%- raw %}<|tool_call_argument_begin|>{% endraw %}{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}
{%- raw %}<|tool_calls_section_end|>{% endraw %}{% endif %}<|im_end|>{% endfor %}"""
LLAMA = """{% if tools %}ipython {{ tools | tojson }} Answer {"name": function, "parameters": values}{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception("one call") }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"""
PYTHONIC = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|header_start|>{{ m.role }}<|header_end|>

{{ m.content }}{% if m.tool_calls %}<|python_start|>[{% for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})
{%- if not loop.last %}, {% endif %}{% endfor %}]<|python_end|>{% endif %}<|eot|>{% endfor %}"""
MADE = {"hermes": HERMES, "qwen3_coder": XML, "glm45": GLM, "deepseek_v3": DEEPSEEK, "mistral": MISTRAL,
        "kimi_k2": KIMI, "llama3_json": LLAMA, "pythonic": PYTHONIC}  # fmt: skip
PUBLISHED = {"qwen2.5.tokenizer_config.json": "hermes", "qwen3.tokenizer_config.json": "hermes",
             "smollm3.chat_template.jinja": "hermes", "gemma-4.chat_template.jinja": "gemma4",
             "gpt-oss.chat_template.jinja": "gpt_oss"}  # fmt: skip


def written(template, calls):
    """What a template writes for an assistant's calls; None if it refuses them."""
    told = [
        {"id": "abcdefgh1" if "nine" in template else f"functions.{name}:{n}", "type": "function", "name": name,
         "arguments": arguments, "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]  # fmt: skip
    messages = [{"role": "user", "content": "THE END OF IT"}, {"role": "assistant", "content": "", "tool_calls": told}]
    try:
        text = render_chat(template, messages, tools=PLACE, add_generation_prompt=False)
    except InputError:
        return None
    return text[text.rfind("THE END OF IT") + 13 :]


def comes_back(template, format, several=True):
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in PLACE}
    turns = [[("find", given)] for given in GIVEN] + ([[("find", GIVEN[0]), ("now", {}), ("find", GIVEN[1])]] * several)
    for calls in turns:
        text = written(template, calls)
        assert text is not None
        for pieces in ([text], list(text)):
            got = parse(OutputParser(FORMATS[format], None, tools), pieces)
            assert [(name, json.loads(arguments)) for name, arguments in got.calls] == calls


@pytest.mark.parametrize("format", MADE)
def test_calls_come_back_through_a_template(format):
    assert reads_tools(MADE[format])
    assert find_format(MADE[format]).name == format
    comes_back(MADE[format], format, several=format != "llama3_json")


def test_what_a_template_writes_counts_not_how_it_spells_it():
    assert find_format(HERMES.replace("<tool_call>", "{{ '<tool' + '_call>' }}")).name == "hermes"
    assert find_format("{{ tools }}{{ messages[0].content }}") is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_show_their_format(name):
    template = read(name)
    assert reads_tools(template)
    assert find_format(template).name == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "smollm3" not in name])
def test_calls_come_back_through_published_templates(name):
    """SmolLM3's does not write calls. gpt-oss's writes one."""
    comes_back(read(name), PUBLISHED[name], several="gpt-oss" not in name)


def test_every_published_template_that_writes_calls_is_read_back():
    """No template at hand is left out of the lists above."""
    for path in sorted(shared("data", "configs", "chat").iterdir()):
        template = read(path.name)
        if template is None or path.name in PUBLISHED:
            continue
        text = written(template, [("find", {"text": "unmistakable"})])
        assert text is None or "unmistakable" not in text, path.name


def test_thoughts_by_template():
    assert find_thoughts(HERMES) is None
    assert find_thoughts(XML).name == "qwen3"
    assert find_thoughts("{{ '[THINK]' }}").name == "mistral"
    assert find_thoughts("{{ '◁think▷' }}").name == "kimi"
    assert find_thoughts(read("qwen3.tokenizer_config.json")).open == "<think>"
    assert find_thoughts(read("qwen2.5.tokenizer_config.json")) is None


def server(template, special=(), **settings):
    """As much of a server as a parser is chosen by."""
    tokenizer = SimpleNamespace(special_literals=frozenset(special), id_to_piece=lambda i: "<|im_end|>")
    service = SimpleNamespace(
        chat_template=template, tool_template=template, tokenizer=tokenizer,
        limits=SimpleNamespace(eos_token_ids=(2,)),
    )  # fmt: skip
    return SimpleNamespace(service=service, config=ServerConfig(**settings))


def test_no_parser_where_nothing_is_to_be_found():
    assert parser_for(server(HERMES), None) is None
    assert parser_for(server(HERMES), ALL, "none") is None
    assert params_for(server(HERMES), None, None, SamplingParams()) == SamplingParams()
    assert params_for(server(HERMES), ALL, "auto", SamplingParams()) == SamplingParams()


def test_tools_by_the_template():
    parser = parser_for(server(HERMES), ALL)
    assert parser.format.name == "hermes"
    assert parse(parser, ['<tool_call>{"name": "now"}</tool_call>']).calls == [("now", "{}")]
    assert parser_for(server(HERMES, tool_call_parser="qwen3_xml"), ALL).format.name == "qwen3_coder"


QWEN25 = HERMES.replace("{%- if tools %}", "{%- if tools %}You are Qwen, created by Alibaba Cloud.", 1)
BARE = '{"name": "f", "arguments": {"a": 1}}'
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "setting", "called"),
    [(QWEN25, "auto", True), (QWEN25, "off", False), (HERMES, "auto", False), (HERMES, "on", True),
     (QWEN25 + "{# <think> #}", "auto", False)],
)  # fmt: skip
def test_json_without_marks_is_a_call_from_models_known_for_it(template, setting, called):
    chosen = server(template, bare_tool_calls=setting)
    assert takes_bare(chosen) == called
    for text, marked in ((BARE, False), (f"<tool_call>{BARE}</tool_call>", True)):
        got = parse(parser_for(chosen, ALL, "auto"), [text])
        assert got.calls == ([("f", '{"a": 1}')] if called or marked else [])
        assert got.content == ("" if got.calls else text)


@pytest.mark.parametrize("template", [QWEN25, PLAIN])
def test_strict_binds_calls_without_marks(template):
    """What the parser takes for a call of a strict tool is what the grammar has bound, in every split."""
    strict = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": strict}}, *ALL[:2]]
    grammar = grammar_of(params_for(server(template), tools, "auto", SamplingParams()).structured_outputs)
    good, free = '{"name": "f", "arguments": {"a": 1}}', '{"name":"now" ,\n "arguments": {"x": [1]} }'
    calls = [("f", '{"a": 1}'), ("now", '{"x": [1]}')]
    for text, found, content in (
        ("", [], ""), ("Hello <b> {", [], "Hello <b> {"), (good, calls[:1], ""),
        (f"```json\n{good}\n```", calls[:1], ""),
        (f"[{good},\n{free}]", calls, ""), (f"Hm.\n{good}\n{free}\n```", calls, "Hm."),
        ('{"name": "Bob", "arguments": {"a": 3}}', [], '{"name": "Bob", "arguments": {"a": 3}}'),
        ('{"arguments": {"a": 3}, "name": "f"}', [], '{"arguments": {"a": 3}, "name": "f"}'),
        ('{"type": "function", "name": "f", "arguments": {"a": 3}}', [], None),
        ('{"function": "f", "arguments": {"a": 3}}', [], None),
    ):  # fmt: skip
        assert bound(grammar, text) == (len(text), True), text
        whole = parse(parser_for(server(template), tools, "auto"), [text])
        assert (whole.calls, whole.content) == (found, text if content is None else content)
        for i in range(1, len(text)):
            assert parse(parser_for(server(template), tools, "auto"), [text[:i], text[i:]]) == whole
    for text, count in (('{"name": "f", "arguments": {"a": 3}}', 33), (f'[{good}, {{"name":"f","arguments": 3', 64)):
        assert bound(grammar, text) == (count, False)


@pytest.mark.parametrize("setting", ["auto", "required", "off"])
def test_tools_without_a_template_for_them(setting):
    chosen = server(PLAIN, tool_prompt=setting)
    assert tool_support(chosen) == {"auto": "prompt", "required": "prompt-required", "off": "none"}[setting]
    user = [{"role": "user", "content": "Hi"}]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        messages, tools = shown(chosen, user, ALL, choice, None)
        if setting == "off" or (setting == "required" and choice == "auto"):
            with pytest.raises(InputError) as caught:
                parser_for(chosen, ALL, choice)
            assert caught.value.param == "tools"
            assert ("unless" in str(caught.value)) == (setting == "required")
            continue
        assert tools is None
        assert "You can call functions" in messages[0]["content"]
        assert parser_for(chosen, ALL, choice) is not None
    if setting == "auto":
        assert parse(parser_for(chosen, ALL), [f"Hm.\n{BARE}"]) == ("Hm.", "", [("f", '{"a": 1}')], False)
        assert shown(chosen, user, ALL, "auto", PLAIN) == (user, ALL), "a template of the request's speaks for itself"
        assert shown(chosen, user, ALL, "none", None) == (user, None)
    assert shown(chosen, user, None, None, None) == (user, None)
    assert shown(server(HERMES, tool_prompt=setting), user, ALL, "auto", None) == (user, ALL)
    assert tool_support(server(HERMES, tool_prompt=setting)) == "template"
    assert tool_support(server(HERMES, enable_auto_tool_choice=False)) == "none"


def test_text_stays_text_with_tool_choice_none():
    text = '<tool_call>{"name": "now"}</tool_call>'
    parser = parser_for(server(HERMES, reasoning_parser="qwen3"), ALL, "none")
    assert parse(parser, list(text)) == (text, "", [], False)


@pytest.mark.parametrize(("template", "settings", "words"), [
    ("{{ messages[0].content }}", {"tool_prompt": "off"}, "does not show tools"),
    ("{{ messages[0].content }}{{ tools }}", {}, "--tool-call-parser"),
    (HERMES, {"tool_call_parser": "none"}, "does not show tools"),
    (HERMES, {"enable_auto_tool_choice": False}, "does not take tools"),
    (HERMES, {"tool_call_parser": "nonsense"}, "'nonsense'"),
    (None, {}, "does not show tools"),
])  # fmt: skip
@pytest.mark.parametrize("choice", [None, "required", {"type": "function", "function": {"name": "now"}}])
def test_tools_that_a_model_cannot_use_are_refused(template, settings, words, choice):
    with pytest.raises(InputError, match=words):
        parser_for(server(template, **settings), ALL, choice)


@pytest.mark.parametrize(("template", "kwargs", "prompt_text", "reasoning"), [
    (XML, {}, "", "Hm"), (XML, {}, "<|im_start|>assistant\n", ""), (GLM, {}, "<think>\n", "Hm"),
    (GLM, {"enable_thinking": False}, "", ""), (GLM, {}, "<think></think>\n", ""),
])  # fmt: skip
def test_thoughts_opened_or_closed_by_the_prompt(template, kwargs, prompt_text, reasoning):
    chosen = server(template, reasoning_parser="glm45")
    parser = parser_for(chosen, None, None, kwargs, prompt_text=prompt_text)
    got = parse(parser, list("Hm\n</think>\n\nYes"))
    assert got.reasoning == reasoning
    assert got.content == ("Yes" if reasoning else "Hm\n</think>\n\nYes")


def test_thoughts_opened_by_the_model():
    parser = parser_for(server(GLM, reasoning_parser="glm45"), None)
    assert parse(parser, list("\n<think>Hm</think>Yes"))[:2] == ("Yes", "Hm")
    assert parse(parser_for(server(GLM, reasoning_parser="none"), ALL), list("<think>Hm"))[:2] == ("<think>Hm", "")
    silenced = parser_for(server(GLM, reasoning_parser="glm45"), None, None, {"enable_thinking": False})
    assert parse(silenced, list("<think>Hm</think>Yes")).reasoning == ""


def test_special_markers_are_made_visible_and_ends_of_turns_hidden():
    chosen = server(MISTRAL, special=["[TOOL_CALLS]", "<|im_end|>"])
    assert params_for(chosen, ALL, "auto", SamplingParams()).skip_special_tokens is False
    assert params_for(chosen, ALL, "none", SamplingParams()).skip_special_tokens is True
    parser = parser_for(chosen, ALL)
    assert parse(parser, ["Yes[TOOL_CALLS]now{}<|im", "_end|>"])[:3] == ("Yes", "", [("now", "{}")])


def test_a_named_function_is_the_whole_output():
    choice = {"type": "function", "function": {"name": "f"}}
    for text, unfinished in (('{"a": 1, "s": "}{"}', False), (' {"a": 1, "s"', True)):
        got = parse(parser_for(server(HERMES), ALL, choice), list(text))
        assert got == ("", "", [("f", text.strip())], unfinished)
    assert parse(parser_for(server(HERMES), ALL, choice), []) == ("", "", [], True)
    asked = params_for(server(HERMES), ALL, choice, SamplingParams()).structured_outputs
    assert {key: asked.json[key] for key in TOOLS["f"]} == TOOLS["f"]


def test_required_is_a_list_of_calls():
    asked = params_for(server(HERMES), ALL, "required", SamplingParams()).structured_outputs.json
    assert (asked["type"], asked["minItems"], "maxItems" in asked) == ("array", 1, False)
    assert [one["properties"]["name"]["const"] for one in asked["items"]["anyOf"]] == list(TOOLS)
    bound = asked["items"]["anyOf"][2]["properties"]["arguments"]
    assert {key: bound[key] for key in TOOLS["f"]} == TOOLS["f"]
    one = params_for(server(HERMES), ALL, "required", SamplingParams(), parallel=False).structured_outputs.json
    assert one == asked | {"maxItems": 1}
    good = [{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {"where": {}}}]
    got = parse(parser_for(server(HERMES), ALL, "required"), list(json.dumps(good)))
    assert [(n, json.loads(a)) for n, a in got.calls] == [(c["name"], c["arguments"]) for c in good]


def test_a_bound_output_that_is_cut_leaves_no_text():
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 2}}]'
    for i in range(len(text)):
        got = parse(parser_for(server(HERMES), ALL, "required"), [text[:i]])
        assert (got.content, got.unfinished) == ("", i > 0)


def test_output_bound_twice_is_refused():
    params = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    with pytest.raises(InputError) as caught:
        params_for(server(HERMES), ALL, "required", params)
    assert caught.value.param == "tool_choice"
    assert params_for(server(HERMES), ALL, "auto", params) == params


def test_schemas_that_cannot_be_enforced_are_refused_by_path():
    function = {"name": "g", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "unevaluatedItems": False}}}}  # fmt: skip
    tools = [*ALL, {"type": "function", "function": function}]
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        with pytest.raises(InputError) as caught:
            params_for(server(HERMES), tools, choice, SamplingParams())
        assert caught.value.param == "tools[3].function.parameters.properties.a.unevaluatedItems"
        lenient = [*ALL, {"type": "function", "function": function | {"strict": False}}]
        params_for(server(HERMES), lenient, choice, SamplingParams())


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    "<|start|>assistant<|channel|>final<|message|>Done."
)


def test_channels_of_gpt_oss():
    whole = parse(make("gpt_oss"), [HARMONY])
    assert whole == ("I look.Done.", "Hm.", [("f", '{"a": 1}')], False)
    for i in range(len(HARMONY)):
        assert parse(make("gpt_oss"), [HARMONY[:i], HARMONY[i:]]) == whole
    assert parse(make("gpt_oss"), list(HARMONY)) == whole
    unknown = HARMONY.replace("functions.f", "functions.nobody")
    assert parse(make("gpt_oss"), [unknown]).calls == []
    none = parser_for(server(read("gpt-oss.chat_template.jinja")), None)
    assert parse(none, [HARMONY])[:2] == ('I look.{"a": 1}Done.', "Hm.")


def bound(grammar, text):
    """How much of a text a grammar lets through, and whether it could end there."""
    llguidance = pytest.importorskip("llguidance")
    vocabulary = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(vocabulary, json.loads(grammar)["grammars"][0]["lark_grammar"])
    tokens = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(tokens), matcher.is_accepting()


def test_strict_binds_calls_and_leaves_text_alone():
    strict = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": strict}}, *ALL[:2]]
    asked = params_for(server(HERMES), tools, "auto", SamplingParams()).structured_outputs
    grammar = grammar_of(asked)
    good = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    free = '<tool_call>\n{"name": "now", "arguments": {"x": [1]}}\n</tool_call>'
    for text in ("", "Hello <b> {", "a <tool_cal", good, f"Hm.\n{good}\n{free}\n{good} and", free):
        assert bound(grammar, text) == (len(text), True)
    for text, count in (
        ('<tool_call>\n{"name": "f", "arguments": {"a": 3}}', 45), ('x <tool_call>\n{"name": "g', 25),
        ("<tool_call>!", 11), (good + "<tool_call>x", len(good) + 11),
    ):  # fmt: skip
        assert bound(grammar, text) == (count, False)


def test_strict_that_cannot_be_kept_is_refused():
    tools = [ALL[0], {"type": "function", "function": {"name": "g", "strict": True}}]
    for chosen in (server(XML), server(MISTRAL), server(HERMES, special=["<tool_call>"])):
        with pytest.raises(InputError) as caught:
            params_for(chosen, tools, None, SamplingParams())
        assert caught.value.param == "tools[1].function.strict"
        assert params_for(chosen, tools, "required", SamplingParams()).structured_outputs is not None
    bad = [{"type": "function", "function": {"name": "g", "strict": True, "parameters": {"contains": {}}}}]
    with pytest.raises(InputError) as caught:
        params_for(server(HERMES), bad, "auto", SamplingParams())
    assert caught.value.param == "tools[0].function.parameters.contains"


def test_allowed_tools():
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "now"}}]}}  # fmt: skip
    parser = parser_for(server(HERMES), check_tools(ALL, choice), choice)
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(parser, [text]) == (text, "", [], False)


def test_formats_and_thoughts_have_names_of_their_own():
    assert all(name == format.name for name, format in FORMATS.items())
    assert all(name == thoughts.name for name, thoughts in THOUGHTS.items())
