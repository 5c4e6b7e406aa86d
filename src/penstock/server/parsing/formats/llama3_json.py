"""Llama 3.1 to 3.3: the answer is `{"name": ..., "parameters": {...}}`, several with a semicolon between them."""

from __future__ import annotations

import re

from penstock.server.parsing.json_wire import json_call
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Steps, ignore

_BETWEEN = re.compile(r"[\s;,]*")


def _read(r: Reader, opener: str) -> Steps[None]:
    yield from json_call(r)
    while True:
        yield from r.run(_BETWEEN, ignore)
        if (yield from r.peek()) != "{":
            return
        yield from json_call(r)


FORMAT = Format(
    "llama3_json", _read, ("<|python_tag|>",), bare=("{",),
    signs=(("<|python_tag|>",), ('"parameters": ', "ipython"), ('\\"parameters\\": ', "ipython")),
)  # fmt: skip
