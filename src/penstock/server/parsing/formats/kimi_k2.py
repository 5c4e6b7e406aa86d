"""Kimi K2: a section of `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

The text before the arguments is the call's id, which the model expects to see again; so it is told as the id.
"""

from __future__ import annotations

import re

from penstock.server.parsing.json_wire import bounded_arguments, closing
from penstock.server.parsing.loose_wire import MAX_NAME
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Broken, Markers, Steps

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_INSIDE = Markers((_CALL, _SECTION_END))
_ENDS = Markers((_CALL_END,))
_ID = re.compile(r"[A-Za-z0-9_.:\-]*")
_NUMBERED = re.compile(r"(?:functions\.)?(.*?)(?::[0-9]+)?")


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
    yield from r.space()
    call_id = yield from r.run(_ID, limit=MAX_NAME)
    yield from r.space()
    yield from r.expect(_ARGUMENTS)
    parts = _NUMBERED.fullmatch(call_id)
    assert parts is not None
    r.begin(parts[1], call_id)
    yield from bounded_arguments(r, _ENDS)
    r.end()
    yield from closing(r, _CALL_END)


FORMAT = Format("kimi_k2", _read, (_SECTION, _CALL), signs=((_SECTION,), (_CALL, _ARGUMENTS)))
