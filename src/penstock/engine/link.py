"""How a front end reaches an engine: one asyncio interface for a thread of this process and for a child process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.core.messages import EngineInfo, Outputs
from penstock.core.request import Intake
from penstock.engine.blackbox import BlackBox
from penstock.engine.loop import EngineLoop

if TYPE_CHECKING:
    from penstock.engine.core import EngineCore

log = logging.getLogger("penstock.engine")


@dataclass(frozen=True)
class Down:
    """The engine is gone. `suspects`: the requests that it was working on (`blackbox.handle_of`); empty if unknown.

    `fatal`: it will not come back (`reason` says why, in one sentence). `from_outside`: somebody else may have killed
    it.
    """

    reason: str
    suspects: tuple[int, ...] = ()
    fatal: bool = False
    from_outside: bool = False


class Listener(Protocol):
    """What a link tells its owner, in the event loop's thread."""

    def on_up(self, info: EngineInfo, epoch: int) -> None:
        """An engine is ready. What the last one was given is unknown to this one."""
        ...

    def on_outputs(self, message: Outputs) -> None: ...

    def on_down(self, down: Down) -> Collection[int]:
        """Nothing sent from now on arrives, until `on_up`.

        Returns the engines, by number, whose deaths are the work of a request that has been found guilty now: they say
        nothing against the engine. A link that gives the engine up says so with a second call (`fatal`).
        """
        ...

    def on_loading(self, done: int, total: int) -> None: ...


class Link(Protocol):
    """One engine. `send` never blocks; it may be called only between `on_up` and `on_down`."""

    async def start(self, listener: Listener) -> None:
        """Returns when the engine is ready. Raises what keeps it from starting, with its own class and sentence."""
        ...

    def send(self, items: Sequence[Intake]) -> None: ...

    def progress_age_s(self) -> float:
        """Seconds since the engine last showed that its loop moves; small while it is idle and alive."""
        ...

    async def close(self) -> None:
        """End the engine at once and free everything. May be called twice."""
        ...


class ThreadLink:
    """The engine's loop in a thread of this process: for tests and for `--engine-in-process`.

    It cannot be killed or restarted on its own: a step that raises is fatal.
    """

    def __init__(self, make: Callable[[], tuple[EngineCore, EngineInfo]]) -> None:
        self._make = make
        self._box = BlackBox()
        self._loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None

    async def start(self, listener: Listener) -> None:
        events = asyncio.get_running_loop()
        core, info = await asyncio.to_thread(self._make)

        def tell(f: Callable[..., object], *args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                events.call_soon_threadsafe(f, *args)

        def run(loop: EngineLoop) -> None:
            try:
                loop.run()
            except Exception as error:
                log.exception("the engine's loop failed")
                tell(listener.on_down, Down(f"{type(error).__name__}: {error}", self._box.suspects(), fatal=True))

        self._loop = EngineLoop(core, lambda message: tell(listener.on_outputs, message), self._box)
        self._thread = threading.Thread(target=run, args=(self._loop,), name="penstock-engine", daemon=True)
        self._box.beat(False)
        listener.on_up(info, 0)
        self._thread.start()

    def send(self, items: Sequence[Intake]) -> None:
        assert self._loop is not None
        self._loop.send(items)

    def progress_age_s(self) -> float:
        return self._box.age_s()

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        if self._loop is not None:
            self._loop.core.executor.close()
