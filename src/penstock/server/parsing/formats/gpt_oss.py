"""gpt-oss: every message has a header that names its channel; thoughts, calls and answers are channels."""

from __future__ import annotations

import re

from penstock.server.parsing.reader import Format, Reader
from penstock.server.parsing.tape import End, Markers, Sink, Steps

_BODY = Markers(("<|message|>",))
_ENDS = Markers(("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"))
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_TO = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_\-]+)")


def _read(r: Reader, opener: str) -> Steps[None]:
    while True:
        head, _ = yield from r.until(_BODY)
        channel, to = _CHANNEL.search(head), _TO.search(head)
        if to and to[1] in r.tools:
            r.begin(to[1])
            sink: Sink = r.write
        else:
            r.let_go()
            sink = r.think if channel and channel[1] == "analysis" else r.say
        try:
            yield from r.copy_until(_ENDS, sink)
        except End:
            # The tokens that end a turn are not shown: the end of the output is the end of the message.
            if r.in_call:
                r.end()
            return
        if r.in_call:
            r.end()
        r.hold()
        if not (yield from r.peek()):
            return


FORMAT = Format("gpt_oss", _read, whole=True, signs=(("<|channel|>", "<|message|>"),))
