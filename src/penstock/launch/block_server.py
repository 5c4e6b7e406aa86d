"""A server of blocks: keeps, for engines on this machine or on others, what they ask it to, in memory or in a folder.

It knows names and bytes, and nothing of what they hold; engines check what they get. All that comes in is bounded:
connections, frames, the time that a frame may take, what all blocks may take together. Used longest ago goes first, of
one text its end (`kv.store_index`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.base.errors import ConfigError
from penstock.kv.store_index import FoundBlock, StoreIndex
from penstock.runner.block_wire import (
    DONE,
    DROP,
    GET,
    LIST,
    MOST_LISTED,
    NONE,
    PATH,
    PUT,
    Ask,
    BlockListing,
    Channel,
    PeerError,
    admit,
)

MOST_CONNECTIONS = 128
FRAME_S, IDLE_S = 10.0, 600.0
"""The longest that a frame may take, and that a connection may say nothing."""
MOST_CHANGES = 1 << 17
"""Changes that are remembered for who asks what is new; who has missed more hears of everything anew."""
_log = logging.getLogger(__name__)


class Shelf(Protocol):
    """Where the bytes are. `read` gives None for what is not there; `write` and `read` may raise OSError."""

    def read(self, path: str) -> bytes | None: ...
    def write(self, path: str, data: memoryview) -> None: ...
    def remove(self, path: str) -> None: ...
    def found(self) -> list[FoundBlock]: ...


class MemoryShelf:
    """Gone when the server is."""

    def __init__(self) -> None:
        self._blocks: dict[str, bytes] = {}

    def read(self, path: str) -> bytes | None:
        return self._blocks.get(path)

    def write(self, path: str, data: memoryview) -> None:
        self._blocks[path] = bytes(data)

    def remove(self, path: str) -> None:
        self._blocks.pop(path, None)

    def found(self) -> list[FoundBlock]:
        return []


class FolderShelf:
    """Files below a folder that is this user's alone."""

    def __init__(self, folder: Path, files: Callable[[Path], list[tuple[str, os.stat_result]]]) -> None:
        self._folder, self._files = folder, files

    def read(self, path: str) -> bytes | None:
        try:
            place = self._folder / path
            data = place.read_bytes()
            os.utime(place)
        except FileNotFoundError:
            return None
        return data

    def write(self, path: str, data: memoryview) -> None:
        target = self._folder / path
        for folder in (target.parent.parent, target.parent):  # with `parents` these would have another mode
            folder.mkdir(mode=0o700, exist_ok=True)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def remove(self, path: str) -> None:
        (self._folder / path).unlink(missing_ok=True)

    def found(self) -> list[FoundBlock]:
        out = []
        for path, info in self._files(self._folder):
            if PATH.fullmatch(path):
                out.append(FoundBlock(path, info.st_size, int(info.st_mtime)))
            elif path.rpartition("/")[2].startswith("."):
                self.remove(path)  # what a server that was killed had half written
        return out


@dataclass
class Counts:
    """Since start."""

    connections: int = 0
    refused: int = 0
    got: int = 0
    missed: int = 0
    put: int = 0
    no_room: int = 0


@dataclass
class _Changes:
    """What came and went, with a number each. `first`: changes before this one are forgotten."""

    first: int = 1
    last: int = 0
    rows: deque[tuple[str, bool, int]] = field(default_factory=deque)

    def add(self, path: str, came: bool, num_bytes: int) -> None:
        self.last += 1
        self.rows.append((path, came, num_bytes))
        if len(self.rows) > MOST_CHANGES:
            self.rows.popleft()
            self.first += 1


