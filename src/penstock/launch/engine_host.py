"""`penstock serve MODEL --headless --data-parallel-start-rank N`: a host with engines of a server that is elsewhere.

For each engine one thread, which comes to the server (`launch.engine_hosts`), starts an engine process when it is told
to, watches it, tells how it ends, and comes again when the server was lost. The engine process has a connection of its
own to the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from penstock.base.errors import ConfigError, EngineError
from penstock.config import SETTINGS, EngineConfig
from penstock.core.engine_host import (
    MEETING_SETTINGS,
    OWN_SETTINGS,
    BeginEngine,
    Dismissed,
    EndEngine,
    EngineEnded,
    HostPulse,
    ToEngineHost,
)
from penstock.engine.blackbox import BlackBox
from penstock.engine.pulse import Pulse
from penstock.engine.spawn import COMMAND, spawn_on
from penstock.executor.node_wire import (
    ENGINES,
    Alike,
    EngineJoins,
    alike_engines,
    hear,
    join,
    say,
    secret_of,
)
from penstock.launch.hub import local_path
from penstock.launch.progress import loading
from penstock.runner.block_wire import Channel, PeerError

PULSE_S = 0.5
_AGAIN_S = 0.3
_REFUSALS = 3
"""The server may have died in the middle of a greeting; if it hangs up so often, it does not know our secret."""
log = logging.getLogger("penstock.engine")


def run_engine_host(config: EngineConfig) -> int:
    """Until a signal to end. Raises: ConfigError, ModelError (the model), EngineError if the server will have none of
    this host's engines."""
    run = config.execution
    size, first = run.data_parallel_size, run.data_parallel_start_rank
    num = 1 if run.data_parallel_size_local is None else run.data_parallel_size_local
    if first is None or num < 1 or first + num > size:
        raise ConfigError(
            f"headless: this host would have engines from {first} on, {num} of them, and there are {size} "
            f"(data_parallel_size), 0 ... {size - 1}; give data_parallel_size as at the server, and "
            "data_parallel_start_rank and data_parallel_size_local so that they are among these",
            field="data_parallel_start_rank",
        )
    secret = secret_of(run.ranks_secret_file, run.data_parallel_address, ENGINES)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    with loading("downloading") as progress:
        path = local_path(config.model.model, config.model.revision, progress)
    settings = {**config.as_kwargs(), "model": str(path), "data_parallel_size_local": num}
    alike = alike_engines(str(path))
    where = run.data_parallel_address, run.data_parallel_rpc_port
    seats = [EngineSeat(where, secret, alike, number, settings) for number in range(first, first + num)]
    log.info("engines %d ... %d of %d may run here", first, first + num - 1, size)
    try:
        for seat in seats:
            seat.start()
        while any(seat.is_alive() for seat in seats):
            time.sleep(PULSE_S)
    except KeyboardInterrupt:
        return 0
    raise EngineError(next(seat.problem for seat in seats if seat.problem))


class HostedEngine:
    """An engine process of this host. It dies with the thread that made it."""

    def __init__(self, group: str, hang_s: float, sock: socket.socket, command: Sequence[str]) -> None:
        self.group, self._hang_s = group, hang_s
        self._killed_for = ""
        self.process: subprocess.Popen[bytes]
        self._box: BlackBox
        self.process, self._box = spawn_on(sock, command)
        self._pulse = Pulse(self._box, self.process.pid, PULSE_S)
        self.pidfd = os.pidfd_open(self.process.pid)

    def look(self) -> float:
        """Seconds since it moved. One that has not for too long is killed."""
        if self._pulse.look() > self._hang_s:
            self.kill(f"the engine process was killed because it did not move for {self._hang_s:g} s")
        return self._pulse.age_s()

    def kill(self, why: str = "") -> None:
        """`why`: it is its own fault."""
        if self.process.poll() is None:
            self._killed_for = self._killed_for or why
            self.process.kill()

    def bury(self) -> EngineEnded:
        """Returns when it is gone: what is known of its end."""
        self.kill()
        status = self.process.wait()
        found = EngineEnded(self.group, status, list(self._box.suspects()), self._killed_for)
        self._box.close()
        os.close(self.pidfd)
        return found


