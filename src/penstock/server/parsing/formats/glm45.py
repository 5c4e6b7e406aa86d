"""GLM 4.5 to 4.7: `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`, with or without lines."""

from __future__ import annotations

from penstock.server.parsing.loose_wire import MAX_NAME, NAME
from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import Broken, Markers, Steps, ignore
from penstock.server.parsing.xml_wire import Parameters

_BEHIND_NAME = Markers(("\n", "<arg_key>", "</tool_call>"))
_INSIDE = Markers(("<arg_key>", "</tool_call>"))
_KEY = Markers(("</arg_key>",))
_BEFORE_VALUE = Markers(("<arg_value>",))
_VALUE = Markers(("</arg_value>",))


def _read(r: Reader, opener: str) -> Steps[None]:
    yield from r.space()
    name = yield from r.run(NAME, limit=MAX_NAME)
    if not (yield from r.next_is(_BEHIND_NAME)):
        raise Broken
    r.begin(name)
    parameters = Parameters(r, trim=False)
    while (yield from r.copy_until(_INSIDE, ignore)) == "<arg_key>":
        key, _ = yield from r.until(_KEY)
        yield from r.copy_until(_BEFORE_VALUE, ignore)
        yield from parameters.read(key.strip(), _VALUE)
    parameters.end()


FORMAT = Format("glm45", _read, ("<tool_call>",), signs=(("<arg_key>", "<arg_value>"),))
