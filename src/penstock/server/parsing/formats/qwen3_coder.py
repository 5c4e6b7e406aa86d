"""Qwen 3 Coder, Qwen 3.5, Nemotron 3: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`."""

from __future__ import annotations

from penstock.server.parsing.loose_wire import MAX_NAME, NAME
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Markers, Steps, ignore
from penstock.server.parsing.xml_wire import Parameters

_OPEN = Markers(("<function=",))
_INSIDE = Markers(("<parameter=", "</function>", "</tool_call>"))
_KEY = Markers((">",))
_VALUE = Markers(("</parameter>",))


def _read(r: Reader, opener: str) -> Steps[None]:
    if opener == "<tool_call>":
        yield from r.space()
        yield from r.expect("<function=")
    while True:
        if (yield from _call(r)) == "</tool_call>":
            return
        yield from r.space()
        if not (yield from r.next_is(_OPEN)):
            yield from r.close("</tool_call>")
            return
        r.take(len("<function="))


def _call(r: Reader) -> Steps[str]:
    """A call from its name on; the marker that ended it."""
    name = yield from r.run(NAME, limit=MAX_NAME)
    yield from r.expect(">")
    r.begin(name)
    parameters = Parameters(r, trim=True)
    while (word := (yield from r.copy_until(_INSIDE, ignore))) == "<parameter=":
        key, _ = yield from r.until(_KEY)
        yield from parameters.read(key.strip(), _VALUE)
    parameters.end()
    return word


FORMAT = Format("qwen3_coder", _read, ("<tool_call>", "<function="), signs=(("<function=", "<parameter="),))
