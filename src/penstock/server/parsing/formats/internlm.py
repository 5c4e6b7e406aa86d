"""InternLM 2: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

from __future__ import annotations

from penstock.server.parsing.json_wire import closing, json_calls
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Markers, Steps

_ENDS = Markers(("<|action_end|>",))


def _read(r: Reader, opener: str) -> Steps[None]:
    yield from r.space()
    yield from r.expect("<|plugin|>")
    yield from json_calls(r, _ENDS)
    yield from closing(r, "<|action_end|>")


FORMAT = Format("internlm", _read, ("<|action_start|>",), signs=(("<|action_start|>",), ("<|plugin|>",)))
