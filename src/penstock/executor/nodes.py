"""Ranks on other hosts, as the engine has them: each host connects to the lead, and its ranks' sockets reach here.

All connections meet in one port of the lead (a star): what a rank of one host gives to those of a third goes through
the lead, so hosts need to reach nobody else. Each part of a rank crosses as many connections as there are other hosts,
as in a mesh.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from penstock.base.errors import EngineError, RankGoneError
from penstock.core.links import Links
from penstock.engine.blackbox import BlackBox
from penstock.executor.multiproc import StartedRank
from penstock.executor.node_wire import (
    Alike,
    Begin,
    Ended,
    HostAnswer,
    Joins,
    admit,
    difference,
    hear,
    listen,
    say,
    secret_of,
)
from penstock.executor.rank import RankSpec
from penstock.parallel.comm import SharedComm
from penstock.parallel.relay import RELAY_SPIN_US, HostRelay
from penstock.plan.ranks import ranks_of_host
from penstock.runner.block_wire import Channel, PeerError

NODES_S = 120.0
"""The engine waits so long for the other hosts when it starts, also when it starts again."""
RANKS_S = 60.0
"""Their ranks' processes have to connect within so many seconds."""
_MOST_STRANGERS = 64
"""Connections that have not said yet who they are."""
_LOOK_S = 0.25
log = logging.getLogger("penstock.ranks")


class RankHost:
    """Another host that has come, from the lead's side."""

    def __init__(self, host: int, channel: Channel, peer: str, gone: Callable[[], None]) -> None:
        self.host, self.channel, self.peer = host, channel, peer
        self.over = threading.Event()
        self.problem = ""
        self.status: int | None = None
        self.relay: HostRelay | None = None
        self._gone = gone
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"host {self.host} ({self.peer})"

    def follow(self) -> None:
        """Hears how its ranks end, until the connection does."""
        try:
            poll = select.poll()
            poll.register(self.channel.sock, select.POLLIN)
            poll.poll()
            ended = hear(self.channel, Ended)
        except (PeerError, OSError, ValueError):
            self.end("the connection to it is lost", None)
            return
        how = f"exit code {ended.status}" if ended.status >= 0 else signal_name(-ended.status)
        self.end(f"rank {ended.rank} there ended with {how}", ended.status)

    def end(self, problem: str, status: int | None) -> None:
        """The first word counts. `status` None: nobody knows."""
        with self._lock:
            if not self.over.is_set():
                self.problem, self.status = problem, -signal.SIGKILL if status is None else status
                self.over.set()
        self._gone()

    def relay_ended(self, why: str) -> None:
        """What the host says of its ranks comes at about the same time, and says more."""
        if not self.over.wait(1.0):
            self.end(f"what ranks give each other does not reach it any more: {why}", None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)


class RemoteProcess:
    """A rank's process on another host; see `multiproc.RankProcess`."""

    pid = 0

    def __init__(self, node: RankHost) -> None:
        self._node = node

    def poll(self) -> int | None:
        return self._node.status

    def wait(self, timeout: float | None = None) -> int:
        if not self._node.over.wait(timeout) or self._node.status is None:
            raise subprocess.TimeoutExpired(str(self._node), timeout or 0.0)
        return self._node.status

    def kill(self) -> None:
        """Its host ends it when it hears no more of us."""
        self._node.close()
        self._node.end("it was ended", -signal.SIGKILL)


class RankArrival:
    """A rank of another host: its sockets, as they come."""

    def __init__(self) -> None:
        self.steps: tuple[Channel, Joins] | None = None
        self.aside: Channel | None = None


