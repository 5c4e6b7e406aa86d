"""RemoteLink: an engine in a process of another host, which comes, is lost, and comes again.

What the engine says comes as from a child (`engine.process_link`), by TCP. That host has the process, its black box and
its last words, and tells of them on a connection beside (`core.engine_host`). Whoever lets hosts in
(`launch.engine_hosts`) calls `host_came`, `connected`, `heard` and `host_left`; all of it belongs to the event loop's
thread. A host that cannot be reached is an engine that was killed: others go on with what it had.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from penstock.base.errors import EngineError, PenstockError
from penstock.core.engine_host import (
    BeginEngine,
    Dismissed,
    EndEngine,
    EngineEnded,
    FromEngineHost,
    HostPulse,
    ToEngineHost,
    settings_there,
)
from penstock.core.messages import EngineInfo, Hello, Send
from penstock.core.request import Intake
from penstock.core.weight_swap import WeightsOrder
from penstock.engine import wire
from penstock.engine.connection import EngineConnection
from penstock.engine.crashes import Crashes
from penstock.engine.link import Down, HostAwayError, Listener
from penstock.engine.process_link import ended

log = logging.getLogger("penstock.engine")
AWAY_S = 120.0
"""What waits for an engine whose host is out of reach does so for so long, if no other engine can go on with it."""
CONNECTS_S = 60.0
"""A host's new engine process has to connect within so many seconds."""
_LAST_WORDS_S = 2.0
"""After an engine's connection has ended, its host says how it did."""
_BURIED_S = 10.0
NOT_COME = "its host has not come yet"


class EngineHost(Protocol):
    """A host that has come for one engine. `name`: of the machine; `own`: see `core.engine_host.OWN_SETTINGS`."""

    name: str
    own: Mapping[str, Any]

    def tell(self, order: ToEngineHost) -> None:
        """Does not wait. A host that is gone is not told."""
        ...

    def leave(self) -> None:
        """Close the connection; `host_left` follows."""
        ...