class EngineSeat(threading.Thread):
    """Has engine `number` of whatever server there is. `settings`: this host's, whose model is a folder or file here.

    `problem`: why the server will never have it; then the thread has ended.
    """

    def __init__(
        self, where: tuple[str, int], secret: bytes, alike: Alike, number: int, settings: Mapping[str, Any],
        command: Sequence[str] = COMMAND,
    ) -> None:  # fmt: skip
        super().__init__(name=f"penstock-engine-{number}", daemon=True)
        self._where, self._secret, self._alike, self._number = where, secret, alike, number
        self._size = settings["data_parallel_size"]
        self._own = {name: settings[name] for name in OWN_SETTINGS}
        self._given = {
            name: value for name, value in settings.items()
            if name not in OWN_SETTINGS and name not in MEETING_SETTINGS and value != SETTINGS[name].default
        }  # fmt: skip
        self._command = command
        self.problem = ""

    def run(self) -> None:
        try:
            self._come_again_and_again()
        except Exception as error:
            self.problem = str(error)
            log.error("engine %d: %s", self._number, error, exc_info=not isinstance(error, EngineError))

    def _come_again_and_again(self) -> None:
        """Raises EngineError if the server will never take it."""
        refusals, told = 0, ""
        while True:
            try:
                control = self._join("host")
            except PeerError as error:
                refusals = refusals + 1 if error.reason in ("secret", "version") else 0
                if refusals >= _REFUSALS:
                    raise EngineError(f"the server at {self._server} does not take this host: {error}") from error
                why = str(error) if error.reason == "busy" else "it is not there"
                if why != told:
                    told = why
                    log.info("engine %d: waiting for the server at %s: %s", self._number, self._server, why)
                time.sleep(_AGAIN_S)
                continue
            refusals, told = 0, ""
            log.info("engine %d: the server at %s has taken this host", self._number, self._server)
            with closing(control.sock):
                try:
                    self._serve(control)
                except (PeerError, OSError) as error:
                    log.warning("engine %d: the server is gone: %s", self._number, error)

    @property
    def _server(self) -> str:
        return "{}:{}".format(*self._where)

    def _join(self, what: str, group: str = "") -> Channel:
        joins = EngineJoins(
            "host" if what == "host" else "engine", self._number, self._size, group, socket.gethostname(), self._own,
            self._given,
        )  # fmt: skip
        return join(*self._where, self._secret, self._alike, joins, ENGINES)

    def _serve(self, control: Channel) -> None:
        """Orders of one server, one after the other, until it is gone. Raises PeerError then, EngineError if it wants
        no engine of this host any more."""
        engine: HostedEngine | None = None
        poll = select.poll()
        poll.register(control.sock, select.POLLIN)
        said_s = 0.0
        try:
            while True:
                ready = {fd for fd, _ in poll.poll(1000 * PULSE_S)}
                if engine is not None and (engine.pidfd in ready or engine.process.poll() is not None):
                    poll.unregister(engine.pidfd)
                    buried, engine = engine, None
                    self._tell_end(control, buried.bury())
                if control.sock.fileno() in ready:
                    order = hear(control, ToEngineHost)
                    if isinstance(order, Dismissed):
                        raise EngineError(order.problem)
                    if isinstance(order, EndEngine) and engine is not None and engine.group == order.group:
                        engine.kill()
                    elif isinstance(order, BeginEngine) and engine is None:
                        engine = self._begin(order)
                        poll.register(engine.pidfd, select.POLLIN)
                if time.monotonic() - said_s >= PULSE_S / 2:
                    said_s = time.monotonic()
                    say(control, HostPulse(0.0 if engine is None else engine.look()))
        finally:
            if engine is not None:
                engine.bury()

    def _begin(self, order: BeginEngine) -> HostedEngine:
        with closing(self._join("engine", order.group).sock) as sock:
            sock.settimeout(None)
            engine = HostedEngine(order.group, order.hang_s, sock, self._command)
        log.info("engine %d begins: process %d", self._number, engine.process.pid)
        return engine

    def _tell_end(self, control: Channel, ended: EngineEnded) -> None:
        how = ended.killed_for or (
            f"exit code {ended.status}" if ended.status >= 0 else f"signal {-ended.status}"
        )  # fmt: skip
        log.info("engine %d ended: %s", self._number, how)
        with contextlib.suppress(PeerError):
            say(control, ended)
