"""Where the words of messages stand in the text that a chat template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.base.errors import InputError
from penstock.text.literals import unused_marks
from penstock.text.messages import strings
from penstock.text.template import render_chat

INSTRUCTIONS = ("system", "developer")
"""Roles whose words tell the model what to do."""
CHANGED = (
    "prompt_compression: this model's chat template changes what messages say, so their words cannot be found in the "
    "prompt; name the text to compress as prompt_compression.context"
)


class Contents(NamedTuple):
    """`text`: the conversation; `stretches`: (begin, end) in its UTF-8 bytes of the chosen contents, in order."""

    text: str
    stretches: list[tuple[int, int]]


def chosen(messages: Sequence[Mapping[str, Any]], wanted: Sequence[int] | None, param: str) -> list[int]:
    """Indices of the messages meant: those named, or all but instructions. Raises InputError."""
    if wanted is None:
        return [n for n, message in enumerate(messages) if message.get("role") not in INSTRUCTIONS]
    for n in wanted:
        if not -len(messages) <= n < len(messages):
            raise InputError(f"{param}: there is no message {n}; there are {len(messages)}", param=param)
    return sorted({n % len(messages) for n in wanted})


def find_contents(
    template: str, messages: Sequence[Mapping[str, Any]], which: Sequence[int], **render: Any
) -> Contents:  # fmt: skip
    """Renders the conversation again with marks around the contents of the messages `which`, and looks for them.

    `render`: as for `render_chat`. Raises InputError if the template does not write these contents as they are.
    """
    text = render_chat(template, messages, **render)
    plain = [dict(message) for message in messages]
    (mark,) = unused_marks([template, *strings(plain), *strings(dict(render.get("kwargs") or {}))], 1)
    for strip in (False, True):
        marked = [_marked(m, mark, strip) if n in set(which) else m for n, m in enumerate(plain)]
        pieces = render_chat(template, marked, **render).split(mark)
        if "".join(pieces) == text and len(pieces) % 2:
            return Contents(text, _stretches(pieces))
    raise InputError(CHANGED, param="prompt_compression")


def _marked(message: Mapping[str, Any], mark: str, strip: bool) -> dict[str, Any]:
    """A copy with `mark` before and behind each text of its content; `strip`: white space at its ends outside."""

    def around(text: str) -> str:
        core = text.strip() if strip else text
        if not core:
            return text
        before, _, behind = text.partition(core)
        return f"{before}{mark}{core}{mark}{behind}"

    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": around(content)}
    if isinstance(content, Sequence):
        parts = [{**p, "text": around(p["text"])} if isinstance(p, Mapping) and isinstance(p.get("text"), str) else p
                 for p in content]  # fmt: skip
        return {**message, "content": parts}
    return dict(message)


def _stretches(pieces: Sequence[str]) -> list[tuple[int, int]]:
    """Every second piece, as bytes from the beginning."""
    out, at = [], 0
    for n, piece in enumerate(pieces):
        size = len(piece.encode("utf-8", "replace"))
        if n % 2 and size:
            out.append((at, at + size))
        at += size
    return out
