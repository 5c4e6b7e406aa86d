"""Request bodies: bytes -> a struct, with bounded work and errors that name the field.

JSON is read once into plain values, which shows unknown fields and keeps paths for messages; the struct is made of
those. Before anything is allocated the body's skeleton (what is left without its strings) is counted. Long bodies are
read in slices (`transport.slices`), so that nobody's stream waits for them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from penstock.base.errors import InputError, RefusedError
from penstock.server.schema.forms import misplaced
from penstock.server.schema.known import shape_of, unknown
from penstock.server.transport.slices import Work, whole

log = logging.getLogger("penstock.server")
T = TypeVar("T", bound=msgspec.Struct)

MAX_DEPTH = 100
MAX_FIELDS = 1_000
"""Of the request itself; no shape has a hundred."""
MAX_KEYS = 50_000
MAX_CONTAINERS = 30_000
"""Lists and objects. Making one costs twenty times what a number does, and a conversation has three per message."""
MAX_ELEMENTS = 400_000
"""More tokens than any prompt that is taken, in as many lists as there may be prompts."""
MAX_QUOTES = 500_000
MAX_ESCAPES = 2_000_000
MAX_DIGITS = 400
"""Of one number: reading it takes the square of them."""
MAX_ALL_DIGITS = 5_000_000
"""Of all numbers together."""
INLINE_BYTES = 64 << 10
"""Shorter bodies are read at once: a few milliseconds at most, whatever is in them."""

_PIECE = 128 << 10
_VALUES = 20_000
_NO_MARK = bytes(set(range(256)) - set(b'"[]{},:0'))
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_TOO_LONG = b"0" * (MAX_DIGITS + 1)
_SQUARE = bytes.maketrans(b"{}", b"[]")
_AT = re.compile(r" - at `(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_INVALID = re.compile(r"byte (\d+)")
_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]+")
_MAX_NAME = 128


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises RefusedError: 413 as soon as it is too long, 415 if it is compressed."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise RefusedError("compressed request bodies are not taken; send it without a Content-Encoding", status=415)
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > max_bytes:
        raise _too_long(max_bytes)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise _too_long(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _too_long(max_bytes: int) -> RefusedError:
    return RefusedError(f"the request body is longer than the {max_bytes} bytes that are taken", status=413)


def parse(body: bytes) -> Any:
    """A JSON document as plain values. Raises InputError: no JSON, too deep, too many elements, a repeated key."""
    return whole(parsing(body))


def parsing(body: bytes) -> Generator[None, None, Any]:
    """`parse` in steps: none takes longer than making the values of the largest body, which the bounds keep short."""
    if body.count(b'"') > MAX_QUOTES:
        raise InputError(f"the request body has more than {MAX_QUOTES} quotation marks; send less at once")
    yield
    if body.count(b"\\") > MAX_ESCAPES:
        raise InputError(f"the request body has more than {MAX_ESCAPES} backslashes; send less at once")
    yield
    skeleton, keys = yield from _skeleton(body)
    if (yield from _too_deep(skeleton)):
        raise InputError(f"the request body is nested deeper than {MAX_DEPTH}")
    yield
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise InputError(f"the request body is not UTF-8 (byte {error.start} of a string)") from None
    except msgspec.DecodeError as error:  # ValidationError, for numbers out of range, is one too
        raise InputError(f"the request body is not valid JSON: {_AT.sub('', str(error))}") from None
    except (ValueError, RecursionError):
        raise InputError("the request body is not valid JSON") from None
    yield
    if not (yield from _has_keys(value, keys)):
        raise InputError(f"the request body gives {_repeated(body)} twice")
    return value


def _skeleton(body: bytes) -> Generator[None, None, tuple[bytes, int]]:
    """The brackets outside of strings, and the number of keys. Raises InputError as soon as something is too much."""
    brackets: list[bytes] = []
    num_keys = num_elements = num_containers = num_digits = 0
    escaped = in_string = False
    for at in range(0, len(body), _PIECE):
        piece = body[at : at + _PIECE]
        if escaped:
            piece = piece[1:]
        escaped = False
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")  # now a backslash is the only one before what it escapes
            escaped = piece.endswith(b"\\")
            piece = piece.replace(b'\\"', b"")
        marks = piece.translate(_ZEROS).translate(None, _NO_MARK)
        if in_string:
            _, quote, marks = marks.partition(b'"')
            in_string = not quote
        if b'"' in marks:
            parts = marks.split(b'"')
            in_string = len(parts) % 2 == 0
            marks = b"".join(parts[::2])
        num_digits += marks.count(b"0")
        if num_digits > MAX_ALL_DIGITS:
            raise InputError(f"the numbers of the request body have more than {MAX_ALL_DIGITS} digits")
        if _TOO_LONG in marks:
            raise InputError(f"the request body is not valid JSON: a number of it has more than {MAX_DIGITS} digits")
        num_keys += marks.count(b":")
        num_elements += marks.count(b",")
        num_containers += marks.count(b"[") + marks.count(b"{")
        if num_keys > MAX_KEYS:
            raise InputError(f"the request body has more than {MAX_KEYS} keys")
        if num_elements > MAX_ELEMENTS:
            raise InputError(f"the request body has more than {MAX_ELEMENTS} elements; send less at once")
        if num_containers > MAX_CONTAINERS:
            raise InputError(f"the request body has more than {MAX_CONTAINERS} lists and objects; send less at once")
        brackets.append(marks.translate(_SQUARE, b",:0"))
        yield
    return b"".join(brackets), num_keys


def _too_deep(brackets: bytes) -> Generator[None, None, bool]:
    """Every round takes the innermost pairs away. What is not balanced is no JSON, whatever is said of it here."""
    if len(brackets) <= 2 * MAX_DEPTH:
        return False
    for _ in range(MAX_DEPTH):
        fewer = brackets.replace(b"[]", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
        yield
    return brackets.count(b"[") > MAX_DEPTH or b"[]" in brackets


def _has_keys(value: Any, num_keys: int) -> Generator[None, None, bool]:
    """Whether all keys that were written are there: of two equal ones in an object, one is gone."""
    found = visited = 0
    todo = [value]
    while todo and found < num_keys:
        item = todo.pop()
        if isinstance(item, dict):
            found += len(item)
            visited += len(item)
            todo += [x for x in item.values() if isinstance(x, dict | list)]
        elif isinstance(item, list):
            for at in range(0, len(item), _VALUES):
                part = item[at : at + _VALUES]
                todo += [x for x in part if isinstance(x, dict | list)]
                visited += len(part)
                if visited >= _VALUES:
                    visited = 0
                    yield
        visited += 1
        if visited >= _VALUES:
            visited = 0
            yield
    return found == num_keys


def _repeated(body: bytes) -> str:
    found = ["a key"]
    if len(body) > INLINE_BYTES:
        return found[0]  # finding out which would mean to read it once more

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen = set()
        for key, _ in pairs:
            if key in seen:
                found.append(repr(key[:60]))
            seen.add(key)

    with suppress(ValueError, RecursionError):
        json.loads(body, object_pairs_hook=look)
    return found[-1]


def convert(value: Any, kind: type[T]) -> T:
    """Plain values as a struct. Raises InputError with `param`."""
    if not isinstance(value, dict):
        raise InputError("the request body must be a JSON object")
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT.search(text)
        path = found[1].removeprefix("$").removeprefix(".") if found else ""
        missing = _MISSING.search(text)
        if missing:
            path = f"{path}.{missing[1]}" if path else missing[1]
            raise InputError(f"{path} is missing", param=path) from None
        said = _AT.sub("", text).replace("`", "")
        raise InputError(f"{path}: {said[:1].lower()}{said[1:]}" if path else said, param=path or None) from None


async def _read_object(request: Request) -> tuple[dict[str, Any], Work | None]:
    """The body of a request as a JSON object, and what slices the work on it if it is long.

    Raises InputError, RefusedError, ClientDisconnect.
    """
    body = await read_body(request, request.app.state.server.config.max_body_bytes)
    if not body.strip():
        raise InputError("the request body is empty; it must be a JSON object")
    work: Work | None = None
    if len(body) <= INLINE_BYTES:
        value = parse(body)
    else:
        work = request.app.state.server.slices.work(request.scope["state"]["tenant"])
        value = await work.run(parsing(body))
        await work.pause()
    if not isinstance(value, dict):
        raise InputError("the request body must be a JSON object")
    if len(value) > MAX_FIELDS:
        raise InputError(f"the request has {len(value)} fields; at most {MAX_FIELDS} are possible")
    return value, work


async def read(request: Request, kind: type[T], *, refused: Mapping[str, Any] | None = None,
               accepted: frozenset[str] = frozenset()) -> T:  # fmt: skip
    """The body of a request as `kind`.

    `refused`: known fields that this path cannot serve, see `checking`; `accepted`: fields without any effect.
    Names of fields that nobody knows go to `request.state.ignored`, from where they get into a header of the answer.
    Raises InputError, RefusedError, ClientDisconnect.
    """
    value, work = await _read_object(request)
    steps = checking(value, kind, refused or {}, accepted, strict=request.app.state.server.config.strict)
    if work is None:
        request.state.ignored = whole(steps)
    else:
        request.state.ignored = await work.run(steps)
        await work.pause()
    return convert(value, kind)


def checking(
    value: Mapping[str, Any],
    kind: type[msgspec.Struct],
    refused: Mapping[str, Any],
    accepted: frozenset[str],
    *,
    strict: bool,
) -> Generator[None, None, list[str]]:
    """The names that nobody knows, at any depth; in steps, for the largest bodies.

    `refused` maps a field to (harmless values, why): any other value raises InputError. So does what is asked of the
    answer's form where it would have no effect. `strict` raises for all unknown names.
    """
    shape = shape_of(kind)
    names: set[str] = set()
    for name, given in value.items():
        fields: Iterable[tuple[str, Any] | None] = ()
        if name in shape:
            fields = unknown(given, shape[name], name)
        elif name in refused:
            harmless, why = refused[name]
            if given is not None and given not in harmless:
                raise InputError(f"{name}: {why}", param=name)
        elif name not in accepted and given is not None:
            fields = ((name, given),)
        for field in fields:
            if field is None:
                yield
                continue
            names.add(field[0][:_MAX_NAME])
            if "structured_outputs" in shape:
                yield from _not_misplaced(*field)
    listed = sorted(names)
    if listed and strict:
        raise InputError(f"{listed[0]!r} is no field of this request; leave it out", param=listed[0])
    if listed:
        log.warning("fields of a request that nobody knows were ignored: %s", ", ".join(map(repr, listed[:8])))
    return [name for name in listed if _NAME.fullmatch(name)][:16]


def _not_misplaced(path: str, value: Any) -> Generator[None, None, None]:
    """Raises InputError for a form that is asked for where nobody looks."""
    for place in misplaced(value, path):
        if place is not None:
            place = place[:_MAX_NAME]
            raise InputError(
                f"{place} has no effect there; write structured_outputs at the top of the request", param=place
            )
        yield


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about our field `a`, and what is within it, speak of the client's field `names[a]`."""
    try:
        yield
    except InputError as error:
        for ours, theirs in names.items():
            below = (error.param or "").removeprefix(ours)
            if error.param is not None and error.param.startswith(ours) and below[:1] in ("", ".", "["):
                said = re.sub(rf"\b{re.escape(ours)}\b", theirs, str(error))
                raise InputError(said, param=theirs + below, code=error.code) from None
        raise


__all__ = [
    "ClientDisconnect",
    "checking",
    "convert",
    "parse",
    "parsing",
    "read",
    "read_body",
    "renamed",
]
