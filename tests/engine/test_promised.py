"""Promised tokens: at depth 2 a decode is planned before its token is known, and nobody's tokens change.

The laws draw a depth of 2, too (test_laws_models.py); here is what only promises have.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.batch import AddedRow, Appended, Sampled, ScheduledRow, SchedulerOutput, StepOutput
from penstock.core.request import Abort
from penstock.core.sampling import TokenRules
from penstock.runner.promised import Promises
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, real_engine, request, run, tiny
from tests.engine.naive import fake_logits, generate
from tests.engine.test_laws_models import oracle

OPS = ["ref", "torch"]


def promised_steps(core: Any, collector: Collector) -> int:
    """Run to the end; how often a step was planned with a row that the step before it had, still in flight."""
    count = 0
    submit = core.executor.submit

    def spy(output: Any) -> None:
        nonlocal count
        before = {
            row.seq_id: row.start + row.num_tokens for step, _ in list(core.inflight)[:-1] for row in step.scheduled
        }
        count += any(before.get(row.seq_id) == row.start for row in output.scheduled)
        submit(output)

    core.executor.submit = spy
    drain(core, collector)
    return count


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("rules", [{}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.5, "num_logprobs": 2}])
def test_a_decode_is_planned_before_its_token_is_known(ops: str, rules: dict[str, Any]) -> None:
    spec, weights = tiny("llama_gqa")
    r = request([5, 6, 7, 8, 9], max_tokens=16, **rules)
    core = real_engine(spec, weights, Knobs(depth=2, ops=ops))
    collector = Collector()
    core.add(r)
    assert promised_steps(core, collector) == 15, "all but the first token"
    assert collector.requests[r.request_id].tokens[0] == generate(oracle("llama_gqa"), r)[0]
    assert core.stats.num_steps == 16, "and none for nothing: the last one is known to be the last"
    assert_idle(core)


def test_with_one_step_in_flight_nothing_is_promised() -> None:
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs(depth=1))
    core.add(request([5, 6, 7], max_tokens=8))
    assert promised_steps(core, Collector()) == 0


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("depth", [3, 4])
def test_a_token_may_come_from_a_step_further_back(ops: str, depth: int) -> None:
    """Prompts that end in different steps: a row that decodes is not in each of them."""
    spec, weights = tiny("llama_gqa")
    asked = [request([5, 6, 7, 8, 9, i], max_tokens=10, temperature=i / 4, seed=i) for i in range(5)]
    core = real_engine(spec, weights, Knobs(depth=depth, ops=ops))
    collector = Collector()
    for r in asked:
        core.add(r)
    drain(core, collector, limit=100)
    for r in asked:
        assert collector.requests[r.request_id].tokens[0] == generate(oracle("llama_gqa"), r)[0]
    assert_idle(core)


def test_a_token_that_was_told_is_promised_to_nobody() -> None:
    """It is the row's already: if the next step has none for it, there is none."""
    spec, weights = tiny("llama_gqa")
    runner: Any = real_engine(spec, weights, Knobs(depth=2)).executor.runner  # type: ignore[attr-defined]
    runner.rows.add(AddedRow(1, 0, [5, 6], 2, TokenRules()))
    promises = Promises(runner.rows, runner.sampler.chain)
    promises.settled(StepOutput(0, [Sampled(1, [7])]))
    told = SchedulerOutput(1, appended=[Appended(1, [7])], scheduled=[ScheduledRow(1, 2, 1, 1)])
    runner.rows.apply(promises.heard(told))
    assert promises.keep(told).scheduled == told.scheduled
    promises.settled(StepOutput(1))
    promised = SchedulerOutput(2, scheduled=[ScheduledRow(1, 3, 1, 1)])
    assert promises.keep(promises.heard(promised)).scheduled == []


def test_who_ends_leaves_a_row_that_nobody_hears_of() -> None:
    """An end token, an abort: the row in flight yields nothing, and its memory is free."""
    for eos in range(29):
        core, _ = fake_engine(Knobs(budget=64, depth=2))
        others = [request([3 + i, 4, 5], max_tokens=20) for i in range(2)]
        r = request([5, 4], max_tokens=20, eos=[eos])
        got = run(core, [r, *others])
        want = generate(fake_logits, r)
        assert (got[r.request_id].tokens[0], got[r.request_id].reasons[0]) == want
        assert all(got[o.request_id].tokens[0] == generate(fake_logits, o)[0] for o in others)
        assert_idle(core)
    core, _ = fake_engine(Knobs(budget=64, depth=2))
    stays, goes = request([3, 4, 5], max_tokens=20), request([5, 4], max_tokens=20)
    collector = Collector()
    for one in (stays, goes):
        core.add(one)
    for _ in range(6):
        collector.take(core.step())
    core.add(Abort(request_id=goes.request_id))
    drain(core, collector)
    assert collector.requests[stays.request_id].tokens[0] == generate(fake_logits, stays)[0]
    assert_idle(core)


@pytest.mark.parametrize("ops", OPS)
def test_a_row_that_fails_ends_alone_and_its_promise_is_void(ops: str) -> None:
    spec, weights = tiny("llama_gqa")
    good, bad = request([5, 6, 7, 8, 9], max_tokens=10), request([9, 8, 7], max_tokens=10)
    core = real_engine(spec, weights, Knobs(depth=2, ops=ops))
    collector = Collector()
    core.add(bad)
    core.add(good)
    for _ in range(4):
        collector.take(core.step())
    core.executor.spoil()
    drain(core, collector)
    failed = [r for r in (good, bad) if collector.requests[r.request_id].error]
    assert len(failed) == 1, "the first row of the step"
    fine = good if failed == [bad] else bad
    assert collector.requests[fine.request_id].tokens[0] == generate(oracle("llama_gqa"), fine)[0]
    assert_idle(core)


@pytest.mark.parametrize("block_size", [2, 16])
def test_short_of_memory_somebody_yields(block_size: int) -> None:
    """Who is in flight cannot be preempted, and nobody is preempted for a promise: all go on in the end."""
    spec, weights = tiny("llama_gqa")
    knobs = Knobs(depth=2, num_blocks=96 // block_size - 20 // block_size, block_size=block_size, budget=24)
    core = real_engine(spec, weights, knobs)
    asked = [request([3 + i, 9, 4 + i, 8], max_tokens=24) for i in range(6)]
    got = run(core, asked)
    assert core.stats.num_preemptions > 0
    for r in asked:
        assert got[r.request_id].tokens[0] == generate(oracle("llama_gqa"), r)[0]
    assert_idle(core)
