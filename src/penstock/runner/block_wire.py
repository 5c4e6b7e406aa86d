"""What an engine and a server of blocks say to each other: frames over a socket, each with a MAC. No pickle.

Both know a secret. Each proves it by an HMAC over a number that the other has just drawn; the client first, so that who
connects without the secret learns nothing that depends on it. From both numbers come the keys of the two directions;
the MAC of a frame covers its place in the direction, so that none can be dropped, repeated or put elsewhere unseen.
Content is not encrypted.

    client                      server
    HELLO (magic, version)
                                HELLO, 32 drawn bytes
    32 drawn bytes, proof
                                one byte (1: welcome), proof

A frame is a length (4 bytes, of the payload), a kind (1 byte), the payload, an HMAC-SHA256.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import struct
import time
from typing import Final, NamedTuple

import msgspec

VERSION = 1


class Greeting(NamedTuple):
    """How one kind of server is known: seven bytes, what people call it, and what starts it."""

    magic: bytes
    what: str
    command: str

    @property
    def hello(self) -> bytes:
        return self.magic + bytes([VERSION])


BLOCKS: Final = Greeting(b"PSTBLKS", "server of blocks", "penstock cache serve")
HELLO: Final = BLOCKS.hello
_DRAWN, MAC_BYTES = 32, 32
MOST_BYTES = 64 << 20
"""Of a payload: no block is larger."""
MOST_LISTED = 200_000
"""Blocks that one answer tells of."""
PATH = re.compile(r"[0-9A-Za-z]{1,64}/[0-9a-f]{1,64}/[0-9a-f]{32}-[0-9a-f]{1,8}(\.state)?")
"""What blocks are called: model, tenant, name, depth. Nothing else is a path for a server."""
GET, PUT, DROP, LIST, DONE, NONE = range(6)
"""Kinds. GET path: DONE block, or NONE. PUT path, 0, block: DONE, or NONE if there is no room. DROP path: DONE.
LIST `Ask`: DONE `BlockListing`."""
_HEAD = struct.Struct("<IB")


class PeerError(Exception):
    """The other side does not do what it should. `reason`: one word for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What is there below `prefix`, and what has changed since `since` in the life `epoch` of the server."""

    prefix: str
    epoch: str = ""
    since: int = 0


class BlockListing(msgspec.Struct, frozen=True, array_like=True):
    """`anew`: what was known before is void. `found`: (path, bytes), used longest ago first. Ask again from `until`;
    `more`: at once."""

    epoch: str
    until: int
    anew: bool
    more: bool
    found: list[tuple[str, int]]
    gone: list[str]


class Channel:
    """One end of a connection that both sides have agreed on. Every call may raise PeerError.

    `within_s`: how long a frame may take that has begun; `idle_s`: how long to wait for one to begin.
    """

    def __init__(self, sock: socket.socket, write_key: bytes, read_key: bytes, within_s: float) -> None:
        self.sock = sock
        self.within_s = self.idle_s = within_s
        self._keys = write_key, read_key
        self._written = self._read = 0

    def send(self, kind: int, *parts: bytes | bytearray | memoryview) -> None:
        size = sum(len(part) for part in parts)
        head = _HEAD.pack(size, kind)
        mac = self._mac(self._keys[0], self._written, head)
        for part in parts:
            mac.update(part)
        self._written += 1
        _send(self.sock, head + b"".join(parts) + mac.digest(), self.within_s)

    def receive(self, most: int = MOST_BYTES) -> tuple[int, bytearray]:
        """Kind and payload of the next frame, whose payload may have `most` bytes."""
        size, kind = _HEAD.unpack(receive_exactly(self.sock, _HEAD.size, self.idle_s))
        if size > most:
            raise PeerError("frame", f"a frame of {size} bytes came, and {most} were the most that could be")
        data = receive_exactly(self.sock, size + MAC_BYTES, self.within_s)
        payload = data[:size]
        mac = self._mac(self._keys[1], self._read, _HEAD.pack(size, kind))
        mac.update(payload)
        if not hmac.compare_digest(mac.digest(), bytes(data[size:])):
            raise PeerError("frame", "a frame is not what was sent")
        self._read += 1
        return kind, payload

    @staticmethod
    def _mac(key: bytes, number: int, head: bytes) -> hmac.HMAC:
        return hmac.new(key, number.to_bytes(8, "little") + head, "sha256")


def receive_exactly(sock: socket.socket, size: int, within_s: float) -> bytearray:
    """So many bytes, all of them within that time, however slowly they trickle in. Raises PeerError."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    until_s = time.monotonic() + within_s
    try:
        while at < size:
            sock.settimeout(max(0.001, until_s - time.monotonic()))
            num = sock.recv_into(view[at:])
            if not num:
                raise PeerError("lost", "the connection was closed")
            at += num
    except OSError as error:
        raise lost(error) from error
    return data


