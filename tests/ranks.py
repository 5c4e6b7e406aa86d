"""Ranks for tests of executors, built from what `RankSpec.model` says; as a program, the process of one of them.

"recorder": notes what it is given and answers with everything that a step can hold, and with a digest of all that it
has been given so far. "breaks": a recorder whose step 1 raises. "flat": a rank over a model that prefers the next
token. "fake", "tiny:NAME": ranks over the models of `tests.engine`. "fails": cannot be built. "dies":
while it is. "busy", "lazy": a second of work, or of sleep, until it is. "last:KIND": of several ranks the last one is
of this kind, the others are recorders. "odd": a recorder that says something else.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from penstock.base.errors import CapacityError
from penstock.core.batch import (
    PromptLogprobs,
    RowError,
    Sampled,
    SchedulerOutput,
    StepOutput,
    TokenLogprobs,
)
from penstock.core.page_ops import PageOp
from penstock.core.weight_swap import WeightFacts
from penstock.executor.rank import Progress, Rank, RankSpec

COMMAND = (sys.executable, str(Path(__file__)))


class Recorder:
    packed_file = "read"

    def __init__(self, breaks_at: int = -1, token: int = 3) -> None:
        self._token = token
        self.seen: list[Any] = []
        self._breaks_at = breaks_at

    def execute(self, output: SchedulerOutput) -> StepOutput:
        if output.step == self._breaks_at:
            raise ValueError("the rank is out of order")
        self.seen.append(output)
        time.sleep(sum(op.count for op in output.page_ops if op.src == op.dst) / 1000)
        entry = TokenLogprobs(3, -0.25, 1, [3, 4], [-0.25, float("-inf")])
        return StepOutput(
            output.step,
            [Sampled(1, [self._token], [entry]), Sampled(2, [], candidates=[(7, -1.5)])],
            [PromptLogprobs(1, 4, [entry])],
            [RowError(9, f"{self.seen}")],
            0.125,
        )

    def back(self, num_slabs: Sequence[int]) -> None:
        self.seen.append(list(num_slabs))

    def ready_weights(self, path: str) -> WeightFacts:
        raise NotImplementedError

    def switched(self) -> Rank:
        raise NotImplementedError

    def holds(self, grammar: str) -> bool:
        return grammar == "held"

    def prepare(self, grammar: str, param: str) -> None:
        from penstock.base.errors import InputError

        if grammar == "wrong":
            raise InputError("no such grammar", param=param, code="bad")
        if grammar == "broken":
            raise ZeroDivisionError("in the compiler")

    def spoil(self, step: int) -> None:
        self.seen.append(("spoil", step))

    def watch(self, progress: int) -> None:
        import ctypes

        ctypes.c_uint64.from_address(progress).value += 41


def lasting(ms: int) -> list[PageOp]:
    """Makes a step of a Recorder take so long."""
    return [PageOp(0, 7, 7, ms)]


def build(spec: RankSpec, loading: Progress | None) -> Rank:
    assert spec.model is not None
    kind, _, name = spec.model.partition(":")
    if kind == "last":
        kind, _, name = (name if spec.rank == spec.world_size - 1 else "recorder").partition(":")
    if loading is not None:
        loading(3, 4)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "fails":
        raise CapacityError("it is too small", field="block_size")
    while kind == "busy" and time.process_time() < 1.2:
        pass
    if kind == "lazy":
        time.sleep(1.0)
    if kind in ("recorder", "breaks", "busy", "lazy", "odd"):
        return Recorder(breaks_at=1 if kind == "breaks" else -1, token=4 if kind == "odd" else 3)
    return _runner(spec, kind, name)


def _runner(spec: RankSpec, kind: str, name: str) -> Rank:
    from penstock.base.clock import MonotonicClock
    from penstock.config import from_kwargs
    from penstock.launch.assemble import model_parts
    from penstock.launch.parts import Parts, make_rank
    from tests import specs
    from tests.engine.fake_model import VOCAB, FakeForward

    config = from_kwargs(**spec.config)
    if kind == "tiny":
        parts = model_parts(config, *specs.make(name), spec.plan)
    elif kind == "fake":
        parts = Parts(forward=FakeForward(spec.plan.groups), vocab_size=VOCAB)
    else:
        parts = Parts(forward=Flat(), vocab_size=16)
    return make_rank(config, spec.plan, parts, MonotonicClock(), poison=spec.poison)


class Flat:
    """Logits that prefer the token after the newest one."""

    def run(self, plan: Any, planes: Any) -> Any:
        import numpy as np

        logits = np.zeros((len(plan.logits_indices), 16), np.float32)
        newest = plan.token_ids[plan.logits_indices]
        logits[np.arange(len(newest)), (newest + 1) % 16] = 4.0
        return logits


if __name__ == "__main__":
    from penstock.executor.worker import main

    sys.exit(main(sys.argv[1:], build))
