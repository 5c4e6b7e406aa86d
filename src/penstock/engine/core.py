"""EngineCore: one short step, the only loop there is (docs/concepts/the-step.md).

intake -> schedule -> submit -> collect -> apply aborts -> commit -> emit
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from penstock.core.events import MachineNews, Move, PoolGrowth, StoreNews
from penstock.core.output import EngineOutput
from penstock.core.request import Abort, Intake, Request
from penstock.core.sequence import Sequence
from penstock.engine.commit import Commit
from penstock.engine.entry import Entry
from penstock.engine.group import SequenceGroup

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.core.batch import SchedulerOutput
    from penstock.core.kv_events import KVEvent
    from penstock.core.protocols import Executor
    from penstock.engine.grower import Grower
    from penstock.engine.record import Recorder
    from penstock.kv.manager import KVManager
    from penstock.sched.controller import Controller
    from penstock.sched.scheduler import Scheduler

InFlight = tuple["SchedulerOutput", list[tuple[Sequence, int, int]]]
"""A submitted step and, per scheduled row, (sequence, tokens, its preemption count when submitted)."""


class EngineCore:
    """Drives sequences from intake to their last token. `add` may be called from other threads; `step` from one.

    With `check_invariants`, the laws of the KV memory are asserted after every step (tests; sampled in production).
    """

    def __init__(
        self, scheduler: Scheduler, kv: KVManager, executor: Executor, clock: Clock, *,
        check_invariants: bool = False, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.kv = kv
        self.executor = executor
        self.clock = clock
        self.stats = scheduler.stats
        self.check_invariants = check_invariants
        self.recorder = recorder
        self.grower: Grower | None = None
        """Asks the machine for KV memory. None: it is all there, or a log says what there was."""
        self.store_news: Callable[[float], list[StoreNews]] | None = None
        """What is new in the store of blocks, if it is time to look. None: there is no store, or a log says it."""
        self.controller: Controller | None = None
        """Moves knobs of the scheduler as the load wants it. None: nobody does, or a log says how."""
        self.tell_events: Callable[[list[KVEvent]], bool] | None = None
        """Hears at once, and without waiting for anybody, what `kv.events` has recorded in a step; False: lost."""
        self.groups: dict[str, SequenceGroup] = {}
        self._sequences: dict[int, Sequence] = {}
        self._intake: deque[Intake | MachineNews] = deque()
        self.watch: Callable[[Collection[Request]], None] | None = None
        """Told of the requests in flight, just before a step that adds to them is submitted."""
        self.inflight: deque[InFlight] = deque()
        self._emitted: list[EngineOutput] = []
        self.commit = Commit(scheduler, kv, self.groups, self._sequences, self.new_sequence, self._emitted)
        self._next_seq_id = 0
        self._entry, self._next_step = Entry(self.commit, self.new_sequence, executor, self.inflight), 0
        self.swapping, self.knobs, self.moves = self._entry.swapping, self._entry.knobs, self._entry.moves

    def add(self, item: Intake | MachineNews) -> None:
        """Hand in a request, an abort, a control order or, of a log, a growth; it takes effect in the next step.

        Raises InputError, before anything is queued, if a request's id is in use or an order is unknown: a repeated id
        must not disturb the request that owns it.
        """
        self._entry.queued(item)
        self._intake.append(item)

    def rest(self) -> None:
        """There is nothing to do; called again and again. Memory that is spared may be given back, by the next step."""
        if self.grower is not None and not self.has_work:
            self._intake.extend(self.grower.rest(self.kv.backing, self.clock.now()))

    @property
    def has_work(self) -> bool:
        waits = self.groups or self.kv.swaps.loads or self.kv.orders_wait or self.swapping.order
        return bool(self._intake or self.inflight or waits)

    def step(self) -> list[EngineOutput]:
        """Run one iteration and return its news. Raises what the executor raises."""
        now_s = self.clock.now()
        if self.recorder is not None:
            self.recorder.begin(now_s)
        self._intake.extendleft(reversed(self._entry.unasked(self.controller, self.store_news, self.grower, now_s)))
        while self._intake:
            self._take(self._intake.popleft())
        self._entry.settle()
        while len(self.inflight) < self.executor.depth:
            output = self.scheduler.schedule(self._next_step, idle=not self.inflight, now_s=now_s)
            if output is None:
                break
            self._submit(output, now_s)
        if self.inflight:
            output, rows = self.inflight.popleft()
            result = self.executor.collect()
            if self.recorder is not None:
                self.recorder.collected(result)
            self._take_aborts()
            self.kv.retired(output.step)
            self.commit.apply(output, rows, result, self.clock.now())
            self.scheduler.pauses.observe(output, result)
            self.stats.num_prefix_hit_tokens += sum(measure(output, result) for measure in self.kv.measures)
            if self.scheduler.drafts is not None:
                self.scheduler.drafts.observe(output, result)
        if self.check_invariants:
            self.kv.check_invariants(self._sequences.values())
        if self.kv.events is not None:
            self.publish()
        emitted, self._emitted[:] = list(self._emitted), []
        return emitted

    def publish(self) -> None:
        """Hand on what has changed in the prefix cache. Without anybody to hear of it, it is forgotten."""
        events = self.kv.events.take() if self.kv.events is not None else []
        if events and self.tell_events is not None:
            self.stats.num_kv_events += len(events)
            if not self.tell_events(events):
                self.stats.num_dropped_kv_events += len(events)

    def _submit(self, output: SchedulerOutput, now_s: float) -> None:
        scheduled = [(self._sequences[r.seq_id], r.num_tokens) for r in output.scheduled]
        rows = [(seq, n, seq.num_preemptions) for seq, n in scheduled]
        for seq, _ in scheduled:
            if seq.scheduled_s is None:
                seq.scheduled_s = now_s
        if self.recorder is not None:
            self.recorder.submitted(output)
        self._next_step += 1
        self.kv.submitted(output.step)
        self.inflight.append((output, rows))
        if self.watch is not None:
            self.watch({id(s.request): s.request for _, rows in self.inflight for s, _, _ in rows}.values())
        self.executor.submit(output)

    # -- intake --------------------------------------------------------------------------------------------------

    def _take(self, item: Intake | MachineNews) -> None:
        if self.recorder is not None:
            self.recorder.took(item)
        if isinstance(item, Request):
            self._entry.request(item)
        elif isinstance(item, Abort):
            self._entry.abort(item)
        elif isinstance(item, PoolGrowth):
            self._entry.growth(item)
            if self.grower is not None:
                self.grower.follow(self.kv.backing)
        elif isinstance(item, StoreNews | Move):
            self._entry.news(item, self.clock.now())
        else:
            self._entry.control(item)

    def _take_aborts(self) -> None:
        """Aborts that arrived while the step ran take effect before its results do; the rest waits its turn."""
        for _ in range(len(self._intake)):
            item = self._intake.popleft()
            if isinstance(item, Abort) and item.request_id in self.groups:
                if self.recorder is not None:
                    self.recorder.took_late(item)
                self._entry.abort(item)
            else:
                self._intake.append(item)

    def new_sequence(self, request: Request, arrival: int, index: int) -> Sequence:
        seq = Sequence(self._next_seq_id, request, arrival, index)
        self._next_seq_id += 1
        self._sequences[seq.seq_id] = seq
        return seq
