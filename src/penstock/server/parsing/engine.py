"""OutputParser: the output of one sample, in whatever pieces it comes, as events."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.server.parsing.events import Event
from penstock.server.parsing.reader import Format, Reader, Thoughts
from penstock.server.parsing.tape import Broken, End, Markers, Steps, ignore

_LINE_FEEDS = re.compile(r"[\r\n]*")


class OutputParser:
    """One per sample. However the output is split, the joined events are the same.

    `tools`: schemas of arguments by name; a call of another name is text. `opened`: the prompt ends inside a thought;
    `closed`: it has already closed one, so the model will not think. `bound`: decoding was bound to calls, so their
    beginning is never text; `exact`: it was bound to something, so all that is behind the first thought is the answer.
    `hidden`: literals of control tokens that end a turn and are never told.
    """

    def __init__(
        self, format: Format | None = None, thoughts: Thoughts | None = None, tools: Mapping[str, Any] | None = None,
        *, opened: bool = False, closed: bool = False, parallel: bool = True, bound: bool = False,
        exact: bool = False, hidden: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.format = format
        if thoughts is not None and exact:
            thoughts = replace(thoughts, anywhere=False)
        self.thoughts = None if closed and not (thoughts and thoughts.anywhere) else thoughts
        self._reader = Reader(tools or {}, *([format.new_id] if format else []), parallel=parallel)
        self._opened = opened
        self._bound, self._exact = bound, exact
        self._openers = Markers((*(format.opens + format.bare if format else ()), *self._think_openers()))
        self._hidden = Markers(hidden)
        self._uncut = ""
        self._unfinished = False
        self._steps: Steps[None] | None = self._run()

    @property
    def called(self) -> bool:
        """Whether a tool call has begun."""
        return self._reader.called

    @property
    def unfinished(self) -> bool:
        """After `finish`: the output ended inside a call or a thought, or a call broke off."""
        return self._unfinished

    def feed(self, text: str) -> list[Event]:
        """What `text`, the next piece of the output, adds. Calls after `finish` add nothing."""
        if self._hidden.words:
            text = self._shown(text, False)
        if text and self._steps is not None:
            self._reader.add(text)
            self._advance()
        return self._reader.drain()

    def finish(self) -> list[Event]:
        """The output has ended: what is left."""
        if self._hidden.words and self._steps is not None:
            self._reader.add(self._shown("", True))
        self._reader.ended = True
        self._advance()
        self._steps = None
        return self._reader.drain()

    def _advance(self) -> None:
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None

    def _shown(self, text: str, ended: bool) -> str:
        """`text` without hidden literals, as far as that can be told."""
        text, at, out = self._uncut + text, 0, []
        while True:
            found, word = self._hidden.search(text, at, ended)
            out.append(text[at:found])
            at = found + len(word)
            if not word:
                self._uncut = text[at:]
                return "".join(out)

    # -- the order of things ---------------------------------------------------------------------------------------

    def _run(self) -> Steps[None]:
        r = self._reader
        try:
            if self.thoughts is not None:
                yield from self._first_thought(self.thoughts)
            if self.format is not None and self.format.whole:
                r.hold()
                yield from self._calls("")
            while (opener := (yield from self._text())) is not None:
                if self.thoughts is not None and opener in self._think_openers():
                    yield from self._thought(self.thoughts)
                else:
                    yield from self._calls(opener)
        except End:
            self._unfinished = True
            r.give_back()
        r.last_blank()

    def _think_openers(self) -> tuple[str, ...]:
        return (self.thoughts.open,) if self.thoughts is not None and self.thoughts.anywhere else ()

    def _text(self) -> Steps[str | None]:
        """Tell text up to what may begin a call, which is held; None at the end of the output."""
        r, bare = self._reader, self.format.bare if self.format else ()
        while True:
            try:
                word = yield from _until(r, self._openers)
            except End:
                return None
            r.hold()
            if word not in bare:
                r.take(len(word))
                return word
            if r.fresh_line:
                return word
            r.take(len(word))
            r.give_back()

    def _calls(self, opener: str) -> Steps[None]:
        assert self.format is not None
        r = self._reader
        before = r.calls
        try:
            yield from self.format.read(r, opener)
        except End:
            if self._bound or r.calls > before:
                r.let_go()  # the beginning of a call, certainly
            raise
        except Broken:
            self._unfinished |= r.in_call
            r.in_call = False
            r.give_back()
        if r.calls == before:
            r.give_back()
        r.let_go()

    def _first_thought(self, thoughts: Thoughts) -> Steps[None]:
        """At the beginning the opening marker may stand behind white space, or may have been in the prompt."""
        r = self._reader
        r.hold()
        yield from r.space()
        if (yield from r.next_is(Markers((thoughts.open,)))):
            r.take(len(thoughts.open))
        elif not self._opened:
            r.give_back()
            return
        yield from self._thought(thoughts)

    def _thought(self, thoughts: Thoughts) -> Steps[None]:
        """Tell a thought without the white space around it, and skip the empty lines behind it."""
        r = self._reader
        r.let_go()
        yield from r.space()
        blank = ""

        def tell(piece: str) -> None:
            nonlocal blank
            body = piece.rstrip()
            if body:
                r.think(blank + body)
                blank = ""
            blank += piece[len(body) :]

        yield from r.copy_until(Markers((thoughts.close,)), tell)
        if not self._exact:
            yield from r.run(_LINE_FEEDS, ignore)


def _until(r: Reader, markers: Markers) -> Steps[str]:
    """Tell text up to a marker, which is not read. Raises End."""
    while True:
        at, word = markers.search(r.text, r.at, r.ended)
        if at > r.at:
            r.say(r.take(at - r.at))
        if word:
            return word
        if r.ended:
            raise End
        yield
