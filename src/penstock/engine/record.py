"""A run as data: what came in at which step, what the clock said, what was scheduled, what the device answered.

A schedule is a pure function of these: replaying a log through a fresh engine must give the same schedule,
step by step, or the engine has a hidden input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.base.errors import EngineError
from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.events import MachineNews
from penstock.core.protocols import Executor
from penstock.core.request import Abort, Control, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.base.clock import Clock
    from penstock.core.output import EngineOutput
    from penstock.core.protocols import Executor

_ENCODER = msgspec.msgpack.Encoder()


class Iteration(msgspec.Struct, array_like=True):
    """One call of `EngineCore.step`.

    `intake` was taken before scheduling, what the machine said of its memory first; `late` (aborts) while the step ran;
    `digests` are those of the steps submitted; `result` is what was collected. Units: `now_s` seconds on the engine's
    clock.
    """

    now_s: float
    intake: list[Request | Abort | Control | MachineNews] = []
    digests: list[bytes] = []
    result: StepOutput | None = None
    late: list[Request | Abort | Control] = []


def digest(output: SchedulerOutput) -> bytes:
    """Identity of a step's work: 16 bytes over its encoded form."""
    return blake2b(_ENCODER.encode(output), digest_size=16).digest()


class Recorder:
    """Collects a run. Costs one encoding per step; switched off (None) by default."""

    def __init__(self) -> None:
        self.iterations: list[Iteration] = []

    def begin(self, now_s: float) -> None:
        self.iterations.append(Iteration(now_s))

    def took(self, item: Request | Abort | Control | MachineNews) -> None:
        self.iterations[-1].intake.append(item)

    def took_late(self, item: Abort) -> None:
        self.iterations[-1].late.append(item)

    def submitted(self, output: SchedulerOutput) -> None:
        self.iterations[-1].digests.append(digest(output))

    def collected(self, result: StepOutput) -> None:
        self.iterations[-1].result = result

    def save(self, path: str | Path) -> None:
        """Length-prefixed msgpack records, one per iteration."""
        with open(path, "wb") as f:
            for iteration in self.iterations:
                data = _ENCODER.encode(iteration)
                f.write(len(data).to_bytes(8, "little") + data)


def load(path: str | Path) -> Iterator[Iteration]:
    """The iterations of a saved run. Raises EngineError for a file that is cut off."""
    decode = msgspec.msgpack.Decoder(Iteration).decode
    with open(path, "rb") as f:
        while head := f.read(8):
            size = int.from_bytes(head, "little")
            data = f.read(size)
            if len(head) < 8 or len(data) < size:
                raise EngineError(f"the run log {path} is cut off")
            yield decode(data)


class Engine(Protocol):
    """What a log is run through: an EngineCore."""

    def add(self, item: Request | Abort | Control | MachineNews) -> None: ...

    def step(self) -> list[EngineOutput]: ...


class _ReplayClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def wait_until(self, time_s: float) -> None:
        """A recorded run has its own times."""


class _ReplayExecutor(Executor):
    """Answers what was answered before; what came in while a step ran comes in again at the same place."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.digests: list[bytes] = []
        self.current: Iteration | None = None
        self.core: Engine | None = None

    def submit(self, output: SchedulerOutput) -> None:
        self.digests.append(digest(output))

    def collect(self) -> StepOutput:
        assert self.current is not None
        assert self.core is not None
        for item in self.current.late:
            self.core.add(item)
        if self.current.result is None:
            raise EngineError("the replayed engine waits for a result that the recorded one never got")
        return self.current.result

    def close(self) -> None:
        self.digests.clear()


def replay(
    iterations: Iterable[Iteration], make_core: Callable[[Executor, Clock], Engine], *, depth: int = 1
) -> list[EngineOutput]:
    """Run a log through a fresh engine and return what it emits.

    `make_core` builds the engine around the executor and clock it is given, with the settings (policy, cost table) of
    the recorded run. Raises EngineError naming the first step whose schedule differs.
    """
    clock, executor = _ReplayClock(), _ReplayExecutor(depth)
    core = make_core(executor, clock)
    executor.core = core
    emitted: list[EngineOutput] = []
    step = 0
    for iteration in iterations:
        clock.now_s = iteration.now_s
        executor.current = iteration
        executor.digests = []
        for item in iteration.intake:
            core.add(item)
        emitted += core.step()
        for was, now in zip(iteration.digests, executor.digests, strict=False):
            if was != now:
                raise EngineError(f"step {step} was scheduled differently in the replay")
            step += 1
        if len(iteration.digests) != len(executor.digests):
            raise EngineError(f"step {step} was {'not ' if iteration.digests else ''}scheduled in the replay only")
    return emitted
