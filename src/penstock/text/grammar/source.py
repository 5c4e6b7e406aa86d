"""From what a client asks for to llguidance's form of it."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs, Thought
from penstock.text.grammar.exact import rules_of
from penstock.text.grammar.gbnf import gbnf_to_lark
from penstock.text.grammar.nesting import (
    MAX_REGEX_REPEATS,
    MAX_RULE_REPEATS,
    check_repeats,
    regex_repeats,
    rule_repeats,
)
from penstock.text.grammar.schema import MAX_SCHEMA_CHARS, compiled_form

MAX_GRAMMAR_CHARS = 256 << 10
MAX_RULES = 500
"""The library descends rule by rule when it compiles, on the stack: some thousands overrun it."""
MAX_OPEN = 100
"""Brackets of a line that nothing closes; looking for their ends takes the square of their number."""
MAX_REGEX_CHARS = 64 << 10
MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 1 << 20
"""Of all choices together."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_WHITESPACE = r"\x20|\x0A[\x20\x09]{0,32}"
"""Between the parts of a JSON text: a space, or a new line and its indentation. Without a bound, models that like
blanks write them until their tokens run out. Source: llama.cpp's JSON grammars do the same."""
_OPTIONS = {"whitespace_pattern": _WHITESPACE}
_JSON = re.compile(r"%json\s*")
_ESCAPE = re.compile(r"\\.")
_RULE = re.compile(r"(?m)^[ \t]*[\w-]+\s*(?:\[[^\]\n]*\]|\{[^}\n]*\})?\s*:")
_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|start\s*(\[[^\]]*\])?\s*:(?!:))")


