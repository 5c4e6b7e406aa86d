"""Calls that are JSON on the wire. Arguments are passed on as the model writes them, valid or not."""

from __future__ import annotations

import contextlib
import re

from penstock.server.parsing.reader import Reader
from penstock.server.parsing.tape import Broken, End, Markers, Sink, Steps, ignore

NONE = Markers(())
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset((*_NAMES, *_ARGUMENTS, "type", "id", "index"))
"""Members of a call; an object that begins with another is not one."""
_IN_STRING = re.compile(r'[^"\\]*')
_IN_RAW_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OPENING, _CLOSING = re.compile(r"[{\[]+"), re.compile(r"[}\]]+")
_SCALAR = re.compile(r'[^,}\]\s"{\[<]*')
_SEPARATORS = re.compile(r"[\s,]*")
_JUNK = re.compile(r"[\s}\]]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")


def json_calls(r: Reader, ends: Markers = NONE) -> Steps[None]:
    """One call, or a list of calls. `ends`: what closes them; outside of a string nothing can be behind it."""
    if (yield from r.space()) != "[":
        yield from json_call(r, ends)
        return
    r.take(1)
    while True:
        yield from r.run(_SEPARATORS, ignore)
        if (yield from r.need()) == "]":
            r.take(1)
            return
        yield from json_call(r, ends)


def json_call(r: Reader, ends: Markers = NONE) -> Steps[None]:
    """`{"name": ..., "arguments": {...}}`, the members in any order, as OpenAI's `function` or bare.

    Raises Broken before the name is known; behind it, what is wrong only ends the call.
    """
    yield from _object(r, ends, sure=False)


def declared_call(r: Reader) -> Steps[None]:
    """`json_call`, but certain before it begins: the name is a tool's, and an object of arguments stands beside it.

    Raises Broken before that; behind it, what is wrong only ends the call.
    """
    yield from _object(r, NONE, sure=True)


def _object(r: Reader, ends: Markers, *, sure: bool) -> Steps[None]:
    yield from r.space()
    yield from r.expect("{")
    before = r.calls
    try:
        yield from _members(r, ends, [], "", inner=False, sure=sure)
    except Broken:
        if r.calls == before:
            raise
    if r.calls == before:
        raise Broken
    if r.in_call:
        r.end()


def _members(r: Reader, ends: Markers, early: list[str], name: str, *, inner: bool, sure: bool) -> Steps[bool]:
    """What is behind the brace; whether there were arguments.

    `early`: arguments that came before the name; `name`: one that is known, and waits for them; `inner`: this is
    `function`'s value; `sure`: a call begins only with both, a tool's name and an object of arguments.
    """
    had = bool(early)
    while True:
        yield from r.run(_SEPARATORS, ignore)
        char = yield from r.need()
        if char == "}":
            r.take(1)
            return had
        key = yield from _text(r)
        if not r.in_call and key not in _KEYS:
            raise Broken
        yield from r.space()
        yield from r.expect(":")
        char = yield from r.space()
        if key in _NAMES and not name and not r.in_call and char == '"':
            name = yield from _text(r)
            if sure and name not in r.tools:
                raise Broken
            if early or not sure:
                r.begin(name)
                for piece in early:
                    r.write(piece)
        elif key == "function" and not r.in_call and not inner and char == "{":
            r.take(1)
            had = (yield from _members(r, ends, early, name, inner=True, sure=sure)) or had
        elif not had and (key == "arguments" and char == "{" if sure else key in _ARGUMENTS):
            had = True
            if name and not r.in_call:
                r.begin(name)
            yield from json_arguments(r, ends, r.write if r.in_call else early.append)
        else:
            yield from _value(r, ignore, ends)


def plain_call(r: Reader) -> Steps[None]:
    """`declared_call` just as `text_or_calls` binds it: the name first, then the arguments, then its end."""
    yield from r.space()
    yield from r.expect("{")
    yield from r.space()
    yield from r.expect('"name":')
    yield from r.space()
    yield from r.expect('"')
    name = yield from r.run(_IN_STRING)
    yield from r.expect('"')
    yield from r.space()
    yield from r.expect(",")
    yield from r.space()
    yield from r.expect('"arguments":')
    if (yield from r.space()) != "{":
        raise Broken
    r.begin(name)
    yield from _nested(r, r.write, NONE)
    yield from r.space()
    if (yield from r.peek()) == "}":
        r.take(1)
    r.end()


