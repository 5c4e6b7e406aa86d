"""What requests ask of the form of an answer: every server's name for it is honoured or refused, at every depth; and
fields that nobody knows are named with their path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.base.errors import InputError
from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from penstock.server.routes.chat import REFUSED_FIELDS
from penstock.server.schema.decode import checking, renamed
from penstock.server.schema.extras import ACCEPTED
from penstock.server.schema.forms import ResponseFormat
from penstock.server.schema.openai import ChatRequest
from penstock.server.transport.slices import whole
from tests.api.conftest import bundled
from tests.unit.server.test_parsing_templates import HERMES

TEXT, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
ALL = (TEXT, CHAT, RESPONSES, MESSAGES)
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
USER = [{"role": "user", "content": "hi"}]
GBNF = 'root ::= "{" ws "\\"a\\":" ws [12] "}"\nws ::= " "?  # blanks'


@pytest.fixture(scope="module")
def forms() -> Iterator[httpx.Client]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="native", max_model_len=512, num_gpu_blocks_override=64, chat_template=HERMES
    )
    with LiveServer(config) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx.Client]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="native", max_model_len=512, num_gpu_blocks_override=64, chat_template=HERMES,
        strict=True, engine_in_process=True,
    )  # fmt: skip
    with LiveServer(config) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    sized = {"max_output_tokens" if path == RESPONSES else "max_tokens": 120}
    said: dict[str, Any] = {TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}.get(path, {"messages": USER})
    return http.post(path, json={**said, **sized, "temperature": 1.0, **body})


def text_of(path: str, answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    got = answer.json()
    match path:
        case "/v1/completions":
            return str(got["choices"][0]["text"])
        case "/v1/chat/completions":
            return str(got["choices"][0]["message"]["content"])
        case "/v1/responses":
            return str(got["output"][0]["content"][0]["text"])
    return str(got["content"][0]["text"])


def is_form(text: str) -> bool:
    return json.loads(text) in ({"a": 1}, {"a": 2})


# -- honoured -----------------------------------------------------------------------------------------------------

TOP: list[dict[str, Any]] = [
    {"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}, {"grammar": GBNF}, {"ebnf": GBNF},
    {"regex": r'\{"a":[12]\}'}, {"grammar": {"type": "json", "value": SCHEMA}},
    {"grammar": {"type": "regex", "value": r'\{"a":[12]\}'}}, {"structured_outputs": {"json": SCHEMA}},
]  # fmt: skip
FORMATS: list[dict[str, Any]] = [
    {"type": "json_object", "schema": SCHEMA}, {"type": "json_schema", "schema": SCHEMA, "name": "n"},
    {"type": "json", "value": SCHEMA}, {"type": "json_object", "value": SCHEMA},
    {"type": "regex", "pattern": r'\{"a":[12]\}'}, {"type": "regex", "value": r'\{"a":[12]\}'},
    {"type": "regex_schema", "regex_schema": r'\{"a":[12]\}'}, {"type": "grammar", "grammar": GBNF},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False, "description": "d"}},
]  # fmt: skip


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES])
@pytest.mark.parametrize("asked", TOP, ids=lambda asked: next(iter(asked)))
def test_other_servers_names_are_honoured(forms: httpx.Client, path: str, asked: dict[str, Any]) -> None:
    for seed in range(2):
        answer = post(forms, path, seed=seed, **asked)
        assert is_form(text_of(path, answer))
        assert "x-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES])
@pytest.mark.parametrize("asked", FORMATS, ids=lambda asked: " ".join(sorted(asked)))
def test_every_shape_of_a_response_format_is_honoured(forms: httpx.Client, path: str, asked: dict[str, Any]) -> None:
    field = {"text": {"format": asked}} if path == RESPONSES else {"response_format": asked}
    answer = post(forms, path, seed=1, **field)
    assert is_form(text_of(path, answer))
    assert "x-ignored-fields" not in answer.headers
    if path == RESPONSES:
        assert answer.json()["text"]["format"] == asked, "told as it was asked"


@pytest.mark.parametrize(
    "asked",
    [{"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
     {"output_format": {"type": "json_schema", "schema": SCHEMA}}, {"structured_outputs": {"grammar": GBNF}}],
)  # fmt: skip
def test_messages_are_bound_too(forms: httpx.Client, asked: dict[str, Any]) -> None:
    assert is_form(text_of(MESSAGES, post(forms, MESSAGES, seed=1, **asked)))


def test_what_says_nothing_binds_nothing(forms: httpx.Client) -> None:
    """llama.cpp's clients send their fields empty."""
    free = post(forms, CHAT, seed=3).json()["choices"]
    nothing = {"grammar": "", "json_schema": None, "regex": "", "ebnf": None, "grammar_lazy": False,
               "grammar_triggers": [], "guided_json": None, "response_format": {"type": "text"}}  # fmt: skip
    answer = post(forms, CHAT, seed=3, **nothing)
    assert answer.json()["choices"] == free
    assert "x-ignored-fields" not in answer.headers
    empty = post(forms, CHAT, seed=3, response_format={"type": "json_object", "schema": {}}, max_tokens=300)
    assert text_of(CHAT, empty).startswith("{")


