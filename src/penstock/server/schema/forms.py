"""What a request asks of the form of its answer, under every name that servers have for it: honoured or refused.

A client that asked for a form must never get free text because the name was another server's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.server.schema.known import PAUSE


@dataclass(frozen=True)
class Form:
    """What is asked, and under which name: errors speak of it."""

    param: str
    asked: StructuredOutputs

    @property
    def names(self) -> dict[str, str]:
        """Our name -> the client's."""
        if self.param == "structured_outputs":
            return {}
        kind = next(name for name in self.asked.__struct_fields__ if getattr(self.asked, name) is not None)
        return {f"structured_outputs.{kind}": self.param}


def only(forms: Iterable[Form | None]) -> Form | None:
    """Raises InputError if there are two."""
    given = [form for form in forms if form is not None]
    if len(given) > 1:
        one, other = given[0].param, given[1].param
        raise InputError(f"{one} and {other} exclude each other; give one of them", param=other)
    return given[0] if given else None


class StructuredOutputsField(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def chosen(self) -> StructuredOutputs:
        """Raises InputError for options that would change what is asked, silently."""
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name):
                raise InputError(
                    f"structured_outputs.{name} is not supported; leave it out", param=f"structured_outputs.{name}"
                )
        return StructuredOutputs(
            json=self.json, regex=self.regex, choice=self.choice, grammar=self.grammar, json_object=self.json_object,
            structural_tag=self.structural_tag,
        )  # fmt: skip


class ResponseFormatSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    schema: dict[str, Any] | str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's: text, json_object, or json_schema with `json_schema.schema` (in the Responses API: `schema`).

    Other servers': json_object with a `schema` (llama.cpp), json with a `value` (TGI); regex with a `pattern`, `regex`,
    `regex_schema` or `value`; grammar with a `grammar`.
    """

    type: str
    json_schema: ResponseFormatSchema | None = None
    name: str | None = None
    strict: bool | None = None
    description: str | None = None
    schema: dict[str, Any] | str | None = None
    value: dict[str, Any] | str | None = None
    pattern: str | None = None
    regex: str | None = None
    regex_schema: str | None = None
    grammar: str | None = None

    def form(self, where: str = "response_format", schema_at: str = "json_schema.schema") -> Form | None:
        """`schema_at`: where clients of this path are used to say a schema.

        Raises InputError for a type that does not exist, and for what its type would ignore.
        """
        if self.type not in _TYPES:
            raise InputError(
                f"{where}.type must be text, json_object, json_schema, regex or grammar, not {self.type[:40]!r}",
                param=f"{where}.type",
            )
        kind, takes = _TYPES[self.type]
        given = dict(self._given())
        for name in given:
            if name not in takes:
                raise InputError(
                    f"{where}.{name} does not belong to the type {self.type}; change the type or leave it out",
                    param=f"{where}.{name}",
                )
        if kind is None:
            return None
        if self.type == "json_object" and not any(given.values()):
            return Form(where, StructuredOutputs(json_object=True))
        if not given:
            name = schema_at if kind == "json" else takes[0]
            raise InputError(f"{where} of type {self.type} needs {name}", param=f"{where}.{name}")
        return only(Form(f"{where}.{name}", _asked(kind, value, f"{where}.{name}")) for name, value in given.items())

    def _given(self) -> Iterator[tuple[str, Any]]:
        if self.json_schema is not None and self.json_schema.schema is not None:
            yield "json_schema.schema", self.json_schema.schema
        for name in ("schema", "value", "pattern", "regex", "regex_schema", "grammar"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)


_SCHEMA = ("json_schema.schema", "schema", "value")
_REGEX = ("pattern", "regex", "regex_schema", "value")
_TYPES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "text": (None, ()),
    "json_object": ("json", ("schema", "value")),
    "json_schema": ("json", _SCHEMA),
    "json": ("json", _SCHEMA),
    "regex": ("regex", _REGEX),
    "regex_schema": ("regex", _REGEX),
    "grammar": ("grammar", ("grammar", "value")),
}
"""Type -> which structured output it is, and the fields that may say it."""


def _asked(kind: str, value: Any, where: str) -> StructuredOutputs:
    if kind == "json" and isinstance(value, dict | str):
        return StructuredOutputs(json=value)
    if kind == "regex" and isinstance(value, str):
        return StructuredOutputs(regex=value)
    if kind == "grammar" and isinstance(value, str):
        return StructuredOutputs(grammar=value)
    raise InputError(f"{where} must be {_KINDS[kind]}", param=where)


_KINDS = {"json": "a JSON schema", "regex": "a regular expression, as a text", "grammar": "a grammar, as a text"}


class ForeignForms(msgspec.Struct, kw_only=True):
    """Other servers' names at the top of a request; "" is the same as leaving one out.

    `grammar`: llama.cpp's, in GBNF (Lark is taken as well), or TGI's object with a type and a value. `json_schema`:
    llama.cpp's and SGLang's. `regex`, `ebnf`: SGLang's.
    """

    grammar: str | dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def foreign_forms(self) -> Iterator[Form | None]:
        """Raises InputError."""
        return foreign_forms(self.grammar, self.json_schema, self.regex, self.ebnf)


def foreign_forms(
    grammar: str | dict[str, Any] | None, json_schema: dict[str, Any] | str | None, regex: str | None = None,
    ebnf: str | None = None,
) -> Iterator[Form | None]:  # fmt: skip
    """What the fields of `ForeignForms` ask for. Raises InputError."""
    if isinstance(grammar, dict):
        try:
            yield msgspec.convert(grammar, ResponseFormat, strict=True).form("grammar")
        except msgspec.ValidationError:
            raise InputError(
                'grammar must be a text in GBNF, or {"type": "json" or "regex", "value": ...}', param="grammar"
            ) from None
    elif grammar:
        yield Form("grammar", StructuredOutputs(grammar=grammar))
    if json_schema is not None and json_schema != "":
        yield Form("json_schema", StructuredOutputs(json=json_schema))
    if regex:
        yield Form("regex", StructuredOutputs(regex=regex))
    if ebnf:
        yield Form("ebnf", StructuredOutputs(grammar=ebnf))


def _gone(kind: str) -> tuple[tuple[Any, ...], str]:
    return ("", None), f"is gone; write structured_outputs: {{{kind}: ...}} instead"


def _elsewhere(kind: str) -> tuple[tuple[Any, ...], str]:
    return ("", None), f"belongs to another API; write structured_outputs: {{{kind}: ...}} here"


REFUSED_FORMS: dict[str, tuple[tuple[Any, ...], str]] = {
    "guided_json": _gone('"json"'),
    "guided_regex": _gone('"regex"'),
    "guided_choice": _gone('"choice"'),
    "guided_grammar": _gone('"grammar"'),
    "guided_json_object": ((False,), 'is gone; write structured_outputs: {"json_object": true} instead'),
    "guided_decoding": _gone('"json"'),
    "guided_decoding_params": _gone('"json"'),
    "guided_decoding_backend": ((), "is gone; there is one backend, leave it out"),
    "guided_whitespace_pattern": ((), "is gone; write structured_outputs instead, without a pattern for blanks"),
    "structural_tag": ((), "is not supported; write structured_outputs with json, regex, choice or grammar"),
    "grammar_lazy": ((False,), "is not supported: a grammar binds the answer from its beginning; leave it out"),
    "grammar_triggers": (([],), "is not supported: a grammar binds the answer from its beginning; leave it out"),
    "format": (("",), "is not the name of it here; write response_format"),
}
"""Names under which nothing is honoured: values that change nothing, and why any other is refused."""

REFUSED_IN_MESSAGES = {
    **REFUSED_FORMS,
    "response_format": (({"type": "text"},), "is OpenAI's name; write output_config with a format"),
    "grammar": _elsewhere('"grammar"'),
    "json_schema": _elsewhere('"json"'),
    "regex": _elsewhere('"regex"'),
    "ebnf": _elsewhere('"grammar"'),
}

_NAMES = frozenset(
    (*REFUSED_IN_MESSAGES, "structured_outputs", "output_format", "output_config", "text_format", "guided_options")
) - {"format"}  # fmt: skip


def misplaced(value: Any, path: str) -> Iterator[str | None]:
    """Where in `value`, a field that nobody knows, something is asked of the answer's form: there it has no effect.

    None, every now and then: this may be interrupted.
    """
    levels: list[Iterator[tuple[str | int, Any]]] = [iter([(path.rpartition(".")[2], value)])]
    above: list[str | int] = []
    visited = 0
    while levels:
        for name, item in levels[-1]:
            visited += 1
            if visited % PAUSE == 0:
                yield None
            if name in _NAMES and item not in (None, "", [], {}, False):
                inner = [*above, name][1:]
                yield path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
            elif isinstance(item, dict | list):
                above.append(name)
                levels.append(iter(item.items()) if isinstance(item, dict) else enumerate(item))
                break
        else:
            levels.pop()
            if above:
                above.pop()


def string_in(item: Mapping[str, Any], name: str, where: str, *, empty: bool = False) -> str:
    """The text of a field of `where`, which may be `empty` or not. Raises InputError."""
    value = item.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise InputError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
