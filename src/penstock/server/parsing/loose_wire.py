"""Calls in the clothes of a programming language, told as JSON: Python's literals, and Gemma's quotes."""

from __future__ import annotations

import json
import re

from penstock.server.parsing.kinds import escaped
from penstock.server.parsing.reader import Reader
from penstock.server.parsing.tape import Broken, End, Markers, Steps, ignore

MAX_DEPTH = 64
NAME = re.compile(r"[A-Za-z0-9_.\-]*")
MAX_NAME = 128
_WORD = re.compile(r"[A-Za-z0-9_.+\-]*")
_SEPARATORS = re.compile(r"[\s,]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_QUOTE = '<|"|>'
_GEMMA = Markers((_QUOTE,))
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}


def keyword_calls(r: Reader, closers: Markers) -> Steps[None]:
    """`f(a=1, b="x"), g()` up to and with one of `closers`; commas and line feeds stand between calls."""
    while True:
        yield from r.run(_SEPARATORS, ignore)
        if word := (yield from r.next_is(closers)):
            r.take(len(word))
            return
        name = yield from r.run(NAME, limit=MAX_NAME)
        yield from r.space()
        yield from r.expect("(")
        yield from members(r, name, "=", ")")


def members(r: Reader, name: str, equals: str, close: str) -> Steps[None]:
    """The arguments of a call of `name`, up to and with `close`. Raises Broken for what is no argument by name."""
    r.begin(name)
    r.write("{")
    first = True
    while True:
        yield from r.run(_SEPARATORS, ignore)
        if (yield from r.need()) == close:
            r.take(1)
            break
        yield from _key(r, equals, first)
        yield from value(r, 1)
        first = False
    r.write("}")
    r.end()


def _key(r: Reader, equals: str, first: bool) -> Steps[None]:
    if not first:
        r.write(", ")
    if (yield from r.need()) in "\"'<":
        yield from value(r, MAX_DEPTH)
    else:
        word = yield from _word(r)
        if not word:
            raise Broken
        r.write(f'"{escaped(word)}"')
    yield from r.space()
    yield from r.expect(equals)
    r.write(": ")


def value(r: Reader, depth: int) -> Steps[None]:
    """One literal. Raises Broken for what is none, and for more than 64 in one another."""
    yield from r.space()
    char = yield from r.need()
    if char in "\"'":
        yield from _string(r, char)
    elif char == "<":
        yield from r.expect(_QUOTE)
        r.write('"')
        yield from r.copy_until(_GEMMA, lambda piece: r.write(escaped(piece)))
        r.write('"')
    elif char in "[({" and depth < MAX_DEPTH:
        yield from _many(r, char, depth)
    else:
        r.write(_scalar((yield from _word(r))))


def _word(r: Reader) -> Steps[str]:
    """A word that is complete: something follows. Raises End."""
    word = yield from r.run(_WORD)
    yield from r.need()
    return word


def _many(r: Reader, opener: str, depth: int) -> Steps[None]:
    close = {"[": "]", "(": ")", "{": "}"}[r.take(1)]
    r.write("{" if opener == "{" else "[")
    first = True
    while True:
        yield from r.run(_SEPARATORS, ignore)
        if (yield from r.need()) == close:
            r.take(1)
            r.write("}" if opener == "{" else "]")
            return
        if opener == "{":
            yield from _key(r, ":", first)
        elif not first:
            r.write(", ")
        yield from value(r, depth + 1)
        first = False


def _scalar(word: str) -> str:
    """A word or number as JSON. Raises Broken."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    for kind in (lambda text: int(text, 0), float):
        try:
            return json.dumps(kind(word), allow_nan=False)
        except ValueError:
            continue
    raise Broken


def _string(r: Reader, quote: str) -> Steps[None]:
    three = yield from r.peek(3)
    if three == quote * 2:
        raise End
    triple = three == quote * 3
    close = quote * (3 if triple else 1)
    r.take(len(close))
    stops = Markers((close, "\\"))
    r.write('"')
    while (yield from r.copy_until(stops, lambda piece: r.write(escaped(piece)))) == "\\":
        code = yield from _escape(r)
        if 0xD800 <= code < 0xDC00 and "\\u".startswith((yield from r.peek(2))):
            yield from r.expect("\\")
            yield from r.need()
            low = yield from _escape(r)
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else 0xFFFD
        r.write("" if code < 0 else escaped(chr(code) if not 0xD800 <= code < 0xE000 else "\ufffd"))
    r.write('"')


def _escape(r: Reader) -> Steps[int]:
    """The code point that stands behind a backslash; -1 for none."""
    char = yield from r.need()
    if char in "01234567":
        three = yield from r.peek(3)
        digits = re.match("[0-7]+", three)
        assert digits is not None
        return int(r.take(digits.end()), 8)
    if char in _HEX:
        digits_text = (yield from r.peek(1 + _HEX[char]))[1:]
        if len(digits_text) < _HEX[char]:
            raise End
        r.take(1 + _HEX[char])
        hexadecimal = re.fullmatch("[0-9a-fA-F]+", digits_text)
        code = int(digits_text, 16) if hexadecimal else 0xFFFD
        return code if code < 0x110000 else 0xFFFD
    r.take(1)
    known = _ESCAPES.get(char, char if char in "\\'\"" else None)
    if known is None:
        r.write("\\\\")
        return ord(char)
    return ord(known) if known else -1
