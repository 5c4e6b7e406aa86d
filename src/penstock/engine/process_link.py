"""ProcessLink: the engine in a child process that is watched, buried and started again.

Messages are frames over an inherited socket pair; what has to be known of an engine that cannot speak any more is in an
inherited page of memory (`engine.blackbox`). End of file is the death notice, in both directions: no names, no folders,
nothing is left behind.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import EngineError, PenstockError
from penstock.core.messages import EngineInfo, Hello, Send
from penstock.core.request import Intake
from penstock.core.weight_swap import WeightsOrder
from penstock.engine import wire
from penstock.engine.blackbox import BlackBox
from penstock.engine.child import EXIT_BROKEN
from penstock.engine.connection import EngineConnection
from penstock.engine.crashes import Crashes
from penstock.engine.link import Down, Listener
from penstock.engine.pulse import Pulse
from penstock.engine.spawn import COMMAND, Spawned, spawn

log = logging.getLogger("penstock.engine")


class ProcessLink:
    """One supervised engine process at a time. All methods belong to the event loop's thread, which spawns the child:
    the child dies with that thread.

    Args:
        config: `EngineConfig.as_kwargs()`.
        max_restarts_per_minute: one crash more within a minute, and the engine is given up. Those that a guilty
            request explains do not count.
        stall_s: silence after which the child writes its stacks to its log.
        hang_s: silence, of the time in which it could have run, after which a child is killed and replaced.
        command: starts the engine process; the two descriptors are appended.
        spare: a child that was spawned already, to be the first engine.
        block_secret: the engine tells which blocks it holds, named with this.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        max_restarts_per_minute: int = 3,
        faults: Sequence[str] = (),
        stall_s: float = 4.0,
        hang_s: float = 60.0,
        command: Sequence[str] = COMMAND,
        spare: Spawned | None = None,
        block_secret: bytes = b"",
    ) -> None:
        self._config = dict(config)
        self._log_file = self._config.get("log_file")
        self._faults = list(faults)
        self._stall_s = stall_s
        self._hang_s = hang_s
        self._command = list(command)
        self._spare = spare
        self._block_secret = block_secret
        self.weights: WeightsOrder | None = None
        self._epoch = 0
        self._crashes = Crashes(max_restarts_per_minute)
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self.restart_s: list[float] = []
        """How long each restart took, from the death of one engine until the next was ready."""

    @property
    def pid(self) -> int | None:
        """Of the engine process; None while there is none."""
        return self._child.pid if self._child is not None else None

    async def start(self, listener: Listener) -> None:
        info = await self._launch(listener)
        listener.on_up(info, self._epoch)
        self._task = asyncio.create_task(self._supervise(listener))

    def send(self, items: Sequence[Intake]) -> None:
        if self._child is not None:  # none: it died a moment ago, and all that lives is sent to the next
            self._child.write(Send(list(items)))

    def progress_age_s(self) -> float:
        return self._child.pulse.age_s() if self._child is not None else 0.0

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._spare is not None:
            self._spare.drop()
            self._spare = None
        await self._bury()
        self._epoch += 1  # it may be started again, and that is another engine

    # -- one child -----------------------------------------------------------------------------------------------

    async def _launch(self, listener: Listener) -> EngineInfo:
        """Start a child and wait until it is ready. Raises what keeps it from that, with its own class."""
        spare, self._spare = self._spare, None
        child = self._child = Child(*(spare or spawn(self._command)), listener, self._look_s)
        try:
            await child.connect()
            hello = Hello(
                wire.schema(), self._epoch, self._config, self._faults, self._stall_s, self.weights, self._block_secret
            )
            child.write(hello)
            if self._epoch:  # the first may take its time: it may have a model to fetch
                await self._until_silent(child, child.ready)
                if not child.ready.done():
                    raise EngineError(f"the engine process did not move for {self._hang_s:g} s while it was starting")
            return await child.ready
        except BaseException:
            await self._bury()
            raise

    async def _bury(self) -> Down:
        """Make sure that the child is dead, reap it and free what it had. Returns what is known of its death."""
        child, self._child = self._child, None
        return await child.bury() if child is not None else Down("the engine process is gone")

    # -- supervision ---------------------------------------------------------------------------------------------

    async def _supervise(self, listener: Listener) -> None:
        while True:
            await self._until_dead()
            died_s = time.monotonic()
            down = await self._bury()
            while self._may_restart(down, listener):
                await asyncio.sleep(self._crashes.pause_s)
                self._epoch += 1
                try:
                    info = await self._launch(listener)
                    break
                except (PenstockError, OSError) as error:
                    log.error("the engine could not be started again: %s", error)
                    down = Down(f"the engine could not be started again: {error}")
            else:
                return
            self.restart_s.append(time.monotonic() - died_s)
            log.warning("the engine is back after %.0f ms", self.restart_s[-1] * 1000)
            listener.on_up(info, self._epoch)

    def _may_restart(self, down: Down, listener: Listener) -> bool:
        self._crashes.add(self._epoch, listener.on_down(down))
        fatal = self._crashes.too_many
        # Where the log is stays here: reasons are told to clients.
        where = "" if self._log_file is None or down.from_outside else f" (stacks: {self._log_file})"
        log.error("%s%s; %s", down.reason, where, "it is given up" if fatal else "it is started again")
        if fatal:
            listener.on_down(Down(down.reason, fatal=True))
        return not fatal

    async def _until_dead(self) -> None:
        child = self._child
        assert child is not None
        gone = asyncio.ensure_future(child.gone.wait())
        try:
            await self._until_silent(child, gone)
            if not gone.done():
                log.error("the engine process has not moved for %.0f s: it is killed", child.pulse.silent_s)
                child.kill(f"the engine process was killed because it did not move for {self._hang_s:g} s")
                await gone
        finally:
            gone.cancel()

    async def _until_silent(self, child: Child, end: asyncio.Future[Any]) -> None:
        """Returns when `end` is there, or the child has been silent for too long."""
        while not (await asyncio.wait({end}, timeout=self._look_s))[0]:
            if child.pulse.look() > self._hang_s:
                return

    @property
    def _look_s(self) -> float:
        return min(1.0, self._hang_s / 4)


