"""What clients, servers of layers and their directory say to each other.

Frames with MACs over a socket, begun by a proof of a shared secret (`runner.block_wire`). No pickle: messages are
msgpack, rows of hidden states are float32 as they lie in memory, little-endian. Content is not encrypted.

    to a server                         its answer
    FACTS                               SAID Facts
    OPEN Opening                        DONE, or REFUSED a sentence
    STEP session, start, rows           ROWS, or REFUSED
    CLOSE session                       DONE
    to the directory
    ANNOUNCE SwarmOffer                      DONE; again within `ANNOUNCE_S`, over a connection that stays
    LIST                                SAID list of SwarmOffer
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import ConfigError
from penstock.runner.block_wire import Channel, Greeting, PeerError, join

LAYERS: Final = Greeting(b"PSTSPAN", "server of layers", "penstock swarm serve")
DIRECTORY: Final = Greeting(b"PSTSDIR", "directory of a swarm", "penstock swarm directory")
FACTS, OPEN, STEP, CLOSE, ANNOUNCE, LIST, SAID, ROWS, DONE, REFUSED = range(10)
"""Kinds of frames."""
STEP_HEAD = struct.Struct("<III")
"""Session, position of the first row, number of rows; then the rows."""
MOST_ROWS = 256
"""Of a step: what is longer comes in pieces."""
MOST_SAID = 1 << 20
ANNOUNCE_S = 2.0
GONE_S = 3 * ANNOUNCE_S
"""Whoever has not announced itself for so long is forgotten."""


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What a server has. `server`: drawn when its process began. `identity`: of model, settings and build
    (`swarm.model`). It runs layers `first` ... `last` - 1, or some of them. `row_s`: seconds that a row takes in one
    layer, as measured. `free_tokens`: for which it has room."""

    server: str
    identity: str
    first: int
    last: int
    row_s: float
    free_tokens: int


class SwarmOffer(msgspec.Struct, frozen=True, array_like=True):
    """A server in the directory. `address`: HOST:PORT."""

    address: str
    facts: Facts


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of at most `num_tokens` tokens begins, for layers `first` ... `last` - 1. `session`: the client's."""

    session: int
    identity: str
    first: int
    last: int
    num_tokens: int


class Refused(Exception):
    """The other side is well and will not do this; the message is its sentence."""


def connect(address: str, secret: bytes, greeting: Greeting, within_s: float) -> Channel:
    """A connection to `HOST:PORT` that both sides have agreed on. Raises PeerError."""
    host, port = place_of(address)
    try:
        sock = socket.create_connection((host, port), within_s)
    except OSError as error:
        raise PeerError("lost", error.strerror or str(error)) from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return join(sock, secret, within_s, greeting)
    except BaseException:
        sock.close()
        raise


def place_of(address: str) -> tuple[str, int]:
    """Raises ConfigError for what is no HOST:PORT."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no HOST:PORT, such as 127.0.0.1:7950", field="")
    return host, int(port)


def hung_up(channel: Channel) -> None:
    """Close it, whatever state it is in."""
    with suppress(OSError):
        channel.sock.shutdown(socket.SHUT_RDWR)
    channel.sock.close()


def asked(channel: Channel, kind: int, message: Any = None) -> tuple[int, bytearray]:
    """Say something and hear the answer. Raises Refused, PeerError."""
    channel.send(kind, b"" if message is None else msgspec.msgpack.encode(message))
    return _answer(channel, MOST_SAID)


def said(channel: Channel, kind: int, type_: Any) -> Any:
    """Ask for something that is told by a message. Raises Refused, PeerError."""
    number, payload = asked(channel, kind)
    if number != SAID:
        raise PeerError("frame", f"an answer of kind {number} came where a message was due")
    return read(payload, type_)


def read(payload: bytearray, type_: Any) -> Any:
    """Raises PeerError for what is no such message."""
    try:
        return msgspec.msgpack.decode(payload, type=type_)
    except msgspec.MsgspecError as error:
        raise PeerError("frame", f"a message cannot be read: {error}") from error


def stepped(channel: Channel, session: int, start: int, rows: F32) -> F32:
    """Rows [n, E] at positions `start` ... through the other side's layers. Raises Refused, PeerError."""
    own = np.ascontiguousarray(rows, "<f4")
    channel.send(STEP, STEP_HEAD.pack(session, start, len(own)), own.data.cast("B"))
    number, payload = _answer(channel, own.nbytes)
    if number != ROWS or len(payload) != own.nbytes:
        raise PeerError("frame", f"{len(payload)} bytes came back where {own.nbytes} of rows were due")
    found: F32 = np.frombuffer(payload, "<f4").reshape(own.shape)
    return found


def step_of(payload: bytearray, width: int) -> tuple[int, int, F32]:
    """Session, first position and rows [n, `width`] of a STEP. Raises PeerError for bytes that are none."""
    if len(payload) < STEP_HEAD.size:
        raise PeerError("frame", "a step without a head came")
    session, start, count = STEP_HEAD.unpack_from(payload)
    if not 0 < count <= MOST_ROWS or len(payload) != STEP_HEAD.size + 4 * count * width:
        raise PeerError("frame", f"a step of {count} rows came with {len(payload)} bytes; rows have {width} numbers")
    rows: F32 = np.frombuffer(payload, "<f4", offset=STEP_HEAD.size).reshape(count, width)
    return session, start, rows


def _answer(channel: Channel, most: int) -> tuple[int, bytearray]:
    number, payload = channel.receive(max(most, MOST_SAID))
    if number == REFUSED:
        raise Refused(payload.decode("utf-8", "replace")[:500])
    return number, payload
