"""What every Executor promises. Registering one enrols it; it then needs a factory here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import (
    AddedRow,
    Appended,
    Fork,
    PromptLogprobs,
    RowError,
    Sampled,
    ScheduledRow,
    SchedulerOutput,
    StepOutput,
    TableUpdate,
    TokenLogprobs,
)
from penstock.core.cache_spec import CacheSpec, Plane, group_layers
from penstock.core.page_ops import PageOp
from penstock.core.protocols import Executor
from penstock.core.sampling import TokenRules
from penstock.executor import EXECUTORS
from penstock.executor.inproc import InprocExecutor
from penstock.ops.plan import Planes, StepPlan
from penstock.runner.runner import Runner

FACTORIES: dict[str, Callable[..., Executor]] = {"inproc": InprocExecutor}
VARIANTS = [(name, depth, wire) for name in EXECUTORS.names() for depth in (1, 2) for wire in (False, True)]
every = pytest.mark.parametrize(("name", "depth", "wire"), VARIANTS)


class Recorder:
    """A rank that notes what it is given and answers with everything a step can hold."""

    def __init__(self) -> None:
        self.seen: list[SchedulerOutput] = []

    def execute(self, output: SchedulerOutput) -> StepOutput:
        self.seen.append(output)
        entry = TokenLogprobs(3, -0.25, 1, [3, 4], [-0.25, float("-inf")])
        return StepOutput(
            output.step,
            [Sampled(1, [3], [entry]), Sampled(2, [], candidates=[(7, -1.5)])],
            [PromptLogprobs(1, 4, [entry])],
            [RowError(9, "no")],
            0.125,
        )


def full_step(step: int) -> SchedulerOutput:
    rules = TokenRules(
        temperature=0.5,
        logit_bias={3: 1.5},
        bad_sequences=[[1, 2], [3]],
        allowed_ids=[],
        seed=2**64 - 1,
        stop_ids=[2],
        num_logprobs=0,
    )
    return SchedulerOutput(
        step,
        [Fork(1, 2, 1)],
        [1],
        [AddedRow(5, 0, [1, 2, 3], 2, rules)],
        [Appended(2, [9], 1)],
        [TableUpdate(2, 0, 1, [4, 5], 1)],
        [PageOp(0, -1, 3, 2)],
        [ScheduledRow(2, 4, 1, 0, 3, -1), ScheduledRow(5, 0, 3, 2, 0, 0)],
    )


def make(name: str, rank: Any, depth: int, wire: bool) -> Executor:
    return FACTORIES[name](rank, depth, wire=wire)


def test_every_executor_has_a_factory() -> None:
    assert sorted(FACTORIES) == EXECUTORS.names()
    for name in FACTORIES:
        assert EXECUTORS.get(name) is FACTORIES[name]


@every
def test_steps_run_in_order_and_nothing_is_lost(name: str, depth: int, wire: bool) -> None:
    rank = Recorder()
    executor = make(name, rank, depth, wire)
    assert isinstance(executor, Executor)
    assert executor.depth == depth
    results, submitted = [], 0
    while len(results) < 5:
        while submitted < 5 and submitted - len(results) < depth:
            executor.submit(full_step(submitted))
            submitted += 1
        results.append(executor.collect())
    executor.close()
    assert rank.seen == [full_step(i) for i in range(5)]
    assert results == [Recorder().execute(full_step(i)) for i in range(5)]


@every
def test_execution_waits_for_collect(name: str, depth: int, wire: bool) -> None:
    """The inproc executor's own promise: with depth 2, step 0 runs after step 1 was submitted."""
    rank = Recorder()
    executor = make(name, rank, depth, wire)
    for step in range(depth):
        executor.submit(full_step(step))
    assert rank.seen == []
    assert executor.collect().step == 0
    assert [s.step for s in rank.seen] == [0]


@every
def test_misuse_is_our_own_bug(name: str, depth: int, wire: bool) -> None:
    executor = make(name, Recorder(), depth, wire)
    with pytest.raises(AssertionError):
        executor.collect()
    for step in range(depth):
        executor.submit(full_step(step))
    with pytest.raises(AssertionError):
        executor.submit(full_step(depth))
    executor.close()
    executor.close()
    with pytest.raises(AssertionError):
        executor.submit(full_step(0))
    with pytest.raises(AssertionError):
        executor.collect()


def test_the_wire_carries_the_step_as_it_was_sent() -> None:
    rank = Recorder()
    executor = InprocExecutor(rank, wire=True)
    step = full_step(0)
    executor.submit(step)
    step.removed.append(77)
    executor.collect()
    assert rank.seen == [full_step(0)]


class Flat:
    """Logits that prefer the token after the newest one."""

    def run(self, plan: StepPlan, planes: Sequence[Planes]) -> np.ndarray:
        logits = np.zeros((len(plan.logits_indices), 16), np.float32)
        newest = plan.token_ids[plan.logits_indices]
        logits[np.arange(len(newest)), (newest + 1) % 16] = 4.0
        return logits


class Still:
    def now(self) -> float:
        return 0.0


def drive(wire: bool) -> list[StepOutput]:
    groups = group_layers([CacheSpec("paged", (Plane("k", 1, 1, "float32"),))])
    executor = InprocExecutor(Runner(Flat(), groups, [4], 4, 16, clock=Still()), wire=wire)
    rules = TokenRules(temperature=0.9, seed=3, num_logprobs=2, num_prompt_logprobs=1)
    steps = [
        SchedulerOutput(
            0,
            added=[AddedRow(1, 0, [1, 2, 3], 3, rules), AddedRow(2, 0, [5], 1, TokenRules(allowed_ids=[]))],
            tables=[TableUpdate(1, 0, 0, [0]), TableUpdate(2, 0, 0, [1])],
            scheduled=[ScheduledRow(1, 0, 3, 2, 0, 0), ScheduledRow(2, 0, 1, 1)],
        ),
        SchedulerOutput(1, appended=[Appended(1, [4])], scheduled=[ScheduledRow(1, 3, 1, 0, 4)]),
    ]
    results = []
    for step in steps:
        executor.submit(step)
        results.append(executor.collect())
    return results


def test_a_real_rank_is_wireable() -> None:
    """No numpy number, no view, nothing msgpack cannot carry, and no float that changes on the way."""
    plain = drive(wire=False)
    assert drive(wire=True) == plain
    assert [len(s.token_ids) for s in plain[0].sampled] == [2]
    assert [e.seq_id for e in plain[0].errors] == [2]
    assert len(plain[0].prompt_logprobs[0].entries) == 2
    assert plain[1].sampled[0].candidates[0][0] == 5
