"""The loop around `EngineCore.step`, the same for a thread and for a process of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.messages import EngineSnapshot, Outputs
from penstock.core.output import EngineOutput
from penstock.core.request import Control, Intake, Request
from penstock.core.sampling import TokenRules
from penstock.core.spare import SpareWork
from penstock.core.weight_swap import SWAPPED
from penstock.engine.blackbox import BlackBox, handle_of
from penstock.engine.faults import Faults
from penstock.engine.prepare import Preparation
from penstock.kv.placed import PlacedManager
from penstock.kv.tier_facts import counters_of, tiers_of
from penstock.sched.offline import online

if TYPE_CHECKING:
    from penstock.engine.block_news import BlockNews
    from penstock.engine.core import EngineCore

IDLE_S = 0.25
"""An idle loop shows a sign of life this often."""
SNAPSHOT_S = 0.1
IDLE_SNAPSHOT_S = 1.0
_SPARE_HANDLES = 64
"""Handles of requests that have ended are forgotten when there are more than so many of them."""
TREE_NODES = 48
"""Nodes of the prefix tree in a snapshot: enough to look at, few enough to walk ten times a second."""


def snapshot_of(core: EngineCore, step_s: float = 0.0, memory_bytes: dict[str, int] | None = None) -> EngineSnapshot:
    """How a core is doing now. Cheap enough for ten times a second."""
    stats = core.kv.stats()
    scheduler = core.scheduler
    waiting, running = scheduler.waiting, scheduler.running
    num_online = online(waiting)
    return EngineSnapshot(
        time_s=core.clock.now(),
        step=core.stats.num_steps,
        step_s=step_s,
        num_running=len(running),
        num_waiting=num_online + core.swapping.num_aside,
        waiting_tokens=sum(seq.num_known for seq in waiting[:num_online]),
        num_offline_running=len(running) - online(running),
        num_offline_waiting=len(waiting) - num_online,
        kv_total=sum(g.total for g in stats.groups),
        kv_used=sum(g.used for g in stats.groups),
        kv_evictable=sum(g.evictable for g in stats.groups),
        counters=core.stats.counters() | stats.counters() | counters_of(core.kv),
        memory_bytes=({} if core.grower is None else {"kv": core.kv.backing.num_bytes}) | (memory_bytes or {}),
        prefix_tree=core.kv.cache.sketch(TREE_NODES),
        tiers=tiers_of(core.kv),
        rank_blocks=core.kv.rank_blocks() if isinstance(core.kv, PlacedManager) else [],
        decode_s=list(scheduler.pauses.costs.decode),
        prefill_token_s=scheduler.pauses.costs.prefill_token_s,
        **({} if core.controller is None else _adaptive(core)),
    )


def _adaptive(core: EngineCore) -> dict[str, Any]:
    moves = [(at_s, move.name, move.value, move.was, move.why) for at_s, move in core.moves]
    return {"knobs": core.knobs.values(), "moves": moves, "frozen": core.knobs.frozen}


class EngineLoop:
    """Steps while there is work, waits while there is none. `send` and `stop` may be called from other threads.

    `emit` is called once per step that has news, and with a snapshot at least every second; it may block. `memory`
    yields bytes by subsystem.
    """

    def __init__(
        self,
        core: EngineCore,
        emit: Callable[[Outputs], None],
        box: BlackBox,
        *,
        epoch: int = 0,
        memory: Callable[[], dict[str, int]] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.core = core
        self._preparation = Preparation.of(core, self._watch_aside)
        self._emit = emit
        self._box = box
        self._epoch = epoch
        self._memory = memory
        self._faults = faults or Faults([])
        self._wake = threading.Condition()
        self._intake: deque[Intake] = deque()
        self._stop = False
        self._handles: dict[str, int] = {}
        self.spare: SpareWork | None = None
        """What is done in the time that steps leave, if anything is."""
        self.block_news: BlockNews | None = None
        """What a router of the front end follows."""
        self._snapshot_s = core.clock.now()
        core.watch = self._watch
        self.notice = False
        """Set, by a signal's handler perhaps, when this process is to be ended soon."""
        self._noticed = self._leaving = False

    def send(self, items: Sequence[Intake]) -> None:
        self._enqueue(self._preparation.sift(items, self._enqueue))

    def _enqueue(self, items: Sequence[Intake]) -> None:
        with self._wake:
            self._intake.extend(items)
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()

    def try_out(self) -> None:
        """A request of the engine's own, a token long, before it takes any.

        For an engine that follows one that died: if it is broken for everybody, it dies here, and no request is blamed.
        """
        own = Request(request_id="", prompt_token_ids=[0], rules=TokenRules(), max_tokens=1, namespace=b"try-out")
        self.core.add(own)
        while self.core.has_work:
            self.core.step()
        self.core.kv.reset_prefix_cache()
        self._box.done()

    def run(self) -> None:
        """Returns after `stop`. Raises what is not one request's fault: the engine is broken then."""
        core = self.core
        self._box.beat(False)
        while not self._stop:
            if self.notice and not self._noticed:
                self._noticed = True
                self._enqueue([Control(kind="hold")])
            items = self._next()
            if not items and not core.has_work:
                self._box.beat(False)
                core.executor.check()
                core.rest()
                self._tell([], 0.0, IDLE_SNAPSHOT_S)
                continue
            if items is None:  # there is work, but the policy waits for company
                self._box.beat(True)
                continue
            self._box.beat(True)
            refused = [error for item in items if (error := self._add(item)) is not None]
            if items:  # the step takes them in, one after the other
                self._box.working_on([self._handles[item.request_id] for item in items if isinstance(item, Request)])
            began = core.clock.now()
            outputs = refused + core.step()
            step_s = core.clock.now() - began
            self._box.done()
            self._box.beat(core.has_work)
            if len(self._handles) > 2 * len(core.groups) + _SPARE_HANDLES:
                self._handles = {name: self._handles[name] for name in core.groups if name in self._handles}
            if self._noticed and not self._leaving and not core.inflight:
                self._leaving = True  # with this message all is told that was computed
                self._tell(outputs, step_s, 0.0)
                continue
            self._tell(outputs, step_s, SNAPSHOT_S if core.has_work else 0.0)
            if self.spare is not None and core.has_work:
                self.spare.between(step_s)

    def _next(self) -> Collection[Intake] | None:
        """What has come in. With nothing to do, waits for it a moment; None if only time has passed."""
        core = self.core
        busy = self.spare is not None and not core.has_work and self.spare.rest(self._called)
        with self._wake:
            if not self._intake and not self._stop:
                if not core.has_work:
                    self._wake.wait(0.0 if busy else IDLE_S)
                elif core.scheduler.wake_s is not None and (wait_s := core.scheduler.wake_s - core.clock.now()) > 0:
                    self._wake.wait(min(wait_s, IDLE_S))
                    if not self._intake and wait_s > IDLE_S:
                        return None
            items, self._intake = self._intake, deque()
            return items

    def _called(self) -> bool:
        return bool(self._intake) or self._stop

    def _add(self, item: Intake) -> EngineOutput | None:
        """Hand an item to the core. One that it refuses gets its answer: it must not end the loop."""
        if isinstance(item, Request):
            self._handles[item.request_id] = handle_of(item.request_id)
            self._box.working_on([self._handles[item.request_id]])
            self._faults.at("intake", [item])
        try:
            self.core.add(item)
        except InputError as error:
            if isinstance(item, Control):
                if item.weights is None:
                    return None
                return EngineOutput(request_id=item.request_id, index=0, finish_reason=SWAPPED, error=str(error))
            return EngineOutput(request_id=item.request_id, index=0, finish_reason="error", error=str(error))
        return None

    def _watch(self, requests: Collection[Request]) -> None:
        """A step with these requests is about to run."""
        known = self._handles
        self._box.working_on([known.get(r.request_id) or handle_of(r.request_id) for r in requests])
        self._faults.at("step", requests)

    def _watch_aside(self, place: int, request: Request | None) -> None:
        """Another thread is about to work on this request, or with None has done so."""
        self._box.working_aside(place, handle_of(request.request_id) if request is not None else 0)
        if request is not None:
            self._faults.at("prepare", [request])

    def _tell(self, outputs: list[EngineOutput], step_s: float, every_s: float) -> None:
        now = self.core.clock.now()
        fresh = None
        if now - self._snapshot_s >= every_s:
            memory = self._memory() if self._memory is not None else None
            fresh, self._snapshot_s = snapshot_of(self.core, step_s, memory), now
            if self._leaving:
                fresh = msgspec.structs.replace(fresh, leaving=True)
            if self.spare is not None:
                fresh.counters.update(self.spare.counters())
        blocks = None if self.block_news is None else self.block_news.take()
        if outputs or fresh is not None or blocks is not None:
            self._emit(Outputs(self._epoch, outputs, fresh, blocks))
