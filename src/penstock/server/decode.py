"""Request bodies: bytes -> a struct, with bounded work and errors that name the field.

JSON is read once into plain values, which shows unknown fields and keeps paths for messages; the struct is made of
those. Before anything is allocated the body's skeleton (what is left without its strings) is counted.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from penstock.base.errors import InputError, RefusedError

log = logging.getLogger("penstock.server")
T = TypeVar("T")

MAX_DEPTH = 100
MAX_KEYS = 100_000
MAX_ELEMENTS = 1_000_000
MAX_QUOTES = 1_000_000

# Possessive, and true of an unterminated string too: the time is linear whatever comes.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_AT = re.compile(r" - at `(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_INVALID = re.compile(r"byte (\d+)")
_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")


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
    if body.count(b'"') > MAX_QUOTES:  # looked at first: taking strings out costs most
        raise InputError(f"the request body has more than {MAX_QUOTES} quotation marks; send less at once")
    skeleton = _STRING.sub(b"", body)
    keys = skeleton.count(b":")
    if keys > MAX_KEYS:
        raise InputError(f"the request body has {keys} keys; at most {MAX_KEYS} are possible")
    if skeleton.count(b",") > MAX_ELEMENTS:
        raise InputError(f"the request body has more than {MAX_ELEMENTS} elements")
    if _depth(skeleton) > MAX_DEPTH:
        raise InputError(f"the request body is nested deeper than {MAX_DEPTH}")
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise InputError(f"the request body is not UTF-8 (byte {error.start} of a string)") from None
    except msgspec.DecodeError as error:  # ValidationError, for numbers out of range, is one too
        raise InputError(f"the request body is not valid JSON: {_AT.sub('', str(error))}") from None
    except (ValueError, RecursionError):
        raise InputError("the request body is not valid JSON") from None
    if _count_keys(value) != keys:
        raise InputError(f"the request body gives {_repeated(body)} twice")
    return value


def _depth(skeleton: bytes) -> int:
    brackets = skeleton.translate(None, _NO_BRACKET)
    if len(brackets) <= 2 * MAX_DEPTH:
        return 0  # cannot be deeper, if it is balanced; if it is not, it is no JSON
    depth = deepest = 0
    for c in brackets:
        depth += 1 if c in b"[{" else -1
        deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            break
    return deepest


def _count_keys(value: Any) -> int:
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            total += len(item)
            todo += [x for x in item.values() if isinstance(x, dict | list)]
        else:
            todo += [x for x in item if isinstance(x, dict | list)] if isinstance(item, list) else []
    return total


def _repeated(body: bytes) -> str:
    found = ["a key"]

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


async def read_object(request: Request) -> dict[str, Any]:
    """The body of a request as a JSON object. Raises InputError, RefusedError, ClientDisconnect."""
    body = await read_body(request, request.app.state.server.config.max_body_bytes)
    if not body.strip():
        raise InputError("the request body is empty; it must be a JSON object")
    value = parse(body)
    if not isinstance(value, dict):
        raise InputError("the request body must be a JSON object")
    return value


async def read(request: Request, kind: type[T], *, refused: Mapping[str, Any] | None = None,
               accepted: frozenset[str] = frozenset()) -> T:  # fmt: skip
    """The body of a request as `kind`.

    `refused`: known fields that this path cannot serve, see `check_fields`; `accepted`: fields without any effect.
    Names of fields that nobody knows go to `request.state.ignored`, from where they get into a header of the answer.
    Raises InputError, RefusedError, ClientDisconnect.
    """
    value = await read_object(request)
    strict = request.app.state.server.config.strict
    request.state.ignored = check_fields(value, kind, refused or {}, accepted, strict=strict)
    return convert(value, kind)


def check_fields(
    value: Mapping[str, Any], kind: type, refused: Mapping[str, Any], accepted: frozenset[str], *, strict: bool
) -> list[str]:
    """The names that nobody knows.

    `refused` maps a field to (harmless values, why): any other value raises InputError. `strict` raises for unknown
    names too.
    """
    known = {f.encode_name for f in msgspec.structs.fields(kind)}
    unknown = []
    for name in value.keys() - known:
        if name in refused:
            harmless, why = refused[name]
            if value[name] is not None and value[name] not in harmless:
                raise InputError(f"{name}: {why}", param=name)
        elif name not in accepted:
            unknown.append(name[:64])
    if unknown and strict:
        name = min(unknown)
        raise InputError(f"{name!r} is no field of this request; leave it out", param=name)
    if unknown:
        log.warning("fields of a request that nobody knows were ignored: %s", ", ".join(map(repr, sorted(unknown)[:8])))
    return sorted(name for name in unknown if _NAME.fullmatch(name))[:16]


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about our field `a` speak of the client's field `names[a]`."""
    try:
        yield
    except InputError as error:
        for ours, theirs in names.items():
            if error.param == ours:
                said = re.sub(rf"\b{re.escape(ours)}\b", theirs, str(error))
                raise InputError(said, param=theirs, code=error.code) from None
        raise


__all__ = ["ClientDisconnect", "check_fields", "convert", "parse", "read", "read_body", "read_object", "renamed"]