class Compiled(StructuredOutputs, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Structured output that is in llguidance's form already, checked by whoever made it. Never decoded from a wire.

    Attributes:
        text: what `grammar_of`, `lark_grammar` or `lead.led` returned.
        thought: what `text` lets come before the answer.
    """

    text: str = ""
    thought: Thought | None = None


def grammar_of(asked: StructuredOutputs, param: str = "structured_outputs") -> str:
    """llguidance's form of what is asked for; whether it compiles is another question (`compile`).

    `param` is how the client calls `asked`. Raises: InputError.
    """
    if isinstance(asked, Compiled):
        return asked.text
    kind = kind_of(asked, param)
    value: Any = getattr(asked, kind)
    where = f"{param}.{kind}"
    if kind == "json":
        return json_grammar(_parsed(value, where), where)
    if kind == "json_object":
        return json_grammar({"type": "object"}, where)
    if kind == "regex":
        _text(value, MAX_REGEX_CHARS, where)
        check_repeats(regex_repeats(value), MAX_REGEX_REPEATS, where)
        return json.dumps({"grammars": [{"lark_grammar": f"start: {_lark_regex(value)}"}]})
    if kind == "choice":
        return _choice(value, where)
    if kind == "grammar":
        return _rules(value, where)
    raise InputError(f"{where} is not supported; use json, regex, choice or grammar", param=where)


def portable(asked: StructuredOutputs, param: str = "structured_outputs") -> StructuredOutputs:
    """`asked` with a schema as text: between processes, a number has 64 bits at most. Raises: InputError."""
    if isinstance(asked, Compiled) or asked.json is None or isinstance(asked.json, str):
        return asked
    return msgspec.structs.replace(asked, json=_dumps(asked.json, f"{param}.json"))


def kind_of(asked: Any, param: str = "structured_outputs") -> str:
    """Which of the fields is set. Raises: InputError unless exactly one is."""
    if not isinstance(asked, StructuredOutputs):
        raise InputError(f"{param} must be StructuredOutputs, not {type(asked).__name__}", param=param)
    if isinstance(asked, Compiled):
        return "grammar"
    given = [kind for kind in KINDS if getattr(asked, kind) not in (None, False)]
    if len(given) != 1:
        what = f"{' and '.join(given)} are" if given else "nothing is"
        raise InputError(f"{param}: {what} set; exactly one of {', '.join(KINDS[:-1])} is possible", param=param)
    return given[0]


def json_grammar(schema: Any, path: str) -> str:
    """The form of a JSON schema, or of {"type": "object"} for any object. Raises: InputError naming the place."""
    form = compiled_form(schema, path)
    apart = rules_of(form, path, _OPTIONS, "json_")
    if apart is None:
        return _dumps({"grammars": [{"json_schema": _options(form)}]}, path)
    return lark_grammar(f"start: {apart[0]}\n{apart[1]}")


def lark_grammar(text: str) -> str:
    """The form of a grammar in Lark syntax."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def lark_json(schema: dict[str, Any]) -> str:
    """A JSON schema as an operand in Lark. Raises: InputError for what would not be enforced."""
    return "%json " + _dumps(_options(compiled_form(schema, "schema")), "schema")


def lark_literal(text: str) -> str:
    """A text as an operand in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _options(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": _OPTIONS}


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    _text(value, MAX_SCHEMA_CHARS, where)
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}", param=where) from None


def _dumps(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {str(error)[:100]}", param=where) from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise InputError(f"{where} has {len(text)} characters; at most {MAX_SCHEMA_CHARS} are possible", param=where)
    return text


def _lark_regex(regex: str) -> str:
    """A regular expression between slashes: bare ones in it are escaped, line ends are spelled."""
    out, escaped = [], False
    for char in regex:
        if escaped:
            out.append("\\" + {"\n": "n", "\r": "r"}.get(char, char))
        elif char != "\\":
            out.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(char, char))
        escaped = char == "\\" and not escaped
    return "/" + "".join(out) + "\\" * escaped + "/"


def _choice(value: Any, where: str) -> str:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InputError(f"{where} must be a list of 1 to {MAX_CHOICES} texts", param=where)
    for n, text in enumerate(value):
        _text(text, MAX_CHOICE_CHARS, f"{where}[{n}]")
    if sum(map(len, value)) > MAX_CHOICE_CHARS:
        raise InputError(f"{where}: all texts together may have {MAX_CHOICE_CHARS} characters", param=where)
    return lark_grammar("start: " + " | ".join(map(lark_literal, dict.fromkeys(value))))


def _rules(value: Any, where: str) -> str:
    _text(value, MAX_GRAMMAR_CHARS, where)
    if not value.strip():
        raise InputError(f"{where} is empty; it needs a rule named start (Lark) or root (GBNF)", param=where)
    num_rules = len(_RULE.findall(value))
    if num_rules > MAX_RULES:
        raise InputError(f"{where} has {num_rules} rules; at most {MAX_RULES} are possible", param=where)
    if any(line.rpartition("]")[2].count("[") > MAX_OPEN for line in _ESCAPE.sub("", value).splitlines()):
        raise InputError(f"{where} has a line of more than {MAX_OPEN} brackets [ without their ends", param=where)
    check_repeats(rule_repeats(value), MAX_RULE_REPEATS, where)
    if not _LARK.search(value):
        return lark_grammar(gbnf_to_lark(value, where))
    parts: list[str] = []
    rules, done = "", 0
    for n, found in enumerate(_JSON.finditer(value)):
        if found.start() < done:
            continue  # within a schema
        at = f"{where}.%json[{n}]"
        try:
            schema, end = json.JSONDecoder().raw_decode(value, found.end())
        except (ValueError, RecursionError):
            raise InputError(f"{where}: %json number {n + 1} is not followed by JSON", param=where) from None
        form = compiled_form(schema, at)
        apart = rules_of(form, at, _OPTIONS, f"json_{n}_")
        if apart is None:
            parts += [value[done : found.end()], _dumps(_options(form), at)]
        else:
            parts += [value[done : found.start()], apart[0]]
            rules += "\n" + apart[1]
        done = end
    return lark_grammar("".join(parts) + value[done:] + rules)


def _text(value: Any, most: int, where: str) -> None:
    if not isinstance(value, str):
        raise InputError(f"{where} must be a text", param=where)
    if len(value) > most:
        raise InputError(f"{where} has {len(value)} characters; at most {most} are possible", param=where)
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise InputError(f"{where} holds a lone surrogate, which no text has", param=where)