# -- refused ------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA}, "guided_json"), ({"guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": ["a"]}, "guided_choice"), ({"guided_grammar": GBNF}, "guided_grammar"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_json_object": True}, "guided_json_object"), ({"guided_decoding": {"json": SCHEMA}}, "guided_decoding"),
    ({"structural_tag": "{}"}, "structural_tag"), ({"grammar_lazy": True}, "grammar_lazy"),
    ({"format": "json"}, "format"),
    ({"grammar_triggers": [{"word": "<"}]}, "grammar_triggers"),
    ({"extra_body": {"guided_json": SCHEMA}}, "extra_body.guided_json"),
    ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, "extra_body.structured_outputs"),
    ({"extra_body": {"response_format": {"type": "json_object"}}}, "extra_body.response_format"),
    ({"sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
    ({"sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
    ({"sampling_params": [{"n": 1}, {"ebnf": "root ::= \"a\""}]}, "sampling_params[1].ebnf"),
    ({"parameters": {"grammar": {"type": "json", "value": SCHEMA}}}, "parameters.grammar"),
    ({"nvext": {"guided_choice": ["a"]}}, "nvext.guided_choice"),
]  # fmt: skip


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(("asked", "param"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_form_is_never_ignored(forms: httpx.Client, path: str, asked: dict[str, Any], param: str) -> None:
    answer = post(forms, path, **asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param in error["message"]
    if path != MESSAGES:
        assert error["param"] == param
    assert re.search("structured_outputs|response_format|leave it out", error["message"])


@pytest.mark.parametrize("name", ["response_format", "grammar", "json_schema", "regex", "ebnf"])
def test_messages_say_what_they_call_it(forms: httpx.Client, name: str) -> None:
    answer = post(forms, MESSAGES, **{name: {"type": "json_object"} if name == "response_format" else "a"})
    assert answer.status_code == 400, answer.text
    assert re.search("structured_outputs|output_config", answer.json()["error"]["message"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "text", "schema": SCHEMA}, "response_format.schema"),
    ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "response_format.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}, "response_format.schema"),
    ({"type": "json_schema"}, "response_format.json_schema.schema"), ({"type": "regex"}, "response_format.pattern"),
    ({"type": "structural_tag", "structures": []}, "response_format.type"),
    ({"type": "regex", "pattern": "a", "schema": SCHEMA}, "response_format.schema"),
    ({"type": "regex", "value": {"a": 1}}, "response_format.value"),
    ({"type": "json_object", "schema": {"sometimes": 1}}, "response_format.schema.sometimes"),
    ({"type": "json_schema", "schema": {"items": {"sometimes": 1}}}, "response_format.schema.items.sometimes"),
    ({"type": "regex", "pattern": "(a"}, "response_format.pattern"),
    ({"type": "grammar", "grammar": "nonsense"}, "response_format.grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "param"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_wrong_is_told_by_the_clients_name(forms: httpx.Client, asked: dict[str, Any], param: str) -> None:
    for path in (TEXT, CHAT, RESPONSES):
        field = {"text": {"format": asked}} if path == RESPONSES else {"response_format": asked}
        answer = post(forms, path, **field)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        name = param.replace("response_format", "text.format") if path == RESPONSES else param
        if asked == {"type": "json_schema"} and path == RESPONSES:
            name = "text.format.schema"
        assert error["param"] == name
        assert "structured_outputs" not in error["message"]
    wrong = post(forms, CHAT, grammar="root ::= nothing")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "grammar")
    both = post(forms, CHAT, grammar=GBNF, response_format={"type": "json_object"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "grammar")
    config = {"format": {"type": "json_schema", "schema": {"sometimes": 1}}}
    wrong = post(forms, MESSAGES, output_config=config)
    assert (wrong.status_code, "output_config.format.schema.sometimes" in wrong.text) == (400, True)


# -- fields that nobody knows -------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NESTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": {"type": "text", "foo": 1}}, "response_format.foo"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strct": True}}},
     "response_format.json_schema.strct"),
    (TEXT, {"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    (CHAT, {"tools": [TOOL, {**TOOL, "function": {"name": "g", "strct": True}}]}, "tools[1].function.strct"),
    (CHAT, {"tools": [{**TOOL, "foo": 1}]}, "tools[0].foo"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "foo": 1}}},
     "tool_choice.function.foo"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "foo": 1}]}]},
     "messages[0].content[0].foo"),
    (CHAT, {"prediction": {"type": "content", "content": [{"type": "text", "text": "a", "foo": 1}]}},
     "prediction.content[0].foo"),
    (RESPONSES, {"text": {"foo": 1}}, "text.foo"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strct": 1}}},
     "text.format.strct"),
    (RESPONSES, {"reasoning": {"efort": "low"}}, "reasoning.efort"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "foo": 1}]}]},
     "input[0].content[0].foo"),
    (RESPONSES, {"input": [{"role": "user", "content": "hi", "foo": 1}]}, "input[0].foo"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": {}, "defer_loading": True}]},
     "tools[0].defer_loading"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}]},
     "tools[0].defer_loading"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "auto", "foo": 1}}, "tool_choice.foo"),
    (MESSAGES, {"output_config": {"effort": "low", "task_budget": {}}}, "output_config.task_budget"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA, "strct": 1}}},
     "output_config.format.strct"),
    (MESSAGES, {"system": [{"type": "text", "text": "a", "foo": 1}]}, "system[0].foo"),
    (MESSAGES, {"messages": [{"role": "user", "content": "hi", "foo": 1}]}, "messages[0].foo"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "foo": 1}]}]},
     "messages[0].content[0].foo"),
    ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "foo": 1}]}]},
     "messages[0].content[0].foo"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "name"), NESTED, ids=lambda x: x if isinstance(x, str) else "")
