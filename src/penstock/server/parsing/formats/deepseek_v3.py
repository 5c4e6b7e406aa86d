"""DeepSeek V3 and R1 (name behind the separator, JSON in a fence) and V3.1 (name before it, bare JSON)."""

from __future__ import annotations

from penstock.server.parsing.json_wire import bounded_arguments, closing
from penstock.server.parsing.loose_wire import MAX_NAME, NAME
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Broken, Markers, Steps

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_INSIDE = Markers((_CALL, _CALLS_END))
_ENDS = Markers((_CALL_END,))


def _read(r: Reader, opener: str) -> Steps[None]:
    if opener == _CALL:
        yield from _call(r)
        return
    while True:
        yield from r.space()
        word = yield from r.next_is(_INSIDE)
        r.take(len(word))
        if word != _CALL:
            if not word and not r.called:
                raise Broken
            return
        yield from _call(r)


def _call(r: Reader) -> Steps[None]:
    name = yield from r.run(NAME, limit=MAX_NAME)
    yield from r.expect(_SEP)
    fenced = (yield from r.space()) not in ("{", "")
    if fenced:
        name = yield from r.run(NAME, limit=MAX_NAME)
        yield from r.space()
        yield from r.expect("```json")
    r.begin(name)
    yield from bounded_arguments(r, _ENDS)
    r.end()
    if fenced:
        yield from r.close("```")
    yield from closing(r, _CALL_END)


FORMAT = Format("deepseek_v3", _read, (_CALLS, _CALL), signs=((_CALLS,), (_CALL,)))
