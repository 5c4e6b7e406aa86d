"""Frames between processes (front end, engine, ranks): four bytes of length, then msgpack. No pickle, ever."""

from __future__ import annotations

import socket
import traceback
from functools import cache
from typing import Any

import msgspec

from penstock.base import errors
from penstock.base.errors import ConfigError, EngineError, PenstockError
from penstock.base.hashing import digest
from penstock.base.version import __version__
from penstock.core.messages import Failed, FromEngine, ToEngine

MAX_FRAME = 1 << 30
_HEAD = 4
_encode = msgspec.msgpack.Encoder().encode

to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


@cache
def schema() -> str:
    """Identity of all that a front end and an engine tell each other (`identity`)."""
    return identity(ToEngine, FromEngine)


def identity(*messages: Any) -> str:
    """Version and structs. Equal if both sides are of the same build."""
    types = msgspec.inspect.multi_type_info(messages)
    return __version__ + "-" + digest(repr(types).encode()).hex()


def failed_of(error: Exception, what: str) -> Failed:
    """What is said of an error that keeps `what` from going on. One that nobody raised on purpose is also printed."""
    if isinstance(error, PenstockError):
        name = error.field if isinstance(error, ConfigError) else None
        return Failed(type(error).__name__, str(error), name)
    traceback.print_exception(error)
    return Failed("EngineError", f"{what} ({type(error).__name__}: {error})")


def error_of(failed: Failed) -> PenstockError:
    """What kept the other side from going on, as the class that it was."""
    kind = getattr(errors, failed.kind, EngineError)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        kind = EngineError
    if issubclass(kind, ConfigError):
        return kind(failed.message, field=failed.field)
    try:
        return kind(failed.message)
    except TypeError:
        return EngineError(failed.message)


def frame(message: Any) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(_HEAD, "little") + body


class Splitter:
    """Bytes as they come in, as whole frames. Raises EngineError for a length that cannot be."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        at = 0
        while len(buffer) - at >= _HEAD:
            size = int.from_bytes(buffer[at : at + _HEAD], "little")
            if size > MAX_FRAME:
                raise EngineError(f"a message of {size} bytes came in: the stream is broken")
            if len(buffer) - at - _HEAD < size:
                break
            frames.append(bytes(buffer[at + _HEAD : at + _HEAD + size]))
            at += _HEAD + size
        del buffer[:at]
        return frames


def read_frame(sock: socket.socket) -> bytes | None:
    """The next frame, blocking; None if the other side has gone, or the stream is broken."""
    head = _exactly(sock, _HEAD)
    size = MAX_FRAME + 1 if head is None else int.from_bytes(head, "little")
    return None if size > MAX_FRAME else _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = sock.recv(min(size - len(data), 1 << 20))
        except OSError:  # also of a host that says nothing any more
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)