def test_unknown_fields_within_objects_are_named(
    forms: httpx.Client, strict: httpx.Client, path: str, body: dict[str, Any], name: str
) -> None:
    def ask(http: httpx.Client) -> httpx.Response:
        return http.post(path, json=body) if path == "/tokenize" else post(http, path, **body)

    answer = ask(forms)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == name
    answer = ask(strict)
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


SENT_BY_SDKS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [
        {"role": "user", "name": "x",
         "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "strict": False,
                                                    "parameters": {"type": "object", "x-mine": {"foo": 1}}}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}},
        "stream_options": None, "metadata": {"regex": "a"}}),
    (RESPONSES, {"input": [
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "phase": "final_answer",
         "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": None},
        {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        {"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": None, "summary": "auto"}}),
    (MESSAGES, {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
                "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "citations": None}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "i", "name": "f", "input": {"foo": {"bar": 1}}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "is_error": False,
                                      "cache_control": {"type": "ephemeral"},
                                      "content": [{"type": "text", "text": "1"}]}]}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}},
                   "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), SENT_BY_SDKS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_the_sdks_send_is_known(strict: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = post(strict, path, **body)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers


def test_fields_of_a_message_are_its_templates(strict: httpx.Client) -> None:
    answer = post(strict, CHAT, messages=[{"role": "user", "content": "hi", "only_my_template_reads": 1}])
    assert answer.status_code == 200, answer.text


def test_many_unknown_fields_are_named_in_bounds() -> None:
    part = {"type": "text", "text": "a", "x" * 500: 1, "weiß": 2}
    body = {"messages": [{"role": "user", "content": [part] * 500}]}
    found = whole(checking(body, ChatRequest, REFUSED_FIELDS, ACCEPTED, strict=False))
    assert len(found) == 16
    assert all(len(name) <= 128 and name.isascii() for name in found)
    deep: Any = {"a": 1}
    for _ in range(90):
        deep = {"a": [deep]}
    assert whole(checking({**body, "unknown": deep}, ChatRequest, {}, ACCEPTED, strict=False))


@pytest.mark.parametrize(
    "body",
    [{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}]}] * 10_000},
     {"messages": [], "unknown": [[[1]] for _ in range(10_000)]}, {"messages": [], "tools": [{"foo": 1}] * 10_000}],
)  # fmt: skip
def test_long_bodies_are_looked_through_in_steps(body: dict[str, Any]) -> None:
    assert sum(1 for _ in checking(body, ChatRequest, {}, ACCEPTED, strict=False)) >= 39


def test_errors_within_a_renamed_field_keep_their_place() -> None:
    def told(param: str) -> tuple[str, str | None]:
        with pytest.raises(InputError) as caught, renamed({"structured_outputs.json": "text.format.schema"}):
            raise InputError(f"{param}: no", param=param)
        return str(caught.value), caught.value.param

    assert told("structured_outputs.json.items[0]") == (
        "text.format.schema.items[0]: no",
        "text.format.schema.items[0]",
    )
    assert told("structured_outputs.jsonx") == ("structured_outputs.jsonx: no", "structured_outputs.jsonx")


def test_every_format_type_says_what_it_takes() -> None:
    for kind in ("regex", "grammar", "json_schema", "json"):
        with pytest.raises(InputError, match="needs"):
            ResponseFormat(type=kind).form()
    assert ResponseFormat(type="text").form() is None
