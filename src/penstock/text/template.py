"""Chat templates: messages -> the text, or the ids, a model was trained to read."""

from __future__ import annotations

import re
import sys
from bisect import bisect
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes

from penstock.base.errors import InputError
from penstock.text.encoding import NO_LIMIT, Steps, run
from penstock.text.literals import Breaker, encode_broken, unused_marks
from penstock.text.messages import plain, read_messages, read_tools, strings
from penstock.text.sandbox import Sandbox, strftime_at
from penstock.text.template_meter import Meter, metered
from penstock.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1 << 16
MAX_OUTPUT_CHARS = 16 << 20
MAX_UNITS = 3_000_000
"""Work one rendering may do, about half a microsecond each; small conversations get an eighth of it. Some published
templates take time quadratic in the number of messages (Gemma 4: 20 s for 4000), which no server can allow."""
MAX_MEMORY_BYTES = 32 << 20
"""Bytes of all values a rendering may make and write; sixteen times the size of the conversation comes on top."""
MAX_COPIED_BYTES = 256 << 20
_ENTRY_BYTES = 256 << 10
"""On top of that for each message and tool but the first, up to the former."""

_FIELDS = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"))
"""Fields of the request itself."""
_RESERVED_NAMES = """
    bos_token eos_token unk_token pad_token tokenize conversation conversations tokenizer return_dict return_tensors
    padding truncation max_length raise_exception strftime_now namespace range dict cycler joiner loop self super
    caller varargs kwargs
"""
_RESERVED = _FIELDS | frozenset(_RESERVED_NAMES.split())
"""Names no request may set: the engine's own, and arguments of Hugging Face's function that mean nothing here."""

_COMMON = frozenset(("enable_thinking", "thinking", "thinking_budget", "reasoning_effort"))
"""Names every template takes, whether it reads them or not: clients send them to any model."""


class _Compiled(NamedTuple):
    template: jinja2.Template
    source: str
    names: frozenset[str]
    """Variables the template reads."""
    reads_parts: bool
    """Whether it goes through a message's content part by part."""


class _Markers(NamedTuple):
    all: frozenset[str]
    roles: frozenset[str]


def check_template(template: str) -> None:
    """Raises InputError if `template` cannot be run, or does not show a model what one user says."""
    probe = "What is 73914628?"  # in plain letters, which no way to print a message changes
    if probe not in render_chat(template, [{"role": "user", "content": probe}]):
        raise InputError("the chat template does not show what a user says", param="chat_template")


def choose_template(
    own: str | None, requested: str | None, *, trusted: bool, named: Mapping[str, str] | None = None,
    tools: bool = False,
) -> str:  # fmt: skip
    """The template to use: the request's if it brings one and requests are `trusted` to, else the model's own.

    As transformers does: a model may have templates under names, which a request may name; with `tools` it is the one
    for `tool_use`. Raises: InputError if there is none, or the request may not bring one.
    """
    named = named or {}
    if requested is not None and requested in named:
        return named[requested]
    if not requested and tools:
        own = named.get("tool_use", own)
    if not own and not requested and named:
        raise InputError(
            f"this model has chat templates for {', '.join(sorted(named))} only; name one of them as chat_template",
            param="chat_template",
        )
    if requested and not trusted:
        raise InputError(
            "this server does not run chat templates from requests; leave chat_template out", param="chat_template"
        )
    if not (requested or own):
        raise InputError("this model has no chat template; pass chat_template or a plain prompt", param="chat_template")
    return requested or own or ""


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True, continue_final_message: bool = False, bos_token: str = "", eos_token: str = "",
    kwargs: Mapping[str, Any] | None = None, max_chars: int = MAX_OUTPUT_CHARS,
    now: datetime | None = None,
) -> str:  # fmt: skip
    """The conversation as text, as Hugging Face's `apply_chat_template(tokenize=False)` renders it.

    `kwargs` are extra variables (`enable_thinking`, `documents`, ...): those the template reads and a few common ones.
    `now` is what a template that asks for the date is told; by default the clock of this machine.
    `continue_final_message` leaves the last message open; it excludes `add_generation_prompt`. Units: `max_chars` in
    characters. Raises: InputError for bad messages, unknown `kwargs` and whatever goes wrong in the template, which
    runs in a sandbox that bounds its work and its output.
    """
    compiled = _compile(template)
    variables = _variables(compiled, messages, tools, kwargs)
    return _render(
        compiled, variables, add_generation_prompt, continue_final_message, bos_token, eos_token, max_chars, now
    )


def encode_chat(
    tokenizer: Tokenizer, template: str, messages: Sequence[Mapping[str, Any]], *,
    tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
    continue_final_message: bool = False, kwargs: Mapping[str, Any] | None = None, max_chars: int = MAX_OUTPUT_CHARS,
    now: datetime | None = None,
) -> list[int]:  # fmt: skip
    """The conversation as ids. Text of messages, tools and `kwargs` can never become a control token.

    Control tokens are the tokenizer's special tokens, and other added tokens that the template itself writes (tool
    markers and the like). An assistant's message may repeat those of the latter that open or close no role, since the
    model wrote them (`<think>`). Where a
    client's text spells one, the spelling is encoded as plain text; everything else, and every conversation without
    such a spelling, is encoded exactly as `apply_chat_template(tokenize=True)` does.
    Raises: InputError, as `render_chat`.
    """
    return run(
        encode_chat_steps(
            tokenizer, template, messages, tools=tools, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, kwargs=kwargs, max_chars=max_chars, now=now,
        )
    )  # fmt: skip


