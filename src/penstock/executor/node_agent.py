"""The other hosts' side of `executor.nodes`: waits for the lead, starts this host's ranks when it says so, ends them
with it, and waits again."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from penstock.base.errors import EngineError
from penstock.config import SETTINGS
from penstock.executor.multiproc import COMMAND
from penstock.executor.node_wire import Alike, Begin, Ended, Joins, hear, join, say
from penstock.executor.nodes import signal_name
from penstock.parallel.comm import SharedComm, shared_memory
from penstock.parallel.relay import RELAY_SPIN_US, HostRelay
from penstock.runner.block_wire import Channel, PeerError

_AGAIN_S = 0.3
_REFUSALS = 3
"""The lead may have died in the middle of a greeting; if it hangs up so often, it does not know our secret."""
OF_A_HOST = ("model", "tokenizer", "threads", "log_file", "node_rank", "ranks_secret_file")
"""Settings that each host has of its own; all others are the lead's."""
log = logging.getLogger("penstock.ranks")


class NodeAgent:
    """Ranks of host `host` for whatever engine the lead has."""

    def __init__(
        self, address: str, port: int, secret: bytes, alike: Alike, host: int, config: Mapping[str, Any],
        command: Sequence[str] = COMMAND,
    ) -> None:  # fmt: skip
        """`config`: this host's settings, whose `model` is a folder or file here. `command` starts a rank's process."""
        self._where, self._secret, self._alike, self._host = (address, port), secret, alike, host
        self._config, self._command = config, command
        self._told: set[str] = set()

    def run(self) -> None:
        """For ever, in the main thread: ranks die with it. Raises EngineError if the lead will never take this host."""
        refusals = waiting = 0
        while True:
            try:
                control = self._join(Joins("node", self._host))
            except PeerError as error:
                refusals = refusals + 1 if error.reason in ("secret", "version") else 0
                if refusals >= _REFUSALS:
                    raise EngineError(f"the lead at {self._lead} does not take this host: {error}") from error
                waiting += 1
                if waiting == 1:
                    log.info("waiting for the lead at %s", self._lead)
                time.sleep(_AGAIN_S)
                continue
            refusals = waiting = 0
            log.info("the lead at %s has taken this host", self._lead)
            with closing(control.sock):
                try:
                    self._serve(control)
                except (PeerError, OSError) as error:
                    log.warning("the lead is gone: %s", error)

    @property
    def _lead(self) -> str:
        return "{}:{}".format(*self._where)

    def _join(self, joins: Joins) -> Channel:
        return join(*self._where, self._secret, self._alike, joins)

    def _serve(self, control: Channel) -> None:
        """One beginning of the engine, to its end."""
        poll = select.poll()
        poll.register(control.sock, select.POLLIN)
        poll.poll()
        begin = hear(control, Begin)
        self._tell_differences(begin.config)
        ranks = range(begin.first, begin.first + begin.count)
        with self._running(begin, ranks) as (processes, relay_ended):
            log.info("rank%s of %d begin", _listed(ranks), self._alike.ranks)
            fds = {os.pidfd_open(process.pid): rank for rank, process in processes.items()}
            try:
                for fd in (*fds, relay_ended.fileno()):
                    poll.register(fd, select.POLLIN)
                ready = [fd for fd, _ in poll.poll()]
            finally:
                for fd in fds:
                    os.close(fd)
            for rank in (fds[fd] for fd in ready if fd in fds):
                status = processes[rank].wait()
                how = f"exit code {status}" if status >= 0 else signal_name(-status)
                log.info("rank %d ended with %s: all of this host end", rank, how)
                with contextlib.suppress(PeerError):
                    say(control, Ended(rank, status))
                return
        log.info("the lead is gone: its ranks end")

    @contextmanager
    def _running(
        self, begin: Begin, ranks: range
    ) -> Iterator[tuple[dict[int, subprocess.Popen[bytes]], socket.socket]]:  # fmt: skip
        """The ranks' processes, and a socket that can be read when the relay has ended. Nothing is left of them."""
        size, host = self._alike.ranks, self._host
        processes: dict[int, subprocess.Popen[bytes]] = {}
        memory = shared_memory(size)
        news, tell = socket.socketpair()
        relay: HostRelay | None = None

        def ended(why: str) -> None:
            with contextlib.suppress(OSError):
                tell.send(why.encode() or b"-")

        try:
            exchange = SharedComm(memory, begin.first, size, spin_us=RELAY_SPIN_US).exchange
            sock = self._join(Joins("relay", host, begin.group)).sock
            others = set(range(size)) - set(ranks)
            relay = HostRelay(exchange, sock, gives=ranks, takes=others, ended=ended)
            own = {name: self._config[name] for name in OF_A_HOST if self._config.get(name) is not None}
            model = self._config["model"]
            for rank in ranks:
                steps = Joins("steps", host, begin.group, rank, memory, model, own)
                with closing(self._join(steps).sock) as sock:
                    aside = Joins("aside", host, begin.group, rank)
                    with closing(self._join(aside).sock) as other:
                        processes[rank] = self._spawn(sock, other, memory)
            yield processes, news
        finally:
            for process in processes.values():
                process.kill()
            for process in processes.values():
                process.wait()
            if relay is not None:
                relay.close()
            os.close(memory)
            news.close()
            tell.close()

    def _spawn(self, steps: socket.socket, aside: socket.socket, memory: int) -> subprocess.Popen[bytes]:
        for sock in (steps, aside):
            sock.settimeout(None)
        fds = steps.fileno(), aside.fileno()
        words = [*map(str, fds), "-1", "1"]
        return subprocess.Popen([*self._command, *words], stdin=subprocess.DEVNULL, pass_fds=[*fds, memory])

    def _tell_differences(self, lead: Mapping[str, Any]) -> None:
        """Of settings given here that the lead has otherwise: its own are used."""
        for name, value in self._config.items():
            is_given = name in SETTINGS and value != SETTINGS[name].default
            if is_given and name not in OF_A_HOST and lead.get(name) != value and name not in self._told:
                self._told.add(name)
                log.warning("%s is %s here and %s at the lead, whose setting counts", name, value, lead.get(name))


def _listed(ranks: Iterable[int]) -> str:
    *others, last = map(str, ranks)
    return f" {last}" if not others else f"s {', '.join(others)} and {last}"
