"""Parameters as elements with names, told as the members of a JSON object."""

from __future__ import annotations

from penstock.server.parsing.kinds import escaped, json_of, parameter_kinds
from penstock.server.parsing.reader import Reader
from penstock.server.parsing.tape import Markers, Sink, Steps, ignore

_STRING = frozenset(("string",))


class Parameters:
    """The members of one call's arguments, as they come. `trim`: one line feed around each value is not part of it."""

    def __init__(self, r: Reader, trim: bool) -> None:
        self._r = r
        self._trim = trim
        self._seen: set[str] = set()
        r.write("{")

    def read(self, name: str, close: Markers) -> Steps[None]:
        """A value up to and with `close`. A name that was there already is passed over."""
        r = self._r
        if name in self._seen:
            yield from r.copy_until(close, ignore)
            return
        r.write(f'{", " if self._seen else ""}"{escaped(name)}": ')
        self._seen.add(name)
        kinds = parameter_kinds(r.schema, name)
        if kinds == _STRING:
            r.write('"')
            yield from r.copy_until(close, self._sink(lambda piece: r.write(escaped(piece))))
            r.write('"')
            return
        value: list[str] = []
        yield from r.copy_until(close, self._sink(value.append))
        r.write(json_of("".join(value), kinds))

    def end(self) -> None:
        self._r.write("}")
        self._r.end()

    def _sink(self, sink: Sink) -> Sink:
        return Trimmed(sink) if self._trim else sink


class Trimmed:
    """Passes text on without one line feed at its beginning and one at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._first = True
        self._line_feed = False

    def __call__(self, piece: str) -> None:
        if self._first:
            self._first = False
            piece = piece.removeprefix("\n")
        if not piece:
            return
        if self._line_feed:
            self._sink("\n")
        self._line_feed = piece.endswith("\n")
        if len(piece) > self._line_feed:
            self._sink(piece[: len(piece) - self._line_feed])
