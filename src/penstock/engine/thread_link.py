"""An engine in a thread of the front end's own process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from penstock.core.messages import EngineInfo
from penstock.core.request import Intake
from penstock.core.spare import SpareWork
from penstock.core.weight_swap import WeightsOrder
from penstock.engine.blackbox import BlackBox
from penstock.engine.core import EngineCore
from penstock.engine.link import Down, Listener
from penstock.engine.loop import EngineLoop

log = logging.getLogger("penstock.engine")


class ThreadLink:
    """The engine's loop in a thread of this process: for tests and for `--engine-in-process`.

    It cannot be killed or restarted on its own: a step that raises is fatal.
    """

    def __init__(
        self, make: Callable[[], tuple[EngineCore, EngineInfo]], spare: Callable[[], SpareWork | None] = lambda: None
    ) -> None:
        """`spare`: makes what is done in the time that steps leave."""
        self._make, self._spare = make, spare
        self.weights: WeightsOrder | None = None
        self._box = BlackBox()
        self._loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None

    async def start(self, listener: Listener) -> None:
        events = asyncio.get_running_loop()
        spare = self._spare()
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
        self._loop.spare = spare
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
            self._loop.spare = None
            self._loop.core.executor.close()