def json_arguments(r: Reader, ends: Markers, sink: Sink) -> Steps[None]:
    """The value that is the arguments. A string is taken for JSON in a string, null for none."""
    yield from r.space()
    char = yield from r.need()
    if char == '"':
        yield from _decoded(r, sink)
    elif char in "{[":
        yield from _nested(r, sink, ends)
    else:
        scalar = yield from r.run(_SCALAR)
        yield from r.need()
        if scalar != "null":
            sink(scalar)


def bounded_arguments(r: Reader, ends: Markers) -> Steps[None]:
    """Arguments that stand alone in front of one of `ends`, which may cut them short."""
    with contextlib.suppress(Broken):
        yield from json_arguments(r, ends, r.write)


def _value(r: Reader, sink: Sink, ends: Markers) -> Steps[None]:
    char = yield from r.need()
    if char == '"':
        yield from _raw_string(r, sink)
    elif char in "{[":
        yield from _nested(r, sink, ends)
    else:
        yield from r.run(_SCALAR, sink)


def _nested(r: Reader, sink: Sink, ends: Markers) -> Steps[None]:
    """An object or a list, up to the bracket that closes it. Raises Broken where one of `ends` stands before that."""
    plain = re.compile(rf'[^"{{}}\[\]{re.escape(ends.firsts)}]*')
    depth = 0
    while True:
        yield from r.run(plain, sink)
        char = yield from r.need()
        if char == '"':
            yield from _raw_string(r, sink)
            continue
        count = 1
        if found := _OPENING.match(r.text, r.at):
            count = found.end() - r.at
            depth += count
        elif found := _CLOSING.match(r.text, r.at):
            count = min(found.end() - r.at, depth)
            depth -= count
        elif (yield from r.next_is(ends)):
            raise Broken
        sink(r.take(count))
        if depth == 0:
            return


def _raw_string(r: Reader, sink: Sink) -> Steps[None]:
    sink(r.take(1))
    while True:
        yield from r.run(_IN_RAW_STRING, sink)
        if (yield from r.need()) == '"':
            sink(r.take(1))
            return
        if len((yield from r.peek(2))) < 2:
            sink(r.take(1))
            raise End
        sink(r.take(2))


def _text(r: Reader) -> Steps[str]:
    """A string's text. Raises Broken where none stands."""
    if (yield from r.need()) != '"':
        raise Broken
    out: list[str] = []
    yield from _decoded(r, out.append)
    return "".join(out)


def _decoded(r: Reader, sink: Sink) -> Steps[None]:
    """A string's text to `sink`. A surrogate without its partner becomes U+FFFD."""
    r.take(1)
    while True:
        yield from r.run(_IN_STRING, sink)
        if (yield from r.need()) == '"':
            r.take(1)
            return
        two = yield from r.peek(2)
        if len(two) < 2:
            raise End
        if two[1] != "u":
            r.take(2)
            sink(_ESCAPES.get(two[1], two[1]))
            continue
        sink((yield from _unicode(r)))


def _unicode(r: Reader) -> Steps[str]:
    r"""`\uXXXX`, with the second half of a pair if it is the first of one."""
    six = yield from r.peek(6)
    if len(six) < 6:
        raise End
    if _UNICODE.fullmatch(six) is None:
        r.take(2)
        return "\ufffd"
    r.take(6)
    code = int(six[2:], 16)
    if 0xD800 <= code < 0xDC00:
        more = yield from r.peek(6)
        if len(more) < 6:
            raise End
        low = int(more[2:], 16) if _UNICODE.fullmatch(more) else 0
        if 0xDC00 <= low < 0xE000:
            r.take(6)
            return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)


def closing(r: Reader, word: str) -> Steps[None]:
    """Skip brackets too many and the marker that closes a call."""
    yield from r.run(_JUNK, ignore)
    yield from r.close(word)
