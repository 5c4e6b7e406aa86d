"""Tape: text that arrives in pieces, read as if it had come at once.

Every read is a generator that yields where it needs more text, and decides by the text alone, never by where a piece
happened to end. So a reader written as plain sequential code gives the same result for every split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A read that is under way; it yields where it waits for text."""
Sink = Callable[[str], object]

SPACE = re.compile(r"\s*")


class End(Exception):
    """The output ended inside something."""


class Broken(Exception):
    """The text is not what the format says."""


class Markers:
    """Literals to look for, the leftmost first and of those the longest."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(sorted(set(words), key=len, reverse=True))
        self.firsts = "".join(sorted({word[0] for word in self.words}))
        self._find = re.compile("|".join(map(re.escape, self.words)) or r"(?!)")
        self._reach = max(map(len, self.words), default=1) - 1

    def search(self, text: str, at: int, ended: bool) -> tuple[int, str]:
        """Where the first marker from `at` on is, and which.

        Without one: "" and the position from which on the text may still become one (its end if it cannot).
        """
        found = self._find.search(text, at)
        open_at = len(text)
        if not ended and self.words:
            for i in range(max(at, len(text) - self._reach), len(text)):
                if text[i] in self.firsts and self.partial(text[i:]):
                    open_at = i
                    break
        if found is not None and found.start() < open_at:
            return found.start(), found[0]
        return open_at, ""

    def partial(self, text: str) -> bool:
        """Whether `text` is the beginning of a marker, but not all of it."""
        return any(len(word) > len(text) and word.startswith(text) for word in self.words)


class Tape:
    """What has come and is not yet read. While it holds, what is read is kept, to be given back as text."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.in_call = False
        """A call has begun and not ended."""
        self._held: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    # -- what was read -------------------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        """From here on, keep what is read."""
        self._held = []

    def let_go(self) -> str:
        """What was kept; nothing is kept any more."""
        held, self._held = "".join(self._held or ()), None
        return held

    # -- reads ---------------------------------------------------------------------------------------------------

    def take(self, count: int) -> str:
        """Read `count` characters that are there."""
        piece = self.text[self.at : self.at + count]
        self.at += count
        if self._held is not None:
            self._held.append(piece)
        return piece

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters, without reading them; fewer at the end."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def need(self) -> Steps[str]:
        """The next character, without reading it. Raises End."""
        if self.at < len(self.text):
            return self.text[self.at]
        char = yield from self.peek()
        if not char:
            raise End
        return char

    def next_is(self, markers: Markers) -> Steps[str]:
        """The marker that comes next, without reading it; "" if none does."""
        while True:
            if not self.ended and markers.partial(self.text[self.at : self.at + len(markers.words[0])]):
                yield
                continue
            return next((word for word in markers.words if self.text.startswith(word, self.at)), "")

    def expect(self, word: str) -> Steps[None]:
        """Read `word`. Raises Broken if something else comes, End if nothing does."""
        for n in range(len(word)):
            if (yield from self.need()) != word[n]:
                raise Broken
            self.take(1)

    def run(self, chars: re.Pattern[str], sink: Sink | None = None, limit: int = 0) -> Steps[str]:
        """Read what `chars`, a pattern like `[...]*`, matches: all of it, or up to `limit` characters.

        It goes to `sink`, or is returned. What follows is not read; at the end of the output there may be nothing.
        """
        out: list[str] = []
        count = 0
        while True:
            found = chars.match(self.text, self.at)
            length = found.end() - self.at if found else 0
            if limit:
                length = min(length, limit - count)
            count += length
            if length:
                (sink or out.append)(self.take(length))
            if self.at < len(self.text) or self.ended or (limit and count >= limit):
                return "".join(out)
            yield

    def space(self) -> Steps[str]:
        """Skip white space; the character behind it, unread, or "" at the end."""
        yield from self.run(SPACE, _ignore)
        return self.text[self.at : self.at + 1]

    def copy_until(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Read up to and with the next marker, which is returned; what is before it goes to `sink`. Raises End.

        The beginning of a marker at the end of the output is text, but within a call.
        """
        while True:
            at, word = markers.search(self.text, self.at, self.ended and not self.in_call)
            if at > self.at:
                sink(self.take(at - self.at))
            if word:
                return self.take(len(word))
            if self.ended:
                raise End
            yield

    def until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """What is before the next marker, and the marker. Raises End."""
        out: list[str] = []
        word = yield from self.copy_until(markers, out.append)
        return "".join(out), word

    def close(self, word: str) -> Steps[bool]:
        """Skip white space and `word`, if it comes; at the end of the output its beginning is skipped as well."""
        yield from self.space()
        rest = yield from self.peek(len(word))
        if word.startswith(rest):
            self.take(len(rest))
            return bool(rest)
        return False


def _ignore(_: str) -> None:
    return None


ignore: Sink = _ignore
