"""A server of blocks, seen from an engine: connections that are made when they are needed, and left alone for a while
after they failed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from typing import NamedTuple

import msgspec

from penstock.runner.block_wire import DONE, DROP, GET, LIST, PUT, Ask, BlockListing, Channel, PeerError, join

CONNECT_S, ANSWER_S = 1.0, 2.0
"""The longest that a connection, and an answer, may take. Whoever waits for a load gives up later than that."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
"""After a failure nothing is tried for so long; twice as long after each further one."""
_log = logging.getLogger(__name__)


class Address(NamedTuple):
    """`secret`: proves who may speak."""

    host: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class BlockPeer:
    """For any threads; each that asks has a connection to itself. Every call may raise PeerError; while nothing is
    tried, at once. What changes is said once in the log."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        weakref.finalize(self, _close, self._idle)
        self._pause_s = 0.0
        self.next_s = float("-inf")
        """Nothing is tried before."""
        self._failed = PeerError("lost", "")

    def get(self, path: str, most: int) -> bytearray | None:
        """A block of at most so many bytes, or None if it is not there."""
        kind, payload = self._ask(GET, path.encode(), most=most)
        return payload if kind == DONE else None

    def put(self, path: str, data: bytearray) -> bool:
        """False: there is no room."""
        return self._ask(PUT, path.encode() + b"\0", data, most=0)[0] == DONE

    def drop(self, path: str) -> None:
        self._ask(DROP, path.encode(), most=0)

    def list(self, ask: Ask) -> BlockListing:
        _, payload = self._ask(LIST, msgspec.msgpack.encode(ask))
        try:
            return msgspec.msgpack.decode(payload, type=BlockListing)
        except msgspec.MsgspecError as error:
            raise self._down(PeerError("frame", f"its list cannot be read: {error}")) from error

    def _ask(self, kind: int, *parts: bytes | bytearray, most: int | None = None) -> tuple[int, bytearray]:
        with self._lock:
            if time.monotonic() < self.next_s:
                raise PeerError(self._failed.reason, str(self._failed))
        while True:
            with self._lock:
                channel = self._idle.pop() if self._idle else None
            is_new = channel is None
            try:
                if channel is None:
                    channel = self._connect()
                channel.send(kind, *parts)
                found = channel.receive() if most is None else channel.receive(most)
                break
            except PeerError as error:
                if channel is not None:
                    _close([channel])
                if is_new or error.reason != "lost":
                    raise self._down(error) from error  # else it has been started anew since, perhaps
        with self._lock:
            self._idle.append(channel)
        with self._lock:
            if self._pause_s:
                _log.warning("the server of blocks at %s answers again", self.address)
                self._pause_s = 0.0
        return found

    def _connect(self) -> Channel:
        try:
            sock = socket.create_connection((self.address.host, self.address.port), CONNECT_S)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise PeerError("slow", f"no connection within {CONNECT_S:g} s; is the address right?") from error
            if isinstance(error, socket.gaierror):
                said = f"nobody knows the name {self.address.host}; is it right?"
            elif isinstance(error, ConnectionRefusedError):
                said = "nothing listens there; start penstock cache serve, or mend the port"
            else:
                said = error.strerror or str(error)
            raise PeerError("unreachable", said) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return join(sock, self.address.secret, ANSWER_S)
        except BaseException:
            sock.close()
            raise

    def _down(self, error: PeerError) -> PeerError:
        """Mutates: when the next connection may be made."""
        with self._lock:
            if not self._pause_s:
                _log.warning("the server of blocks at %s cannot be used: %s; blocks are computed", self.address, error)
            if time.monotonic() >= self.next_s:  # not for each thread that has lost the same one
                self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
                self.next_s = time.monotonic() + self._pause_s
            self._failed = error
        return error


_peers: weakref.WeakValueDictionary[Address, BlockPeer] = weakref.WeakValueDictionary()


def peer_of(address: Address) -> BlockPeer:
    """The one of this process: what one of its users finds out, all know, and the log has it once."""
    peer = _peers.get(address)
    if peer is None:
        peer = _peers[address] = BlockPeer(address)
    return peer


def _close(channels: list[Channel]) -> None:
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.sock.close()