class Nodes:
    """The hosts with node_rank 1 and above of one engine, and their ranks. `close` leaves nothing of them."""

    def __init__(self, spec: RankSpec, memory: int, own: Alike, box: BlackBox | None) -> None:
        """Waits until all have come. `memory`: see `parallel.comm.shared_memory`. Raises ConfigError (address, port,
        secret), EngineError for a host that does not come."""
        config = spec.config
        self._config, self._own = config, own
        self.size, self.num = own.ranks, own.hosts
        self._exchange = SharedComm(memory, 0, self.size, spin_us=RELAY_SPIN_US).exchange
        address, port = config["master_addr"], config["master_port"]
        self._secret = secret_of(config["ranks_secret_file"], address)
        self._changed = threading.Condition()
        self._nodes: dict[int, RankHost] = {}
        self._arrivals: dict[int, RankArrival] = {}
        self._closed = False
        self._group = ""
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._threads: list[threading.Thread] = []
        self._news, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self._sock = listen(address, port)
        try:
            self._start(self._accept, "penstock-hosts")
            self._until(lambda: len(self._nodes) == self.num - 1, NODES_S, box, self._missing)
            self._begin()
            self._until(self._all_there, RANKS_S, box, lambda: "the ranks of other hosts do not connect")
        except BaseException:
            self.close()
            raise

    # -- hosts come ----------------------------------------------------------------------------------------------

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._sock.accept()
            except OSError:
                return  # closed
            if not self._strangers.acquire(blocking=False):
                log.warning("a connection from %s was refused: there are too many", peer[0])
                sock.close()
                continue
            self._start(partial(self._meet, sock, f"{peer[0]}:{peer[1]}"), "penstock-host")

    def _meet(self, sock: socket.socket, peer: str) -> None:
        follow: Callable[[], None] | None = None
        try:
            channel, theirs, joins = admit(sock, self._secret)
            follow = self._take(channel, theirs, joins, peer)
        except (PeerError, msgspec.MsgspecError, OSError) as error:
            log.warning("a connection from %s was refused: %s", peer, error)
        finally:
            self._strangers.release()
            if follow is None:
                sock.close()
        if follow is not None:
            follow()

    def _take(self, channel: Channel, theirs: list[Any], said: Any, peer: str) -> Callable[[], None] | None:
        """What has come in its place; what to do then. None: it was refused, and told why. Raises PeerError."""
        number = said[1] if isinstance(said, list) and len(said) > 1 else -1
        problem, for_good = difference(self._own, theirs, number), True
        joins = None
        with self._changed:
            if not problem:
                joins = msgspec.convert(said, Joins)
                problem, for_good = self._unfit(joins)
            if problem or joins is None:
                log.warning("%s was refused: %s", peer, problem)
                say(channel, HostAnswer(problem, for_good))
                return None
            say(channel, HostAnswer())
            follow = self._put(channel, joins, peer)
            self._changed.notify_all()
        return follow

    def _unfit(self, joins: Joins) -> tuple[str, bool]:
        """Why it cannot come, and whether for good."""
        host = joins.host
        if not 0 < host < self.num:
            return f"node_rank {host} is none of 1 ... {self.num - 1}", True
        if joins.what == "node":
            return (f"host {host} is there already", False) if host in self._nodes or self._closed else ("", False)
        node = self._nodes.get(host)
        if node is None or not self._group or joins.group != self._group or node.over.is_set():
            return "the engine that began these ranks is gone", False
        if joins.what == "relay":
            return ("it is connected already", True) if node.relay is not None else ("", False)
        arrival = self._arrivals.get(joins.rank)
        if joins.rank not in ranks_of_host(host, self.size, self.num) or arrival is None:
            return f"rank {joins.rank} is none of host {host}", True
        had = arrival.steps if joins.what == "steps" else arrival.aside
        return (f"rank {joins.rank} is there already", True) if had is not None else ("", False)

    def _put(self, channel: Channel, joins: Joins, peer: str) -> Callable[[], None]:
        host = joins.host
        if joins.what == "node":
            node = self._nodes[host] = RankHost(host, channel, peer, self._alarm)
            return node.follow
        channel.sock.settimeout(None)
        if joins.what == "relay":
            theirs = ranks_of_host(host, self.size, self.num)
            node = self._nodes[host]
            node.relay = HostRelay(
                self._exchange, channel.sock, gives=set(range(self.size)) - set(theirs), takes=theirs,
                ended=node.relay_ended,
            )  # fmt: skip
        elif joins.what == "steps":
            self._arrivals[joins.rank].steps = channel, joins
        else:
            self._arrivals[joins.rank].aside = channel
        return lambda: None

    def _begin(self) -> None:
        with self._changed:
            self._group = secrets.token_hex(8)
            for host, node in self._nodes.items():
                theirs = ranks_of_host(host, self.size, self.num)
                self._arrivals |= {rank: RankArrival() for rank in theirs}
                try:
                    say(node.channel, Begin(self._group, theirs[0], len(theirs), self._config))
                except PeerError as error:
                    raise RankGoneError(f"{node} is gone: {error}", killed=True) from error

    def _all_there(self) -> bool:
        return all(a.steps is not None and a.aside is not None for a in self._arrivals.values()) and all(
            node.relay is not None for node in self._nodes.values()
        )

    def _until(
        self, there: Callable[[], bool], within_s: float, box: BlackBox | None, missing: Callable[[], str]
    ) -> None:
        """Raises EngineError with `missing` if it takes too long, RankGoneError if a host goes meanwhile."""
        until_s = time.monotonic() + within_s
        with self._changed:
            while not there():
                if time.monotonic() > until_s:
                    raise EngineError(missing())
                self._changed.wait(_LOOK_S)
                if box is not None:
                    box.progress()  # to wait for hosts is no standstill
                self.check()

    def _missing(self) -> str:
        hosts = [host for host in range(1, self.num) if host not in self._nodes]
        which = " and ".join(f"host {host}" for host in hosts)
        config = self._config
        return (
            f"{which} did not come within {NODES_S:g} s; run there: penstock serve MODEL --headless "
            f"--tensor-parallel-size {self.size} --nnodes {self.num} --node-rank {hosts[0]} --master-addr "
            f"{config['master_addr']} --master-port {config['master_port']}"
        )

    # -- while they are there --------------------------------------------------------------------------------------

    def _alarm(self) -> None:
        with contextlib.suppress(OSError):
            self._tell.send(b"!")
        with self._changed:
            self._changed.notify_all()

    def fileno(self) -> int:
        """Readable when a host is gone."""
        return self._news.fileno()

    def check(self) -> None:
        """Raises RankGoneError if a host is gone."""
        for node in list(self._nodes.values()):
            if node.over.is_set():
                killed = node.status == -signal.SIGKILL
                raise RankGoneError(f"the ranks of {node} are gone: {node.problem}", killed=killed)

    def is_here(self, rank: int) -> bool:
        return rank in ranks_of_host(0, self.size, self.num)

    def rank(self, spec: RankSpec) -> tuple[RankSpec, StartedRank]:
        """What it is made of there, and its process."""
        host = spec.rank // (self.size // self.num)
        arrival = self._arrivals[spec.rank]
        assert arrival.steps is not None
        assert arrival.aside is not None
        channel, joins = arrival.steps
        own = msgspec.structs.replace(
            spec, links=Links(joins.exchange), model=joins.model, config={**spec.config, **joins.own}
        )
        return own, StartedRank(RemoteProcess(self._nodes[host]), channel.sock, arrival.aside.sock)

    @property
    def wire_bytes(self) -> int:
        """That have crossed a connection between hosts, with the heads of frames; all of them end here."""
        counts = [node.relay.counts for node in self._nodes.values() if node.relay is not None]
        return sum(c.given_bytes + c.taken_bytes for c in counts)

    def close(self) -> None:
        """Also called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            nodes, arrivals = list(self._nodes.values()), list(self._arrivals.values())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for node in nodes:
            if node.relay is not None:
                node.relay.close()
            node.close()
        for arrival in arrivals:
            for channel in (arrival.steps[0] if arrival.steps else None, arrival.aside):
                if channel is not None:
                    channel.sock.close()
        for thread in self._threads:
            thread.join(_LOOK_S)
        for node in nodes:
            node.channel.sock.close()
        self._news.close()
        self._tell.close()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
