"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since 2025 `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

from penstock.server.parsing.ids import mistral_id
from penstock.server.parsing.json_wire import NONE, json_arguments, json_calls
from penstock.server.parsing.loose_wire import MAX_NAME, NAME
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Broken, Markers, Steps

_BEHIND_NAME = Markers(("[ARGS]", "[CALL_ID]", "{"))
_CALL = Markers(("[TOOL_CALLS]",))


def _read(r: Reader, opener: str) -> Steps[None]:
    if (yield from r.space()) in ("[", "{"):
        yield from json_calls(r, _CALL)
        return
    name = yield from r.run(NAME, limit=MAX_NAME)
    yield from r.space()
    word = yield from r.next_is(_BEHIND_NAME)
    if not word:
        raise Broken
    call_id = None
    if word == "[CALL_ID]":
        r.take(len(word))
        call_id = (yield from r.run(NAME, limit=MAX_NAME)) or None
        word = "[ARGS]"
    if word == "[ARGS]":
        yield from r.expect(word)
    r.begin(name, call_id)
    yield from json_arguments(r, NONE, r.write)
    r.end()


FORMAT = Format("mistral", _read, ("[TOOL_CALLS]",), new_id=mistral_id, signs=(("[TOOL_CALLS]",),))
