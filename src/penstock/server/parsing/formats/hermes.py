"""Hermes 2 and 3, Qwen 2.5 and 3, Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from penstock.server.parsing.json_wire import closing, json_calls
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Markers, Steps

_ENDS = Markers(("</tool_call>",))


def _read(r: Reader, opener: str) -> Steps[None]:
    yield from json_calls(r, _ENDS)
    yield from closing(r, "</tool_call>")


FORMAT = Format(
    "hermes", _read, ("<tool_call>",), shape=('\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    signs=(("<tool_call>", '"name"'), ("<tool_call>", '\\"name\\"')),
)  # fmt: skip