class RemoteEngine(EngineConnection):
    """One engine of a host, from the order to begin it."""

    def __init__(self, listener: Listener, number: int) -> None:
        super().__init__(listener)
        self.group = secrets.token_hex(8)
        self.number = number
        self.sock: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[EngineEnded | str] = asyncio.get_running_loop().create_future()
        """How it ended; a text: its host is out of reach, and why."""
        self._connecting: asyncio.Future[Any] | None = None
        self.nonsense = False
        self.ready.add_done_callback(lambda found: found.cancelled() or found.exception())  # its end may count first

    async def connect(self) -> None:
        """Raises EngineError if it does not come, or ends, within CONNECTS_S."""
        await self.until(self.sock, CONNECTS_S)
        connecting = asyncio.get_running_loop().create_connection(lambda: self, sock=self.sock.result())
        self._connecting = asyncio.ensure_future(connecting)
        await asyncio.shield(self._connecting)  # see `process_link.Child.connect`

    async def until(self, wanted: asyncio.Future[Any], within_s: float | None = None) -> None:
        """Raises EngineError where its end, or nothing, comes first."""
        either: set[asyncio.Future[Any]] = {wanted, self.end}
        await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            return
        if not self.end.done():
            raise EngineError(f"its process did not connect within {within_s:g} s")
        how = self.end.result()
        raise EngineError(how if isinstance(how, str) else f"{ended(how.status, (), how.killed_for).reason} at once")

    async def over(self) -> None:
        """Returns when its connection has ended, or its host has told of its end."""
        gone = asyncio.ensure_future(self.gone.wait())
        either: set[asyncio.Future[Any]] = {gone, self.end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()

    def finish(self, how: EngineEnded | str) -> None:
        if not self.end.done():
            self.end.set_result(how)

    def broken(self) -> None:
        self.nonsense = True
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Nothing of it is left on this side; its process ends when it notices."""
        if self._connecting is not None:
            await asyncio.wait({self._connecting})
        elif self.sock.done() and not self.sock.cancelled():
            self.sock.result().close()
        self.sock.cancel()
        await self.hang_up()


class RemoteLink:
    """Engine `number` of a server, on whatever host comes for it. A `link.LateLink`.

    Args:
        config: the server's `EngineConfig.as_kwargs()`.
        max_restarts_per_minute, faults, stall_s, hang_s, block_secret: see `process_link.ProcessLink`.
        away_s: see AWAY_S.
    """

    def __init__(
        self,
        number: int,
        config: Mapping[str, Any],
        *,
        max_restarts_per_minute: int = 3,
        faults: Sequence[str] = (),
        stall_s: float = 4.0,
        hang_s: float = 60.0,
        block_secret: bytes = b"",
        away_s: float = AWAY_S,
    ) -> None:
        self.number = number
        self.weights: WeightsOrder | None = None
        self.dismissed = ""
        """Why no host may come any more."""
        self._config = dict(config)
        self._crashes = Crashes(max_restarts_per_minute)
        self._faults, self._stall_s, self._hang_s, self._away_s = list(faults), stall_s, hang_s, away_s
        self._block_secret = block_secret
        self._epoch = 0
        self._host: EngineHost | None = None
        self._came = asyncio.Event()
        self._engine: RemoteEngine | None = None
        self._task: asyncio.Task[None] | None = None
        self._pulse = 0.0, 0.0
        """(what the host said of its engine's last move, when): seconds."""
        self._out_of_reach = NOT_COME

    # -- what hosts do -------------------------------------------------------------------------------------------

    @property
    def host(self) -> EngineHost | None:
        """The one that has come for it; None: a host may come."""
        return self._host

    def host_came(self, host: EngineHost) -> None:
        self._host = host
        self._came.set()

    def host_left(self, host: EngineHost, why: str) -> None:
        """Whatever the reason, the engine there is nobody's any more."""
        if host is not self._host:
            return
        self._host = None
        self._came.clear()
        level = logging.INFO if self._task is None else logging.WARNING  # nobody misses it who has closed it
        log.log(level, "engine %d: %s is out of reach: %s", self.number, host.name, why)
        self._out_of_reach = f"its host is out of reach: {why}"  # who it is stays here: reasons are told to clients
        if self._engine is not None:
            self._engine.finish(self._out_of_reach)

    def heard(self, host: EngineHost, news: FromEngineHost) -> None:
        if host is not self._host:
            return
        if isinstance(news, HostPulse):
            self._pulse = news.age_s, time.monotonic()
        elif self._engine is not None and news.group == self._engine.group:
            self._engine.finish(news)

    def connected(self, group: str, sock: socket.socket) -> bool:
        """The engine that was begun as `group` has connected; False: nobody waits for it, and `sock` is not taken."""
        engine = self._engine
        if engine is None or engine.group != group or engine.sock.done():
            return False
        sock.setblocking(False)
        engine.sock.set_result(sock)
        return True

    # -- the link ------------------------------------------------------------------------------------------------

    def begin(self, listener: Listener) -> None:
        self._task = asyncio.create_task(self._supervise(listener))

    async def start(self, listener: Listener) -> None:
        if self._host is None:
            raise HostAwayError(self._out_of_reach)
        try:
            info = await self._launch(self._host, listener)
        except BaseException:
            await self._bury()
            raise
        listener.on_up(info, self._epoch)
        self._task = asyncio.create_task(self._supervise(listener, is_up=True))

    def send(self, items: Sequence[Intake]) -> None:
        if self._engine is not None:
            self._engine.write(Send(list(items)))

    def progress_age_s(self) -> float:
        if self._engine is None:
            return 0.0
        age_s, said_s = self._pulse
        return age_s + time.monotonic() - said_s

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._bury()
        self._epoch += 1

    def dismiss(self, problem: str) -> None:
        self.dismissed = problem
        self._send_away(problem)

    def _send_away(self, problem: str) -> None:
        if self._host is not None:
            host = self._host
            host.tell(Dismissed(problem))
            host.leave()
            self.host_left(host, problem)

    # -- one engine ----------------------------------------------------------------------------------------------

    async def _launch(self, host: EngineHost, listener: Listener) -> EngineInfo:
        """Have the host start an engine, and wait until it is ready. Raises what keeps it from that."""
        engine = self._engine = RemoteEngine(listener, self._epoch)
        self._pulse = 0.0, time.monotonic()
        host.tell(BeginEngine(engine.group, self._hang_s))
        await engine.connect()
        there = settings_there(self._config, dict(host.own))
        epoch, secret = self._epoch, self._block_secret
        engine.write(Hello(wire.schema(), epoch, there, self._faults, self._stall_s, self.weights, secret))
        await engine.until(engine.ready)
        info = msgspec.structs.replace(await engine.ready, host=host.name)
        if problem := listener.refuses(info):
            self._send_away(problem)
            raise EngineError(problem)
        return info

    async def _bury(self) -> Down:
        """Make sure that its process is dead, as far as its host can be reached. Returns what is known of its end."""
        engine = self._engine
        if engine is None:
            return Down("the engine is gone")
        await engine.close()
        for within_s in (_LAST_WORDS_S, _BURIED_S):
            if self._task is None:  # nobody asks how it ended by itself
                self._order_end(engine)
            await asyncio.wait({engine.end}, timeout=within_s)
            if engine.end.done():
                break
            self._order_end(engine)
        else:
            if self._host is not None:
                self._host.leave()
                self.host_left(self._host, f"it does not end its engine within {_BURIED_S:g} s")
            engine.finish(self._out_of_reach)
        self._engine = None
        how = engine.end.result()
        if isinstance(how, str):
            return Down(how, from_outside=True, away=True)
        why = "the engine process sent what makes no sense" if engine.nonsense else how.killed_for
        if not how.status and not why:  # it heard no more of us
            return Down("its connection was lost", tuple(how.suspects), from_outside=True)
        return ended(how.status, how.suspects, why)

    def _order_end(self, engine: RemoteEngine) -> None:
        if self._host is not None:
            self._host.tell(EndEngine(engine.group))

    # -- supervision ---------------------------------------------------------------------------------------------

    async def _supervise(self, listener: Listener, *, is_up: bool = False) -> None:
        while True:
            if not is_up and not await self._try_out(listener):
                continue
            is_up = False
            engine = self._engine
            assert engine is not None
            await engine.over()
            self._down(await self._bury(), listener)
            await asyncio.sleep(self._crashes.pause_s)

    async def _try_out(self, listener: Listener) -> bool:
        """One engine on the host that there is, or comes. Whether it is up."""
        host = await self._next_host(listener)
        began_s = time.monotonic()
        try:
            info = await self._launch(host, listener)
        except (PenstockError, OSError) as error:
            log.error("engine %d could not be started on %s: %s", self.number, host.name, error)
            down = await self._bury()
            self._down(Down(f"it could not be started: {error}", away=down.away or self._host is None), listener)
            await asyncio.sleep(max(0.1, self._crashes.pause_s))
            return False
        log.info("engine %d serves on %s after %.1f s", self.number, host.name, time.monotonic() - began_s)
        listener.on_up(info, self._epoch)
        return True

    def _down(self, down: Down, listener: Listener) -> None:
        """The next one is another. Who dies too often is left alone until its host comes again."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        explained = listener.on_down(down)
        log.error("engine %d: %s", self.number, down.reason)
        if down.away:
            return
        self._crashes.add(epoch, explained)
        if self._crashes.too_many:
            self._send_away(f"engine {self.number} failed again and again ({down.reason}) and is given up")
            self._out_of_reach = f"it failed again and again and was given up: {down.reason}"
            listener.on_down(Down(self._out_of_reach, fatal=True, away=True))

    async def _next_host(self, listener: Listener) -> EngineHost:
        """Who waits for it is told when that has taken too long, and it still may come."""
        limit_s: float | None = self._away_s
        while self._host is None:
            try:
                await asyncio.wait_for(self._came.wait(), limit_s)
            except TimeoutError:
                limit_s = None
                listener.on_down(Down(self._out_of_reach, fatal=True, away=True))
        return self._host
