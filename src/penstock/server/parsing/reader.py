"""Reader: a tape, and the calls, thoughts and text that are found on it. Formats are written against this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.server.parsing.ids import call_id
from penstock.server.parsing.tape import Broken, Steps, Tape

_SEPARATORS = " \t\r\n,;"
"""What stands between calls."""


class Reader(Tape):
    """`tools`: the schemas of the arguments, by name. Without `parallel`, only the first call is told.

    Attributes:
        calls: how many have begun.
        schema: that of the call that began last.
    """

    def __init__(self, tools: Mapping[str, Any], new_id: Callable[[], str] = call_id, *, parallel: bool = True) -> None:
        super().__init__()
        self.tools = tools
        self.calls = 0
        self.schema: Any = None
        self._new_id = new_id
        self._parallel = parallel
        self._events: list[Event] = []
        self._index: int | None = None
        self._wrote = False
        self._blank: list[str] = []
        """White space that is told only if text follows: next to calls it belongs to nobody."""
        self._after_call = False
        self.fresh_line = True
        """Only white space since the last line feed, or the beginning, or a call."""

    @property
    def called(self) -> bool:
        return self.calls > 0

    # -- calls ---------------------------------------------------------------------------------------------------

    def begin(self, name: str, id: str | None = None) -> None:
        """A call of `name` begins; what was held is part of it. Raises Broken if there is no such tool."""
        if name not in self.tools:
            raise Broken
        self.let_go()
        self._index = self.calls if self._parallel or self.calls == 0 else None
        self.calls += 1
        self.in_call, self._wrote, self._after_call, self.fresh_line = True, False, True, True
        self.schema = self.tools[name]
        if self._index is not None:
            self._events.append(CallStart(self._index, id or self._new_id(), name))

    def write(self, text: str) -> None:
        """A piece of the arguments of the call."""
        if text:
            self._wrote = True
            if self._index is not None:
                self._events.append(CallArguments(self._index, text))

    def end(self) -> None:
        """The call is complete. What follows is held: it may be a mere separator."""
        if not self._wrote:
            self.write("{}")
        self.in_call = False
        self.hold()

    # -- text ----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Text of the answer. White space at its end waits for what follows."""
        body = text.rstrip()
        line = text[text.rfind("\n") + 1 :]
        self.fresh_line = not line.strip() and (self.fresh_line or len(line) < len(text))
        if body:
            if self._after_call:
                self._blank.clear()
                body = body.lstrip()
                self._after_call = False
            self._events.append(Content("".join(self._blank) + body))
            self._blank = [text[len(text.rstrip()) :]]
        else:
            self._blank.append(text)

    def think(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def give_back(self) -> None:
        """What was held has been no call: it is text."""
        held = self.let_go()
        if held and not (self._after_call and not held.strip(_SEPARATORS)):
            self.say(held)

    def last_blank(self) -> None:
        """The output has ended: white space at its end is text, unless it only followed a call."""
        if not self._after_call and any(self._blank):
            self._events.append(Content("".join(self._blank)))
        self._blank.clear()

    def drain(self) -> list[Event]:
        """The events since the last time, neighbours of one kind joined."""
        out: list[Event] = []
        run: list[str] = []
        for event in self._events:
            if run and out and type(out[-1]) is type(event) and not isinstance(event, CallStart):
                same = not isinstance(event, CallArguments) or event.index == _index(out[-1])
                if same:
                    run.append(event.text)
                    continue
            _join(out, run)
            out.append(event)
            run = [] if isinstance(event, CallStart) else [event.text]
        _join(out, run)
        self._events = []
        return out


def _index(event: Event) -> int | None:
    return event.index if isinstance(event, CallArguments | CallStart) else None


def _join(out: list[Event], run: list[str]) -> None:
    """Make the last event of `out` say all of `run`."""
    if len(run) < 2:
        return
    last, text = out[-1], "".join(run)
    if isinstance(last, CallArguments):
        out[-1] = CallArguments(last.index, text)
    elif isinstance(last, Reasoning):
        out[-1] = Reasoning(text)
    else:
        out[-1] = Content(text)


Read = Callable[[Reader, str], Steps[None]]


@dataclass(frozen=True)
class Format:
    """How a family of models writes tool calls.

    Attributes:
        name: as in vLLM's `--tool-call-parser`.
        opens: markers with which calls begin; `read` is called behind one, and with it.
        bare: characters with which calls begin at the start of a line; they are left for `read`.
        read: reads the calls. Raises Broken where the text is something else.
        new_id: ids of calls, where the model writes none.
        whole: `read` is called once, at the beginning, and reads everything.
        shape: what stands between the first of `opens`, the name, the arguments in JSON, and behind them, so that
            decoding can be bound to it; None where that is not so simple.
        plain: a call may be nothing but JSON, in the one way that a grammar can bind.
        signs: groups of literals; a chat template that has all of one group teaches this format.
    """

    name: str
    read: Read
    opens: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    new_id: Callable[[], str] = call_id
    whole: bool = False
    shape: tuple[str, str, str] | None = None
    plain: bool = False
    signs: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Thoughts:
    """How a family of models marks its thoughts. `anywhere`: not only at the beginning of the output."""

    name: str
    open: str
    close: str
    anywhere: bool = False
    signs: tuple[tuple[str, ...], ...] = ()
