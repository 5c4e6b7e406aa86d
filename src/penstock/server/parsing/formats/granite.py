"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`; its code model: `<function_call> {...}`."""

from __future__ import annotations

from penstock.server.parsing.json_wire import closing, json_calls
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Markers, Steps

_ENDS = Markers(("</tool_call>",))


def _read(r: Reader, opener: str) -> Steps[None]:
    yield from json_calls(r, _ENDS)
    if opener == "<tool_call>":
        yield from closing(r, "</tool_call>")


FORMAT = Format(
    "granite", _read, ("<|tool_call|>", "<tool_call>", "<function_call>"),
    signs=(("<|tool_call|>", "<|start_of_role|>"), ("<function_call>",)),
)  # fmt: skip