class Child(EngineConnection):
    """An engine process and its two descriptors. `gone` is also set when it said something that makes no sense."""

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, box: BlackBox, listener: Listener, look_s: float
    ) -> None:
        super().__init__(listener)
        self.box = box
        self.pulse = Pulse(box, process.pid, look_s)
        self._process = process
        self._sock: socket.socket | None = sock
        self._connecting: asyncio.Future[Any] | None = None
        self._killed_for = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None
        sock.setblocking(False)
        connecting = asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)
        self._connecting = asyncio.ensure_future(connecting)
        # Half a connection cannot be closed: whoever gives up waits for the other half, in `bury`.
        await asyncio.shield(self._connecting)

    def kill(self, why: str = "") -> None:
        """`why`: it is its own fault, and this is what the world is told."""
        if self._process.poll() is None:
            self._killed_for = self._killed_for or why
            self._process.kill()

    def broken(self) -> None:
        self.kill("the engine process sent what makes no sense")

    async def bury(self) -> Down:
        self.kill()
        self.ready.cancel()
        if self._connecting is not None:
            await asyncio.wait({self._connecting})
        await self.hang_up()
        if self._sock is not None:
            self._sock.close()
        pause_s = 0.001
        while (status := self._process.poll()) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(0.05, 2 * pause_s)
        suspects = self.box.suspects()
        self.box.close()
        return ended(status, suspects, self._killed_for)


def ended(status: int, suspects: Sequence[int], killed_for: str) -> Down:
    """What is known of a process that ended with `status`. All signals but SIGKILL it brings on itself."""
    killed = status == -signal.SIGKILL
    return Down(killed_for or obituary(status), tuple(suspects), from_outside=killed and not killed_for)


def obituary(status: int) -> str:
    if status == EXIT_BROKEN:
        return "a step of the engine failed (its traceback is in the log)"
    if status >= 0:
        return f"the engine process ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"the engine process was ended by {name}"
