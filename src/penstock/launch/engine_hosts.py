"""The server's side of engines on other hosts: a port where hosts come for engines by number, and are let in or not.

As hosts of ranks do (`executor.nodes`), they prove that they know a secret, and are of the same build, kernels and
model, before anything else is said (`executor.node_wire`). A host has a connection for each engine that it comes for,
and one more for each engine process that it was told to begin, which is the engine's own from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.errors import ConfigError
from penstock.core.engine_host import FromEngineHost, ToEngineHost, other_settings
from penstock.executor.node_wire import (
    ENGINES,
    Alike,
    EngineJoins,
    HostAnswer,
    admit,
    alike_engines,
    difference,
    hear,
    listen,
    say,
    secret_of,
)
from penstock.launch.hub import local_path
from penstock.runner.block_wire import Channel, PeerError

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.engine.remote_link import RemoteLink

SILENT_S = 20.0
"""A host that says nothing for so long is out of reach: it speaks twice a second."""
_MOST_STRANGERS = 64
"""Connections that have not said yet who they are."""
_CLOSES_S = 1.0
log = logging.getLogger("penstock.engine")


class HostLine:
    """A host that has come for the engine of `link`; `engine.remote_link.EngineHost`."""

    def __init__(self, name: str, own: Mapping[str, Any], channel: Channel, link: RemoteLink) -> None:
        self.name, self.own, self.link = name, own, link
        self._channel = channel

    def tell(self, order: ToEngineHost) -> None:
        with contextlib.suppress(PeerError):  # whoever hears it finds that out, too
            say(self._channel, order)

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)

    def follow(self, heard: Callable[[FromEngineHost], None], silent_s: float) -> str:
        """Passes on what it says until it is gone, and returns why."""
        poll = select.poll()
        poll.register(self._channel.sock, select.POLLIN)
        while True:
            if not poll.poll(1000 * silent_s):
                return f"it has said nothing for {silent_s:g} s"
            try:
                heard(hear(self._channel, FromEngineHost))
            except (PeerError, OSError, ValueError) as error:
                return f"the connection was lost ({error})"


class EngineHosts:
    """Lets hosts in, from `begin` to `close`. Made before anything is started: the port is taken then.

    `silent_s`: see SILENT_S.
    """

    def __init__(self, config: EngineConfig, *, silent_s: float = SILENT_S) -> None:
        """Raises ConfigError for an address, a port or a secret that will not do."""
        run = config.execution
        self._config, self._size, self._first = config, run.data_parallel_size, run.size_here
        self._address, self._port = run.data_parallel_address, run.data_parallel_rpc_port
        if run.data_parallel_start_rank is not None:
            raise ConfigError(
                "data_parallel_start_rank: engines of the server's own host begin at 0; give it on the other hosts, "
                "with headless",
                field="data_parallel_start_rank",
            )
        self._secret = secret_of(run.ranks_secret_file, self._address, ENGINES)
        self._silent_s = silent_s
        self._sock = listen(self._address, self._port, ENGINES)
        self._links: dict[int, RemoteLink] = {}
        self._lines: list[HostLine] = []
        self._own: Alike | None = None
        self._told: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, links: Sequence[RemoteLink]) -> None:
        """In the event loop's thread. Hosts that come now wait until the model's files have been hashed."""
        self._loop = asyncio.get_running_loop()
        self._links = {link.number: link for link in links}
        # As it is when it has crossed a wire: what hosts were given is compared with it.
        self._told = msgspec.msgpack.decode(msgspec.msgpack.encode(self._config.as_kwargs()))
        local = self._size - self._first
        log.log(
            logging.INFO if self._first else logging.WARNING,  # without an engine here nothing begins before that
            "engines %d ... %d are on other hosts; run there: penstock serve MODEL --headless --data-parallel-size %d "
            "--data-parallel-size-local %d --data-parallel-start-rank %d --data-parallel-address %s "
            "--data-parallel-rpc-port %d",
            self._first, self._size - 1, self._size, local, self._first, self._address, self._port,
        )  # fmt: skip
        self._start(self._accept, "penstock-hosts")

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        try:
            self._own = alike_engines(str(local_path(self._config.model.model, self._config.model.revision)))
        except Exception as error:  # the engines of this host say it, too
            log.error("no other host can join: %s", error)
            return
        while True:
            try:
                sock, peer = self._sock.accept()
            except OSError:
                return  # closed
            if not self._strangers.acquire(blocking=False):
                log.warning("a connection from %s was refused: there are too many", peer[0])
                sock.close()
                continue
            self._start(partial(self._meet, sock, peer[0]), "penstock-host")

    def _meet(self, sock: socket.socket, peer: str) -> None:
        follow: Callable[[], None] | None = None
        try:
            channel, theirs, said = admit(sock, self._secret, ENGINES)
            follow = self._take(channel, theirs, said, peer)
        except (PeerError, msgspec.MsgspecError, OSError) as error:
            log.warning("a connection from %s was refused: %s", peer, error)
        finally:
            self._strangers.release()
            if follow is None:
                sock.close()
        if follow is not None:
            follow()

    def _take(self, channel: Channel, theirs: list[Any], said: Any, peer: str) -> Callable[[], None] | None:
        """What is to be done with it; None: it was refused, and told why. Raises PeerError."""
        assert self._own is not None
        number = said[1] if isinstance(said, list) and len(said) > 1 else -1
        own = self._own
        if self._config.execution.ops == "ref":  # nothing of the kernels is used
            own = msgspec.structs.replace(own, isa=theirs[1], kernels=theirs[2]) if len(theirs) > 2 else own
        problem, for_good = difference(own, theirs, number, ENGINES), True
        joins = None
        if not problem:
            joins = msgspec.convert(said, EngineJoins)
            problem, for_good = self._unfit(joins)
        if problem or joins is None:
            log.warning("%s was refused: %s", peer, problem)
            say(channel, HostAnswer(problem, for_good))
            return None
        link = self._links[joins.number]
        if joins.what == "engine":
            say(channel, HostAnswer())
            return partial(self._in_loop, self._hand_over, link, joins.group, channel.sock)
        name = "".join(c for c in joins.name[:64] if c.isprintable())
        line = HostLine(f"{name} ({peer})" if name else peer, joins.own, channel, link)
        if not self._reserve(line):
            say(channel, HostAnswer(f"engine {joins.number} has a host already", for_good=False))
            return None
        return partial(self._follow, line, channel)

    def _unfit(self, joins: EngineJoins) -> tuple[str, bool]:
        """Why it cannot come, and whether for good."""
        if joins.size != self._size:
            return (
                f"data_parallel_size is {joins.size} at the host and {self._size} at the server; give the same at both"
            ), True
        link = self._links.get(joins.number)
        if link is None:
            return (
                f"engine {joins.number} is none of those on other hosts, {self._first} ... {self._size - 1}; give "
                "data_parallel_start_rank, and data_parallel_size_local, so that they are"
            ), True
        if link.dismissed:
            return link.dismissed, True
        if joins.what == "host" and (problem := other_settings(self._told, joins.given)):
            return problem, True
        return "", False

    def _reserve(self, line: HostLine) -> bool:
        """Two hosts that come for one engine: the first has it."""
        with self._lock:
            if self._closed or any(other.link is line.link for other in self._lines):
                return False
            self._lines.append(line)
        return True

    def _follow(self, line: HostLine, channel: Channel) -> None:
        link, why = line.link, "the server is closing"
        try:
            say(channel, HostAnswer())
            log.info("%s has come for engine %d", line.name, link.number)
            self._in_loop(link.host_came, line)
            why = line.follow(lambda news: self._in_loop(link.heard, line, news), self._silent_s)
        except PeerError as error:
            why = str(error)
        finally:
            self._in_loop(link.host_left, line, why)
            with self._lock:
                self._lines.remove(line)
            channel.sock.close()

    def _in_loop(self, call: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(call, *args)

    @staticmethod
    def _hand_over(link: RemoteLink, group: str, sock: socket.socket) -> None:
        if not link.connected(group, sock):
            sock.close()

    def close(self) -> None:
        """Behind the engines: hosts wait for the next server from now on."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lines, threads = list(self._lines), list(self._threads)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for line in lines:
            line.leave()
        until_s = time.monotonic() + _CLOSES_S
        for thread in threads:  # those of strangers may take longer, and hold nothing
            thread.join(max(0.0, until_s - time.monotonic()))
