"""A call as nothing but JSON, from models that were not taught marks for it, or not well: `{"name": ..., "arguments":
{...}}` or a list of these, alone, in a fenced block, or between the `<tools>` in which Qwen 2.5 is shown them.

JSON is what such models answer with when asked for JSON, too. So only an object that names a declared tool and goes on
with an object of arguments is a call, and everything else is text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from penstock.server.parsing.json_wire import declared_call, plain_call
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Steps, ignore

_LANGUAGE = re.compile(r"[a-z_]*")
_SEPARATORS = re.compile(r"[\s,;]*")
_CLOSES = {"```": "```", "<tools>": "</tools>", "[": "]"}
_READS = {True: plain_call, False: declared_call}


def _read(r: Reader, opener: str, plain: bool = False) -> Steps[None]:
    """`plain`: only what a grammar has bound (`text_or_calls`)."""
    if opener != "{":
        r.take(len(opener))
        if opener == "```":
            yield from r.run(_LANGUAGE, ignore)
    inner = "]" if opener != "[" and (yield from r.space()) == "[" else ""
    if inner:
        r.take(1)
    before = r.calls
    while True:
        yield from r.run(_SEPARATORS, ignore)
        if r.calls > before and (yield from r.peek()) != "{":
            break
        yield from _READS[plain](r)
    for word in (inner, _CLOSES.get(opener, "")):
        if word:
            yield from r.close(word)
    if opener in "{[":  # some open no block and close one
        yield from r.space()
        if (yield from r.peek(4)) in ("```", "```\n"):
            r.take(3)


FORMAT = Format("bare", _read, bare=("{", *_CLOSES))


@lru_cache(maxsize=32)
def loosely(format: Format, plain: bool = False) -> Format:
    """`format`, or a call as nothing but JSON. `plain`: that only as a grammar binds it."""
    own = () if format is FORMAT else (*format.opens, *format.bare)

    def read(r: Reader, opener: str) -> Steps[None]:
        yield from format.read(r, opener) if opener in own else _read(r, opener, plain)

    return replace(format, read=read, bare=tuple(dict.fromkeys((*format.bare, *FORMAT.bare))), plain=plain)
