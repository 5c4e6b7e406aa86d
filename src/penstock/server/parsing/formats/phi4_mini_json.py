"""Phi 4 mini: `functools[{"name": ..., "arguments": {...}}, ...]` or `<|tool_call|>[...]<|/tool_call|>`."""

from __future__ import annotations

from penstock.server.parsing.json_wire import closing, json_calls
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Broken, Markers, Steps

_ENDS = Markers(("<|/tool_call|>",))


def _read(r: Reader, opener: str) -> Steps[None]:
    if opener == "functools" and (yield from r.space()) not in ("[", ""):
        raise Broken
    yield from json_calls(r, _ENDS)
    if opener != "functools":
        yield from closing(r, "<|/tool_call|>")


FORMAT = Format(
    "phi4_mini_json", _read, ("functools", "<|tool_call|>"), signs=(("functools",), ("<|tool_call|>", "<|/tool_call|>"))
)
