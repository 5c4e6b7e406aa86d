"""The step budget in seconds: nobody waits for a two-second prefill, and nobody starves because of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.base.clock import VirtualClock
from penstock.core.step_shape import EMPTY, StepShape
from penstock.executor.sim import SimExecutor
from penstock.sched.budget import SecondsBudget
from tests.engine.fake_model import VOCAB, spec
from tests.engine.harness import Collector, Knobs, drain, fake_engine, plain_core, request
from tests.engine.naive import fake_logits, generate


@dataclass(frozen=True)
class Linear:
    """A device whose steps cost so much per token, row and pair. Units: seconds."""

    name: str = "linear"
    base_s: float = 1e-3
    token_s: float = 1e-3
    row_s: float = 1e-4
    pair_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        work_s = self.token_s * shape.num_tokens + self.row_s * shape.num_rows + self.pair_s * shape.num_pairs
        return self.base_s + work_s

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / 1e9


def simulated(knobs: Knobs, timer: Linear):  # type: ignore[no-untyped-def]
    clock = VirtualClock()
    executor = SimExecutor(timer, clock, vocab_size=VOCAB, depth=knobs.depth)
    core = plain_core(spec(slots=False), knobs, executor, clock, timer)
    durations: list[tuple[float, bool]] = []
    submit = executor.submit

    def spy(output):  # type: ignore[no-untyped-def]
        decodes = any(r.num_tokens == 1 for r in output.scheduled)
        before = executor.busy_s
        submit(output)
        durations.append((executor.busy_s - before, decodes))

    executor.submit = spy  # type: ignore[method-assign]
    return core, clock, durations


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_keep_to_a_tenth_of_a_second_while_anyone_decodes(depth: int) -> None:
    knobs = Knobs(block_size=4, num_blocks=1024, budget=4096, max_num_seqs=8, depth=depth)
    core, _, durations = simulated(knobs, Linear())
    core.add(request([5] * 8, max_tokens=40, request_id="stream"))
    for _ in range(4):
        core.step()
    for i in range(4):
        core.add(request([6 + i] * 400, max_tokens=3, request_id=f"long{i}"))
    collector = Collector()
    drain(core, collector)
    with_decode = [d for d, decodes in durations if decodes]
    assert max(with_decode) <= 0.1 + 1e-9
    assert len(collector.requests["stream"].tokens[0]) > 30
    alone = [d for d, decodes in durations if not decodes]
    assert max(alone, default=0) <= 1.0 + 1e-9


def test_a_prompt_alone_may_take_a_second() -> None:
    core, _, durations = simulated(Knobs(block_size=4, num_blocks=1024, budget=4096), Linear())
    core.add(request([5] * 500, max_tokens=1))
    drain(core, Collector())
    assert max(d for d, _ in durations) == pytest.approx(0.5, abs=0.05), "500 tokens fit one second: one step"


def test_prefill_gets_at_least_one_block_however_slow_the_device() -> None:
    knobs = Knobs(block_size=4, num_blocks=256, budget=64)
    core, _, durations = simulated(knobs, Linear(token_s=0.5))  # one token alone breaks the limit of a tenth
    core.add(request([5] * 8, max_tokens=60, request_id="stream"))
    for _ in range(3):
        core.step()
    core.add(request([6] * 40, max_tokens=2, request_id="long"))
    collector = Collector()
    steps = drain(core, collector)
    assert collector.requests["long"].first_step <= 12, "40 tokens at one block a step"
    assert steps < 70
    assert durations


def test_the_seconds_budget_changes_no_token() -> None:
    knobs = Knobs(block_size=4, num_blocks=64, budget=64)
    core, _ = fake_engine(knobs)
    timed, _ = fake_engine(knobs, timer=Linear(token_s=0.02))
    load = [request([3 + i] * (10 + 3 * i), max_tokens=9, request_id=str(i)) for i in range(6)]
    for c in (core, timed):
        collector = Collector()
        for r in load:
            c.add(r)
        drain(c, collector)
        for r in load:
            assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert timed.stats.num_steps > core.stats.num_steps


def test_fit_is_the_largest_that_fits_within_half_a_block() -> None:
    budget = SecondsBudget(Linear(base_s=0, row_s=0), 4)
    for limit in (0.0101, 0.05, 0.333):
        budget.begin(limit)
        best = int(limit / 1e-3)
        got = budget.fit(0, 1000)
        assert best - 2 <= got <= best
    budget.begin(1e-9)
    assert budget.fit(0, 100) == 4
    budget.add(0, 4, False)
    assert budget.fit(0, 100) == 0
    assert EMPTY.plus(10, 3).num_pairs == 11 + 12 + 13
