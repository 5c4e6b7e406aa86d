"""Which of several models are in memory: they start when a request names them, and leave when nobody does.

All of it belongs to the event loop's thread, so what is looked at and changed without an await between is one step. A
model leaves only while nothing of it lives; a request that comes just then waits and starts it again. Whoever starts
takes its bytes first and gives them back if it fails, so the sum of what is held never exceeds the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.base.errors import PenstockError, RefusedError
from penstock.server.several.memory import Holder, leavers
from penstock.server.several.served import AWAKE, DOZING, GONE, ServedModel

if TYPE_CHECKING:
    from penstock.base.clock import Clock

log = logging.getLogger("penstock.server")
TICK_S = 0.5
PATIENCE_S = 10.0
"""Who waits for memory for so long makes one that is in use take nothing new until it has left."""
RETRY_S = 10.0
"""After a start that failed, the next is not tried for so long."""
GIVEN_UP_S = 60.0
"""An engine that was given up may be started anew by a request after so long."""


class Models:
    """`limits`: bytes that models may take together, by place; none: no limit."""

    def __init__(self, clock: Clock, limits: Mapping[str, int], *, patience_s: float = PATIENCE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self.limits = dict(limits)
        self.served: dict[str, ServedModel] = {}
        self._line: list[ServedModel] = []
        self._asked: set[ServedModel] = set()
        """An operator wants them to sleep: what comes for them waits until they do."""
        self._victims: dict[ServedModel, set[ServedModel]] = {}
        """By who has waited too long for memory: those in use that have to leave for it."""
        self._news = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    def add(self, model: ServedModel) -> None:
        """The first one is that of requests that name none."""
        model.used_s = self._clock.now()
        self.served[model.name] = model
        model.client.on_finish.append(lambda stream, output: self._ended(model))
        model.client.on_wanted = lambda: self._wanted(model)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self.served.values())

    def find(self, name: str | None) -> ServedModel | None:
        """By any of its names; the first one if there is none. `:latest` is what Ollama's clients add to names."""
        if not name:
            return next(iter(self))
        for wanted in (name, name.removesuffix(":latest")):
            for model in self:
                if wanted == model.name or wanted in model.names():
                    return model
        return None

    def held_bytes(self, place: str) -> int:
        return sum(model.held_bytes for model in self if model.place == place)

    def stay(self, name: str | None, seconds: float) -> None:
        """How long a model stays after its last request, until it has left."""
        model = self.find(name)
        assert model is not None
        model.keep_alive_s = seconds
        self._tell()

    # -- starting ------------------------------------------------------------------------------------------------

    async def awake(self, model: ServedModel) -> None:
        """Returns when it has an engine; it is started once, however many wait.

        Raises RefusedError (503; 429 if too many wait): there is no memory for it, or it cannot be started.
        """
        model.used_s = now = self._clock.now()
        if model.is_up and not self._gives_way(model):
            return
        if model.refused_until_s > now:
            raise model.refusal("could not be started; whoever runs this server finds the reason in its log",
                                model.refused_until_s - now, "model_failed")  # fmt: skip
        if model.max_waiting and model.num_waiting >= model.max_waiting:
            raise RefusedError(
                f"{model.num_waiting} requests wait for the model {model.name} already; try again later",
                status=429, code="queue_full", retry_after_s=5.0,
            )  # fmt: skip
        coming = self._begin(model)
        model.num_waiting += 1
        try:
            await asyncio.wait({coming}, timeout=model.max_wait_s or None)
            if not coming.done() and model.in_line:
                raise model.refusal("waits for memory that others use; try again later", 10.0, "model_memory")
            await asyncio.shield(coming)
        finally:
            model.num_waiting -= 1
            if not (model.num_waiting or model.client.num_live) and model.in_line:
                self._out_of_line(model)  # nobody wants it any more
                model.coming = None
                coming.cancel()

    def _gives_way(self, model: ServedModel) -> bool:
        """What comes for it waits, because it has to leave first."""
        if model in self._asked:
            return True
        return model.level != GONE and any(model in victims for victims in self._victims.values())

    def _out_of_line(self, model: ServedModel) -> None:
        self._line.remove(model)
        self._victims.pop(model, None)
        model.in_line = False
        self._tell()

    def _begin(self, model: ServedModel) -> asyncio.Task[None]:
        if model.coming is None:
            model.in_line = True
            self._line.append(model)
            model.coming = asyncio.get_running_loop().create_task(self._bring(model))
            model.coming.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has asked
        return model.coming

    def _wanted(self, model: ServedModel) -> None:
        """A request has come between the look at its model and its own turn, or needs no look: it is not lost."""
        self._begin(model)

    async def _bring(self, model: ServedModel) -> None:
        await self._room(model)
        level, model.level = model.level, AWAKE  # its bytes are taken from here on
        self._out_of_line(model)
        if level == GONE:
            await self._start(model)
        elif level == DOZING:
            model.client.resume()
        model.coming = None
        model.used_s = self._clock.now()
        self._tell()

    async def _start(self, model: ServedModel) -> None:
        began_s = self._clock.now()
        try:
            await model.client.wake()
        except BaseException as error:
            model.level, model.coming = GONE, None
            model.client.give_up(f"the model {model.name} could not be started")
            if isinstance(error, PenstockError | OSError):
                log.error("the model %s could not be started: %s", model.name, error)
                model.refused_until_s = self._clock.now() + RETRY_S
                why = "could not be started; whoever runs this server finds the reason in its log"
                error = model.refusal(why, RETRY_S, "model_failed")
            self._tell()
            raise error from None
        model.num_starts += 1
        model.start_s.observe(self._clock.now() - began_s)
        log.info("the model %s has started in %.2f s", model.name, self._clock.now() - began_s)

    async def _room(self, model: ServedModel) -> None:
        """Returns when its bytes fit: those that can leave have left. First come, first served."""
        since_s = self._clock.now()
        while True:
            if model.leaving is not None:
                await asyncio.wait({model.leaving})
                continue
            line = [other for other in self._line if other.place == model.place]
            if line[0] is model and not self._gives_way(model) and self._make_room(model, since_s):
                return
            await self._change(TICK_S)

    def _make_room(self, model: ServedModel, since_s: float) -> bool:
        """Whether there is room; if not, whoever can leave does."""
        limit = self.limits.get(model.place)
        if limit is None:
            return True
        others = [other for other in self if other is not model and other.place == model.place]
        free, need = limit - self.held_bytes(model.place), model.num_bytes - model.held_bytes
        soon = free + sum(other.held_bytes for other in others if other.leaving is not None)
        holders = [
            Holder(other.name, other.held_bytes, other.used_s, other.is_idle) for other in others if not other.leaving
        ]
        gone = leavers(need, soon, holders)
        if gone is None and self._clock.now() - since_s >= self._patience_s:
            names = leavers(need, soon, holders, idle_only=False) or ()
            self._victims[model] = {self.served[name] for name in names}
        for name in gone or ():
            self._leave(self.served[name], "memory")
        return free >= need

    # -- leaving -------------------------------------------------------------------------------------------------

    def _leave(self, model: ServedModel, why: str) -> asyncio.Task[None]:
        model.leaving = asyncio.get_running_loop().create_task(self._end(model, why))
        return model.leaving

    async def _end(self, model: ServedModel, why: str) -> None:
        try:
            if model.num_at_work and why != "failed":
                return  # one came a moment ago
            await model.client.sleep()
            model.level, model.failed_s = GONE, None
            model.keep_alive_s = model.default_keep_alive_s
            model.stops[why] += 1
            log.info("the model %s has left memory (%s)", model.name, why)
        finally:
            model.leaving = None
            self._tell()

    def _ended(self, model: ServedModel) -> None:
        """A request of it has."""
        model.used_s = self._clock.now()
        if not model.client.num_live:
            self._tell()

    def tick(self) -> None:
        """Whoever has been idle for long enough leaves."""
        now = self._clock.now()
        for model in self:
            if model.client.num_live or model.num_waiting:
                model.used_s = now
            if model.level == GONE or not model.is_idle or model.coming is not None:
                continue
            if model.client.state == "failed":
                model.failed_s = now if model.failed_s is None else model.failed_s
                if now - model.failed_s >= GIVEN_UP_S:
                    self._leave(model, "failed")
            elif now - model.used_s >= model.keep_alive_s:
                self._leave(model, "idle")

    async def sleep(self, model: ServedModel, level: int) -> None:
        """Let what runs end, and give back its KV (1) or all of it (2). What comes meanwhile wakes it again."""
        self._asked.add(model)
        try:
            while self._works(model):
                await self._change(TICK_S)
            if model.client.state == "failed":
                level = GONE  # there is no engine that could stay
            if level == DOZING and model.level == AWAKE:
                model.client.doze()
                model.level = DOZING
            elif level == GONE and model.level != GONE:
                await self._leave(model, "asked")
        finally:
            self._asked.discard(model)
            self._tell()

    @staticmethod
    def _works(model: ServedModel) -> bool:
        """Something of it has to end before it can sleep. What waits for its start waits on."""
        if model.leaving is not None or (model.coming is not None and not model.in_line):
            return True
        return model.level != GONE and (model.num_at_work > 0 or model.client.state in ("starting", "restarting"))

    # -- life ----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on, whoever is idle for long enough leaves."""
        self._ticking = asyncio.get_running_loop().create_task(self._tick_on())

    async def _tick_on(self) -> None:
        while True:
            await self._change(TICK_S)
            self.tick()

    async def close(self) -> None:
        tasks = [task for model in self for task in (model.coming, model.leaving) if task is not None]
        tasks += [] if self._ticking is None else [self._ticking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _change(self, most_s: float) -> None:
        """Returns when something has changed, or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):  # wait_for forgets that it was cancelled if news come with that
                await self._news.wait()