def encode_chat_steps(
    tokenizer: Tokenizer, template: str, messages: Sequence[Mapping[str, Any]], *,
    tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
    continue_final_message: bool = False, kwargs: Mapping[str, Any] | None = None, max_chars: int = MAX_OUTPUT_CHARS,
    now: datetime | None = None, most: int = NO_LIMIT, size: int = 0,
) -> Steps[list[int]]:  # fmt: skip
    """The same in steps. `size`: characters of everything that is rendered, which is the first step.

    Raises: as `encode_chat`, and TooManyTokens for more than `most`.
    """
    yield size
    compiled = _compile(template)
    variables = _variables(compiled, messages, tools, kwargs)
    markers = _find_markers(template, frozenset(tokenizer.added_literals))
    breaker = Breaker(tokenizer, markers.all, markers.roles, template, variables)
    text = _render(
        compiled, breaker.broken(), add_generation_prompt, continue_final_message,
        tokenizer.bos_token, tokenizer.eos_token, max_chars, now,
    )  # fmt: skip
    return (yield from encode_broken(tokenizer, breaker, text, most))


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
    return _Compiled(template, source, names, _reads_parts(tree))


@lru_cache(maxsize=32)
def _find_markers(template: str, literals: frozenset[str]) -> _Markers:
    """Which added tokens a template writes, found in its text and by trying it.

    Those of roles are the nearest ones around what another than the assistant says, and the first of a generation
    prompt. Some templates build a marker of a role's name, so the text alone does not show them all.
    """
    written = {t for t in literals if t in template}
    roles: set[str] = set()
    probe = unused_marks([template, *literals], 1)[0] + "x"
    first = {"role": "user", "content": probe}
    for role in ("user", "system", "developer", "tool", "assistant"):
        for before in ([], [first]):
            try:
                calm, asked = _try(template, [*before, {"role": role, "content": probe}])
            except InputError:
                continue  # this template takes no such conversation
            found = sorted((m.start(), m[0]) for t in literals for m in re.finditer(re.escape(t), asked))
            written |= {t for _, t in found} | {t for t in literals if t in calm}
            at = asked.rfind(probe)
            if role != "assistant" and at >= 0:
                roles |= {t for _, t in [*found[: bisect(found, (at,))][-1:], *found[bisect(found, (at,)) :][:1]]}
            same = next((n for n, (a, b) in enumerate(zip(calm, asked, strict=False)) if a != b), len(calm))
            roles |= set([t for start, t in found if start > at and start + len(t) > same][:1])
    return _Markers(frozenset(written), frozenset(roles))


def _try(template: str, messages: list[dict[str, str]]) -> list[str]:
    """A conversation without and with a generation prompt."""
    compiled = _compile(template)
    variables = _variables(compiled, messages, None, None)
    return [_render(compiled, variables, asks, False, "", "", MAX_OUTPUT_CHARS, None) for asks in (False, True)]


def _variables(
    compiled: _Compiled,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    out: dict[str, Any] = {"documents": None}
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name, value in (kwargs or {}).items():
        if name in _FIELDS:
            reason = f"{name!r} is a field of the request itself"
        elif name in _RESERVED or name not in (compiled.names | _COMMON):
            reason = f"this model's template takes no {_short(name, 40)!r}"
        else:
            out[name] = plain(value, f"chat_template_kwargs.{name}")
            continue
        raise InputError(f"chat_template_kwargs: {reason}", param="chat_template_kwargs")
    documents = out["documents"]
    if documents is not None and not (isinstance(documents, list) and all(isinstance(d, dict) for d in documents)):
        raise InputError("documents must be a list of objects", param="chat_template_kwargs.documents")
    return out | {"messages": read_messages(messages, parts=compiled.reads_parts), "tools": read_tools(tools)}


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether a loop of the template runs over what a message's `content` is, or over a variable made of just that."""
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset()):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: Container[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    at: nodes.Node | None = node.arg if isinstance(node, nodes.Getitem) else None
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get" and node.args:
        at = node.args[0]
    return isinstance(at, nodes.Const) and at.value == "content"


def _render(
    compiled: _Compiled, variables: dict[str, Any], add_generation_prompt: bool, continue_final_message: bool,
    bos_token: str, eos_token: str, max_chars: int, now: datetime | None,
) -> str:  # fmt: skip
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt exclude each other; set add_generation_prompt to false",
            param="continue_final_message",
        )
    size = sum(map(len, strings(variables)))
    weight = sum(map(sys.getsizeof, strings(variables)))
    tail = ""
    if continue_final_message:
        tail = unused_marks([compiled.source, *strings(variables)], 1)[0]
        final = dict(variables["messages"][-1])
        # The space behind the mark shows whether the template trims the end of a message.
        if isinstance(final["content"], str):
            final["content"] += tail + " "
        else:
            last = final["content"][-1]
            final["content"] = [*final["content"][:-1], last | {"text": last["text"] + tail + " "}]
        variables = variables | {"messages": [*variables["messages"][:-1], final]}
    special = {
        "bos_token": bos_token, "eos_token": eos_token, "strftime_now": strftime_at(now or datetime.now()),
    }  # fmt: skip
    entries = len(variables["messages"]) + len(variables["tools"] or ())
    units = min(400_000 + size // 8 + 2000 * entries, MAX_UNITS)
    # Some templates copy a growing text for each message or tool (SmolLM3).
    copies = min((entries - 1) * _ENTRY_BYTES, MAX_COPIED_BYTES)
    limit = Meter(units, max_chars, MAX_MEMORY_BYTES + 16 * weight + copies)
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
