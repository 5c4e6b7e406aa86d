"""The rank lives in the engine's own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.protocols import Executor
from penstock.core.weight_swap import WeightFacts
from penstock.engine.blackbox import BlackBox
from penstock.executor.rank import AheadRank, Progress, Rank, RankFactory, RankSpec, switched


class InprocExecutor(Executor):
    """Queues steps and runs the oldest one when its result is asked for.

    With `depth` 2 a step therefore runs after the next one was scheduled, as on a real device, and tests see whatever
    the engine does wrong about that. A rank on a device is given each step at once.

    `spec.wire` sends steps and results through msgpack, as other executors must.
    """

    def __init__(
        self, spec: RankSpec, build: RankFactory, *, depth: int = 1, loading: Progress | None = None,
        box: BlackBox | None = None,
    ) -> None:  # fmt: skip
        assert depth >= 1, f"depth {depth}"
        self.depth = depth
        self._runner = build(spec, loading)
        self._ahead = self._runner if isinstance(self._runner, AheadRank) else None
        self.packed_file = self._runner.packed_file
        self._box = box
        if box is not None:
            self._runner.watch(box.progress_address)
        self._queue: deque[Any] = deque()
        self._closed = False
        self._spoils = False
        self._wire = spec.wire
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_step = msgspec.msgpack.Decoder(SchedulerOutput).decode
        self._decode_result = msgspec.msgpack.Decoder(StepOutput).decode

    @property
    def runner(self) -> Rank:
        return self._runner

    def submit(self, output: SchedulerOutput) -> None:
        """Queue a step, or start it. More than `depth` in flight, or a step after `close`, is our own bug
        (AssertionError)."""
        assert not self._closed, "submit after close"
        assert len(self._queue) < self.depth, f"more than {self.depth} steps in flight"
        if self._spoils:
            self._runner.spoil(output.step)
            self._spoils = False
        if self._ahead is not None:
            step = self._decode_step(self._encode(output)) if self._wire else output
            self._queue.append(self._ahead.launch(step))
            return
        # Encoded now, not at collect: the receiver must see the step as it was when it was sent.
        self._queue.append(self._encode(output) if self._wire else output)

    def collect(self) -> StepOutput:
        """Run the oldest step, or wait for it; returns what it yielded. Nothing in flight is our own bug
        (AssertionError)."""
        assert self._queue, "collect without a step in flight"
        step = self._queue.popleft()
        if self._ahead is not None:
            result = self._ahead.finish(step)
            return self._decode_result(self._encode(result)) if self._wire else result
        if isinstance(step, bytes):
            return self._decode_result(self._encode(self._runner.execute(self._decode_step(step))))
        found: StepOutput = self._runner.execute(step)
        return found

    def close(self) -> None:
        """Forget what is in flight. May be called twice."""
        self._closed = True
        self._queue.clear()

    def back(self, num_slabs: Sequence[int]) -> None:
        self._runner.back(num_slabs)

    def holds(self, grammar: str) -> bool:
        return self._runner.holds(grammar)

    def prepare(self, grammar: str, param: str = "structured_outputs") -> None:
        self._runner.prepare(grammar, param)

    def ready_weights(self, path: str) -> WeightFacts:
        return self._runner.ready_weights(path)

    def switch_weights(self) -> float:
        assert not self._queue, "steps are in flight"
        old, self._ahead = self._runner, None
        del self._runner
        self._runner, seconds = switched(old, self._box)
        self._ahead = self._runner if isinstance(self._runner, AheadRank) else None
        return seconds

    def spoil(self) -> None:
        self._spoils = True
