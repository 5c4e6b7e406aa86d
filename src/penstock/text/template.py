"""Chat templates: messages -> the text, or the ids, a model was trained to read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta

from penstock.base.errors import InputError
from penstock.text.literals import Breaker, encode_broken, unused_marks
from penstock.text.messages import plain, read_messages, read_tools, strings
from penstock.text.sandbox import Sandbox
from penstock.text.template_meter import Meter, metered
from penstock.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1 << 17
MAX_OUTPUT_CHARS = 16 << 20
MAX_UNITS = 4_000_000
"""Work one rendering may do, about half a microsecond each; small conversations get a quarter of it. Some published
templates take time quadratic in the number of messages (Gemma 4: 20 s for 4000), which no server can allow."""

_RESERVED_NAMES = """
    messages tools documents add_generation_prompt continue_final_message bos_token eos_token unk_token pad_token
    tokenize chat_template conversation conversations tokenizer return_dict return_tensors padding truncation
    max_length raise_exception strftime_now namespace range dict cycler joiner loop self
"""
_RESERVED = frozenset(_RESERVED_NAMES.split())
"""Names no request may set: the engine's own, and arguments of Hugging Face's function that mean nothing here."""

_COMMON = frozenset(("enable_thinking", "thinking", "thinking_budget", "reasoning_effort"))
"""Names every template takes, whether it reads them or not: clients send them to any model."""


class _Compiled(NamedTuple):
    template: jinja2.Template
    source: str
    names: frozenset[str]
    """Variables the template reads."""


def template_from_config(config: Mapping[str, Any], name: str = "default") -> str | None:
    """The chat template of a `tokenizer_config.json`; some hold a list of named ones."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
        found = named.get(name, named.get("default"))
    return found if isinstance(found, str) else None


def check_template(template: str) -> None:
    """Raises InputError if `template` is not a chat template that can be run at all."""
    _compile(template)


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True, continue_final_message: bool = False, bos_token: str = "", eos_token: str = "",
    kwargs: Mapping[str, Any] | None = None, max_chars: int = MAX_OUTPUT_CHARS,
) -> str:  # fmt: skip
    """The conversation as text, as Hugging Face's `apply_chat_template(tokenize=False)` renders it.

    `kwargs` are extra variables (`enable_thinking`, ...): those the template reads and a few common ones.
    `continue_final_message` leaves the last message open; it excludes `add_generation_prompt`. Units: `max_chars` in
    characters. Raises: InputError for bad messages, unknown `kwargs` and whatever goes wrong in the template, which
    runs in a sandbox that bounds its work and its output.
    """
    compiled = _compile(template)
    variables = _variables(compiled, messages, tools, kwargs)
    return _render(compiled, variables, add_generation_prompt, continue_final_message, bos_token, eos_token, max_chars)


def encode_chat(
    tokenizer: Tokenizer, template: str, messages: Sequence[Mapping[str, Any]], *,
    tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
    continue_final_message: bool = False, kwargs: Mapping[str, Any] | None = None, max_chars: int = MAX_OUTPUT_CHARS,
) -> list[int]:  # fmt: skip
    """The conversation as ids. Text of messages, tools and `kwargs` can never become a control token.

    Control tokens are the tokenizer's special tokens, and other added tokens that the template itself writes (tool
    markers and the like; an assistant's message may repeat these, since the model wrote them: `<think>`). Where a
    client's text spells one, the spelling is encoded as plain text; everything else, and every conversation without
    such a spelling, is encoded exactly as `apply_chat_template(tokenize=True)` does.
    Raises: InputError, as `render_chat`.
    """
    compiled = _compile(template)
    variables = _variables(compiled, messages, tools, kwargs)
    markers = frozenset(t for t in tokenizer.added_literals if t in template) - tokenizer.special_literals
    breaker = Breaker(tokenizer, markers, template, variables)
    text = _render(
        compiled, breaker.broken(), add_generation_prompt, continue_final_message,
        tokenizer.bos_token, tokenizer.eos_token, max_chars,
    )  # fmt: skip
    return encode_broken(tokenizer, breaker, text)


@lru_cache(maxsize=32)
def _compile(source: str) -> _Compiled:
    if not isinstance(source, str):
        raise InputError(f"the chat template must be a string, not {type(source).__name__}", param="chat_template")
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InputError(
            f"the chat template has {len(source)} characters; {MAX_TEMPLATE_CHARS} are allowed", param="chat_template"
        )
    sandbox = Sandbox()
    try:
        tree = sandbox.parse(source)
        names = frozenset(meta.find_undeclared_variables(tree))
        template = sandbox.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        reason = _short(error.message or "syntax error")
        raise InputError(
            f"the chat template is broken in line {error.lineno}: {reason}", param="chat_template"
        ) from None
    except Exception as error:
        raise InputError(f"the chat template cannot be compiled: {_short(error)}", param="chat_template") from None
    return _Compiled(template, source, names)


def _variables(
    compiled: _Compiled,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in (kwargs or {}).items():
        if name in _RESERVED or name not in (compiled.names | _COMMON):
            raise InputError(
                f"chat_template_kwargs: this model's template takes no {_short(name, 40)!r}",
                param="chat_template_kwargs",
            )
        out[name] = plain(value, f"chat_template_kwargs.{name}")
    return out | {"messages": read_messages(messages), "tools": read_tools(tools), "documents": None}


def _render(
    compiled: _Compiled, variables: dict[str, Any], add_generation_prompt: bool, continue_final_message: bool,
    bos_token: str, eos_token: str, max_chars: int,
) -> str:  # fmt: skip
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt exclude each other; set add_generation_prompt to false",
            param="continue_final_message",
        )
    size = sum(map(len, strings(variables)))
    tail = ""
    if continue_final_message:
        tail = unused_marks([compiled.source, *strings(variables)], 1)[0]
        final = dict(variables["messages"][-1])
        # The space behind the mark shows whether the template trims the end of a message.
        final["content"] += tail + " "
        variables = variables | {"messages": [*variables["messages"][:-1], final]}
    special = {"bos_token": bos_token, "eos_token": eos_token}
    limit = Meter(min(1_000_000 + size // 8 + 2000 * len(variables["messages"]), MAX_UNITS), max_chars)
    try:
        with metered(limit):
            text = "".join(
                compiled.template.generate(**variables, **special, add_generation_prompt=add_generation_prompt)
            )
    except Exception as error:
        raise InputError(f"the chat template refused the messages: {_short(error)}", param="messages") from None
    if not tail:
        return text
    at = text.rfind(tail)
    if at < 0:
        raise InputError("the chat template leaves out the message to be continued", param="continue_final_message")
    return text[:at] if text[at : at + 2] == tail + " " else text[:at].rstrip()


def _short(error: object, limit: int = 200) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return (text or type(error).__name__)[:limit]
