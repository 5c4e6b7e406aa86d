"""The rank lives in the engine's own thread."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import msgspec

from penstock.core.batch import SchedulerOutput, StepOutput


class Rank(Protocol):
    """What an executor drives; `runner.runner.Runner` is one."""

    def execute(self, output: SchedulerOutput) -> StepOutput: ...


class InprocExecutor:
    """Queues steps and runs the oldest one when its result is asked for.

    With `depth` 2 a step therefore runs after the next one was scheduled, as on a real device, and tests see whatever
    the engine does wrong about that. `wire` sends steps and results through msgpack, as other executors must.
    """

    def __init__(self, runner: Rank, depth: int = 1, *, wire: bool = False) -> None:
        assert depth >= 1, f"depth {depth}"
        self.depth = depth
        self._runner = runner
        self._queue: deque[SchedulerOutput | bytes] = deque()
        self._closed = False
        self._wire = wire
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_step = msgspec.msgpack.Decoder(SchedulerOutput).decode
        self._decode_result = msgspec.msgpack.Decoder(StepOutput).decode

    @property
    def runner(self) -> Rank:
        return self._runner

    def submit(self, output: SchedulerOutput) -> None:
        """Queue a step. More than `depth` in flight, or a step after `close`, is our own bug (AssertionError)."""
        assert not self._closed, "submit after close"
        assert len(self._queue) < self.depth, f"more than {self.depth} steps in flight"
        # Encoded now, not at collect: the receiver must see the step as it was when it was sent.
        self._queue.append(self._encode(output) if self._wire else output)

    def collect(self) -> StepOutput:
        """Run the oldest step and return what it yielded. Nothing in flight is our own bug (AssertionError)."""
        assert self._queue, "collect without a step in flight"
        step = self._queue.popleft()
        if isinstance(step, bytes):
            return self._decode_result(self._encode(self._runner.execute(self._decode_step(step))))
        return self._runner.execute(step)

    def close(self) -> None:
        """Forget what is in flight. May be called twice."""
        self._closed = True
        self._queue.clear()
