"""A call as nothing but JSON, from models that were not taught marks for it, or not well: `{"name": ..., "arguments":
{...}}` or a list of these, alone, in a fenced block, or between the `<tools>` in which Qwen 2.5 is shown them.

JSON is what such models answer with when asked for JSON, too. So only an object that names a declared tool and goes on
with an object of arguments is a call, and everything else is text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from penstock.server.parsing.json_wire import declared_call
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Steps, ignore

_LANGUAGE = re.compile(r"[a-z_]*")
_SEPARATORS = re.compile(r"[\s,;]*")
_CLOSES = {"```": "```", "<tools>": "</tools>", "[": "]"}


def _read(r: Reader, opener: str) -> Steps[None]:
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
        yield from declared_call(r)
    for word in (inner, _CLOSES.get(opener, "")):
        if word:
            yield from r.close(word)


FORMAT = Format("bare", _read, bare=("{", *_CLOSES))


@lru_cache(maxsize=32)
def loosely(format: Format) -> Format:
    """`format`, or a call as nothing but JSON."""

    def read(r: Reader, opener: str) -> Steps[None]:
        yield from (format.read if opener in (*format.opens, *format.bare) else _read)(r, opener)

    others = tuple(word for word in FORMAT.bare if word not in (*format.opens, *format.bare))
    return replace(format, read=read, bare=format.bare + others)
