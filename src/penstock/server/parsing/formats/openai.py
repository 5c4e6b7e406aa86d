"""Plain JSON: a call or a list of calls, `{"name": ..., "arguments": {...}}` or OpenAI's nested shape."""

from __future__ import annotations

from penstock.server.parsing.json_wire import json_calls
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Steps


def _read(r: Reader, opener: str) -> Steps[None]:
    yield from json_calls(r)


FORMAT = Format("openai", _read, bare=("{", "["))
