"""Llama 4, OLMo 3 and others: `[f(a=1), g(b="x")]`, bare or between markers."""

from __future__ import annotations

from penstock.server.parsing.loose_wire import keyword_calls
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Markers, Steps

_LIST = Markers(("]",))
_BLOCK = Markers(("</function_calls>",))


def _read(r: Reader, opener: str) -> Steps[None]:
    if opener == "<function_calls>":
        yield from keyword_calls(r, _BLOCK)
        return
    yield from r.space()
    yield from r.expect("[")
    yield from keyword_calls(r, _LIST)
    if opener == "<|python_start|>":
        yield from r.close("<|python_end|>")


FORMAT = Format(
    "pythonic", _read, ("<|python_start|>", "<function_calls>"), bare=("[",),
    signs=(("<|python_start|>",), ("<function_calls>",), ("[func_name1(",)),
)  # fmt: skip