class BlockServer:
    """`sock`: listens already. `secret`: of those who may speak. Threads: one, and one for each connection."""

    def __init__(self, sock: socket.socket, secret: bytes, shelf: Shelf, limit_bytes: int) -> None:
        self.sock = sock
        self.counts = Counts()
        self._secret, self._shelf = secret, shelf
        self._epoch = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._index = StoreIndex(limit_bytes)
        self._index.keeps_changes = True
        self._changes = _Changes()
        self._open: set[socket.socket] = set()
        self._index.found(shelf.found())  # if that is too much, the next block makes room
        self._note()

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def run(self) -> None:
        """Until `close`."""
        while True:
            try:
                peer, address = self.sock.accept()
            except OSError:
                return  # closed
            with self._lock:
                room = len(self._open) < MOST_CONNECTIONS
                if room:
                    self._open.add(peer)
                    self.counts.connections += 1
                else:
                    self.counts.refused += 1
            if not room:
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer, address), name="penstock-peer", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # accept returns
        self.sock.close()
        with self._lock:
            peers = list(self._open)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _serve(self, peer: socket.socket, address: tuple[str, int]) -> None:
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = admit(peer, self._secret, FRAME_S)
            channel.idle_s = IDLE_S
            while True:
                kind, payload = channel.receive()
                self._answer(channel, kind, payload)
        except PeerError as error:
            if error.reason in ("secret", "version", "frame"):
                with self._lock:
                    self.counts.refused += 1
                _log.warning("%s is not served: %s", address[0], error)
        except OSError as error:
            _log.warning("%s is not served: %s", address[0], error.strerror or error)
        finally:
            with self._lock:
                self._open.discard(peer)
            peer.close()

    def _answer(self, channel: Channel, kind: int, payload: bytearray) -> None:
        if kind == LIST:
            try:
                ask = msgspec.msgpack.decode(payload, type=Ask)
            except msgspec.MsgspecError as error:
                raise PeerError("frame", f"it asks what cannot be read: {error}") from error
            channel.send(DONE, msgspec.msgpack.encode(self._list(ask)))
            return
        end = payload.find(b"\0", 0, 300) if kind == PUT else len(payload)
        path = bytes(payload[: min(end, 300)]).decode("ascii", "replace") if end >= 0 else ""
        if kind not in (GET, PUT, DROP) or not PATH.fullmatch(path):
            raise PeerError("frame", "it asks for what there is not")
        if kind == GET:
            block = self._get(path)
            channel.send(NONE) if block is None else channel.send(DONE, block)
        elif kind == PUT:
            channel.send(DONE if self._put(path, memoryview(payload)[end + 1 :]) else NONE)
        else:
            self._drop(path)
            channel.send(DONE)

    def _get(self, path: str) -> bytes | None:
        try:
            block = self._shelf.read(path)
        except OSError as error:
            _log.warning("%s cannot be read: %s", path, error.strerror)
            block = None
        with self._lock:
            if block is None:
                self.counts.missed += 1
            else:
                self.counts.got += 1
                self._index.tick += 1
                self._index.touch([path], self._index.tick)
            is_lost = block is None and path in self._index
        if is_lost:
            self._drop(path)
        return block

    def _put(self, path: str, data: memoryview) -> bool:
        with self._lock:
            self._index.tick += 1
            wanted, gone = self._index.prepare_store(path, len(data), self._index.tick)
            known = path in self._index
            self._note()
        for old in gone:
            self._shelf.remove(old)
        if not wanted:
            with self._lock:
                self.counts.no_room += not known
            return known
        good = False
        try:
            self._shelf.write(path, data)
            good = True
        except OSError as error:
            _log.warning("%s cannot be written: %s", path, error.strerror)
        with self._lock:
            self._index.complete_store(path, good=good)
            self.counts.put += good
            self._note()
        return good

    def _drop(self, path: str) -> None:
        with self._lock:
            self._index.found([], [path])
            self._note()
        self._shelf.remove(path)

    def _note(self) -> None:
        """Number what has changed in the index; with the lock."""
        for path, came in self._index.take_changes():
            self._changes.add(path, came, self._index.size_of(path) if came else 0)

    def _list(self, ask: Ask) -> BlockListing:
        with self._lock:
            changes = self._changes
            anew = ask.epoch != self._epoch or not changes.first - 1 <= ask.since <= changes.last
            if anew:
                paths = [path for path in self._index.oldest_first() if path.startswith(ask.prefix)]
                found = [(path, self._index.size_of(path)) for path in paths[-MOST_LISTED:]]
                return BlockListing(self._epoch, changes.last, True, False, found, [])
            begin = ask.since - changes.first + 1
            rows = list(islice(changes.rows, begin, begin + MOST_LISTED))
            until = ask.since + len(rows)
            found, gone = [], []
            last = {path: (came, num_bytes) for path, came, num_bytes in rows if path.startswith(ask.prefix)}
            for path, (came, num_bytes) in last.items():
                if came:
                    found.append((path, num_bytes))
                else:
                    gone.append(path)
            return BlockListing(self._epoch, until, False, until < changes.last, found, gone)


def listen(text: str, *, anywhere: bool) -> socket.socket:
    """`HOST:PORT`. Raises ConfigError, also for an address of others than this machine unless `anywhere`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen {text} is no HOST:PORT, such as 127.0.0.1:7900", field="")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        if not anywhere and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise ConfigError(
                f"--listen {text} can be reached from other machines, and blocks are not encrypted on the way; "
                "say --anywhere if that is meant",
                field="",
            )
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(64)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"--listen {text} cannot be used: {error.strerror or error}", field="") from error
    return sock
