"""Listens to an engine while it runs: when sequences start, what each step holds, what memory looks like."""

from __future__ import annotations

from hashlib import blake2b

from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.events import MachineNews
from penstock.core.request import Abort, Control, Request
from penstock.core.step_shape import EMPTY, shape_of
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, digest
from penstock.sim.memory import SHARES, SlotUse
from penstock.sim.timeline import Timeline

LEVELS = ("running", "waiting", *SHARES)
COUNTERS = ("output_tokens", "computed_tokens", "arrivals", "finished")


class StepTap(Recorder):
    """Stands where a Recorder stands and keeps only what metrics need; an `inner` Recorder hears everything too.

    `started` collects (request id, time) of first admissions until the driver takes them. Levels are read when a step
    is submitted, with all its memory allotted, and hold until the next one is.
    """

    def __init__(
        self, core: EngineCore, timeline: Timeline, *, digests: bool, shapes: bool = False,
        inner: Recorder | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.started: list[tuple[str, float]] = []
        self.busy_s = 0.0
        self.num_computed = self.num_moves = 0
        """Tokens that were run; steps submitted, and collected."""
        self.shape = EMPTY
        """Of the step that was submitted last, with `shapes`."""
        self._shapes = shapes
        self.slots = SlotUse(core.kv)
        self._core = core
        self._timeline = timeline
        self._inner = inner
        self._hash = blake2b(digest_size=16) if digests else None
        self._new: list[str] = []
        self._owner: dict[int, str] = {}
        self._since_s = core.clock.now()
        self._held: tuple[float, ...] = (0.0,) * len(LEVELS)

    def begin(self, now_s: float) -> None:
        if self._inner is not None:
            self._inner.begin(now_s)

    def took(self, item: Request | Abort | Control | MachineNews) -> None:
        if self._inner is not None:
            self._inner.took(item)
        if isinstance(item, Request):
            self._new.append(item.request_id)

    def took_late(self, item: Abort) -> None:
        if self._inner is not None:
            self._inner.took_late(item)

    def submitted(self, output: SchedulerOutput) -> None:
        if self._inner is not None:
            self._inner.submitted(output)
        if self._hash is not None:
            self._hash.update(digest(output))
        if self._new:
            for request_id in self._new:  # their sequences exist by now, unless they have been taken out
                if (group := self._core.groups.get(request_id)) is not None:
                    self._owner[group.live[0].seq_id] = request_id
            self._new.clear()
        now_s = self._core.clock.now()
        for added in output.added:
            owner = self._owner.pop(added.seq_id, None)  # None: it comes back after a preemption
            if owner is not None:
                self.started.append((owner, now_s))
        self.num_computed += output.num_tokens
        self.num_moves += 1
        if self._shapes:
            self.shape = shape_of(output.scheduled)
        self.measure()

    def collected(self, result: StepOutput) -> None:
        if self._inner is not None:
            self._inner.collected(result)
        self.num_moves += 1
        self.busy_s += result.duration_s

    def measure(self) -> None:
        """Close the interval of the last reading and read the levels anew."""
        now_s = self._core.clock.now()
        self._timeline.level(self._since_s, now_s, self._held)
        scheduler = self._core.scheduler
        running = scheduler.running
        self._held = (
            len(running),
            len(scheduler.waiting),
            *self.slots.shares(running, scheduler.waiting[0] if scheduler.waiting else None),
        )
        self._since_s = now_s

    @property
    def digest(self) -> str:
        """Hex digest of all steps so far; "" if digests are off."""
        return self._hash.hexdigest() if self._hash is not None else ""
