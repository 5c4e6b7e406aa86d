"""How a front end reaches an engine: one asyncio interface for a thread of this process and for a child process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.core.messages import EngineInfo, EngineSnapshot, Outputs
from penstock.core.request import Intake

if TYPE_CHECKING:
    from penstock.engine.core import EngineCore


@dataclass(frozen=True)
class Down:
    """The engine is gone. `suspects`: ids of the requests in the step that it did not finish; empty if unknown.

    `fatal`: it will not come back (`reason` says why, in one sentence).
    """

    reason: str
    suspects: tuple[str, ...] = ()
    fatal: bool = False


class Listener(Protocol):
    """What a link tells its owner, in the event loop's thread."""

    def on_up(self, info: EngineInfo, epoch: int) -> None:
        """An engine is ready. What the last one was given is unknown to this one."""
        ...

    def on_outputs(self, message: Outputs) -> None: ...

    def on_down(self, down: Down) -> None:
        """Nothing sent from now on arrives, until `on_up`."""
        ...

    def on_loading(self, done: int, total: int) -> None: ...


class Link(Protocol):
    """One engine. `send` never blocks; it may be called only between `on_up` and `on_down`."""

    async def start(self, listener: Listener) -> None:
        """Returns when the engine is ready. Raises what keeps it from starting, with its own class and sentence."""
        ...

    def send(self, items: Sequence[Intake]) -> None: ...

    def progress_age_s(self) -> float:
        """Seconds since the engine last showed that its loop moves; 0 while it has nothing to do and says so."""
        ...

    async def close(self) -> None:
        """End the engine at once and free everything. May be called twice."""
        ...


def snapshot_of(core: EngineCore, step_s: float = 0.0, memory_bytes: dict[str, int] | None = None) -> EngineSnapshot:
    """How a core is doing now. Cheap enough for ten times a second."""
    stats = core.kv.stats()
    scheduler = core.scheduler
    return EngineSnapshot(
        time_s=core.clock.now(),
        step=core.stats.num_steps,
        step_s=step_s,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        kv_total=sum(g.total for g in stats.groups),
        kv_used=sum(g.used for g in stats.groups),
        kv_evictable=sum(g.evictable for g in stats.groups),
        counters={k: float(v) for k, v in vars(core.stats).items()}
        | {"num_evicted_blocks": float(stats.num_evicted_blocks)},
        memory_bytes=memory_bytes or {},
    )


class ThreadLink:
    """The engine's loop in a thread of this process: for tests and for `--engine-in-process`.

    It cannot be killed or restarted on its own: a step that raises is fatal.
    """

    def __init__(self, make: Callable[[], tuple[EngineCore, EngineInfo]]) -> None:
        self._make = make
        self._wake = threading.Condition()
        self._intake: deque[Intake] = deque()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._last_progress = 0.0
        self._busy = False
        self._core: EngineCore | None = None

    async def start(self, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        self._core, info = await asyncio.to_thread(self._make)
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(self._core, loop, listener), name="penstock-engine")
        self._thread.daemon = True
        listener.on_up(info, 0)
        self._thread.start()

    def send(self, items: Sequence[Intake]) -> None:
        with self._wake:
            self._intake.extend(items)
            self._wake.notify()

    def progress_age_s(self) -> float:
        return time.monotonic() - self._last_progress if self._busy else 0.0

    async def close(self) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _run(self, core: EngineCore, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        def tell(f: Callable[..., None], *args: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(f, *args)

        sent_s = 0.0
        try:
            while True:
                with self._wake:
                    while not (self._stop or self._intake or core.has_work):
                        self._wake.wait()
                    if self._stop:
                        return
                    items, self._intake = self._intake, deque()
                for item in items:
                    core.add(item)
                self._busy, began = True, core.clock.now()
                outputs = core.step()
                now, self._last_progress, self._busy = core.clock.now(), time.monotonic(), core.has_work
                if core.scheduler.wake_s is not None and not self._intake:
                    core.clock.wait_until(core.scheduler.wake_s)
                fresh = None
                if now - sent_s >= 0.1 or not core.has_work:
                    fresh, sent_s = snapshot_of(core, now - began), now
                if outputs or fresh is not None:
                    tell(listener.on_outputs, Outputs(0, outputs, fresh))
        except Exception as error:
            tell(listener.on_down, Down(f"{type(error).__name__}: {error}", fatal=True))