def lost(error: OSError) -> PeerError:
    if isinstance(error, TimeoutError):
        return PeerError("slow", "it does not answer")
    return PeerError("lost", error.strerror or str(error))


def join(sock: socket.socket, secret: bytes, within_s: float, greeting: Greeting = BLOCKS) -> Channel:
    """A client's part of the beginning; each of its answers within that time. Raises PeerError: version, secret, lost,
    slow."""
    _send(sock, greeting.hello, within_s)
    try:
        hello = bytes(receive_exactly(sock, len(greeting.hello), within_s))
    except PeerError as error:
        if error.reason == "lost" or not (hello := _answer_to_lines(sock)):
            said = "hangs up" if error.reason == "lost" else f"says nothing for {within_s:g} s"
            text = f"it {said} instead of telling that it is a {greeting.what}; is the port right, or is it stopped?"
            raise PeerError(error.reason, text) from error
    if hello[: len(greeting.magic)] != greeting.magic:
        what = "an HTTP server" if hello.startswith(b"HTTP/") else "something else"
        raise PeerError("version", f"{what} listens there, and no {greeting.what}; give the port of {greeting.command}")
    if hello != greeting.hello:
        raise PeerError("version", f"it speaks version {hello[-1]} of the protocol, and this side version {VERSION}")
    theirs, ours = bytes(receive_exactly(sock, _DRAWN, within_s)), secrets.token_bytes(_DRAWN)
    _send(sock, ours + _proof(secret, b"client", theirs, ours), within_s)
    try:
        answer = receive_exactly(sock, 1 + MAC_BYTES, within_s)
    except PeerError as error:
        raise PeerError("secret" if error.reason == "lost" else error.reason, "it did not accept the secret") from error
    if answer[0] != 1 or not hmac.compare_digest(bytes(answer[1:]), _proof(secret, b"server", theirs, ours)):
        raise PeerError("secret", "it has another secret")
    keys = [_proof(secret, way, theirs, ours) for way in (b"to server", b"to client")]
    return Channel(sock, keys[0], keys[1], within_s)


def _answer_to_lines(sock: socket.socket) -> bytes:
    """What begins the answer of who waits for the end of a line, as HTTP servers do; nothing if none comes."""
    try:
        _send(sock, b"\r\n\r\n", 0.5)
        return bytes(receive_exactly(sock, 5, 0.5))
    except PeerError:
        return b""


def admit(sock: socket.socket, secret: bytes, within_s: float, greeting: Greeting = BLOCKS) -> Channel:
    """A server's part. Raises PeerError."""
    hello = receive_exactly(sock, len(greeting.hello), within_s)
    if hello[: len(greeting.magic)] != greeting.magic:
        raise PeerError("version", "it does not speak this protocol")
    ours = secrets.token_bytes(_DRAWN)
    _send(sock, greeting.hello + ours, within_s)
    if hello != greeting.hello:
        raise PeerError("version", f"it speaks version {hello[-1]} of the protocol, and this side version {VERSION}")
    answer = receive_exactly(sock, _DRAWN + MAC_BYTES, within_s)
    theirs, proof = bytes(answer[:_DRAWN]), bytes(answer[_DRAWN:])
    if not hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs)):
        _send(sock, bytes(1 + MAC_BYTES), within_s)
        raise PeerError("secret", "it has another secret")
    _send(sock, b"\1" + _proof(secret, b"server", ours, theirs), within_s)
    keys = [_proof(secret, way, ours, theirs) for way in (b"to client", b"to server")]
    return Channel(sock, keys[0], keys[1], within_s)


def _proof(secret: bytes, role: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + of_server + of_client, "sha256")


def _send(sock: socket.socket, data: bytes, within_s: float) -> None:
    try:
        sock.settimeout(within_s)
        sock.sendall(data)
    except OSError as error:
        raise lost(error) from error
