"""Gemma 4: `<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`."""

from __future__ import annotations

from penstock.server.parsing.loose_wire import MAX_NAME, NAME, members
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Steps


def _read(r: Reader, opener: str) -> Steps[None]:
    yield from r.space()
    yield from r.expect("call:")
    name = yield from r.run(NAME, limit=MAX_NAME)
    yield from r.expect("{")
    yield from members(r, name, ":", "}")
    yield from r.close("<tool_call|>")


FORMAT = Format("gemma4", _read, ("<|tool_call>",), signs=(("<|tool_call>",),))
