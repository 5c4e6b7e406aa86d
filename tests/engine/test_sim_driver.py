"""The event loop: hand-computed runs, conservation, determinism, and prefix hits of a published trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import EngineError, InputError
from penstock.config import from_kwargs
from penstock.core.qoe import Expected, quality
from penstock.core.step_shape import StepShape
from penstock.engine.record import Recorder, replay
from penstock.executor.sim import SimExecutor
from penstock.plan.simulated import sim_plan
from penstock.sched.policy import POLICIES
from penstock.sim.build import build_sim
from penstock.sim.driver import Progress, SimLimits, simulate
from penstock.sim.metrics import Slo, by_tenant, distributions, metrics
from penstock.sim.result import SimResult
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.traces import open_trace
from penstock.sim.workload import TimedRequest, Workload, from_list
from tests.engine.harness import Knobs, assert_idle, plain_core, plan_for, tiny
from tests.shared import shared


class Linear:
    """A step costs a constant and so much per token and per cached token."""

    name = "linear"

    def __init__(self, step_s: float = 0.01, token_s: float = 1e-4, context_s: float = 1e-6) -> None:
        self.parts = (step_s, token_s, context_s)

    def step_s(self, shape: StepShape) -> float:
        step_s, token_s, context_s = self.parts
        return step_s + token_s * shape.num_tokens + context_s * shape.num_context

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / 1e9


ONE_SECOND = Linear(1.0, 0.0, 0.0)


def run(
    workload: Workload,
    knobs: Knobs,
    timer: Any = None,
    *,
    name: str = "llama_gqa",
    recorder: Any = None,
    **options: Any,
) -> SimResult:
    spec, _ = tiny(name)
    plan = plan_for(spec, knobs)
    clock = VirtualClock()
    executor = SimExecutor(timer or Linear(), clock, vocab_size=spec.vocab_size, depth=knobs.depth)
    core = plain_core(spec, knobs, executor, clock)
    core.recorder = recorder
    limits = SimLimits(plan.max_model_len, plan.kv_capacity_tokens, spec.vocab_size, options.pop("truncate", False))
    result = simulate(core, clock, workload, limits, **options)
    assert core.recorder is recorder
    assert_idle(core)
    return result


TWO = from_list("two", [TimedRequest(0.0, 4, 3, tenant="a"), TimedRequest(1.5, 2, 2, tenant="b")])


def test_a_schedule_worked_out_by_hand() -> None:
    """One second per step. Steps end at 1 (a's prompt), 2 (a), 3 (a ends, b's prompt), 4 (b ends)."""
    result = run(TWO, Knobs(block_size=4, num_blocks=8), ONE_SECOND)
    r = result.requests
    assert r.arrival_s.tolist() == [0.0, 1.5]
    assert r.scheduled_s.tolist() == [0.0, 2.0]
    assert r.first_token_s.tolist() == [1.0, 3.0]
    assert r.finish_s.tolist() == [3.0, 4.0]
    assert r.num_output.tolist() == [3, 2]
    assert sorted(np.repeat(result.gaps_s, result.gap_counts).tolist()) == [1.0, 1.0, 1.0]
    assert result.span_s == result.busy_s == 4.0
    found = distributions(result)
    assert found["ttft"].values.tolist() == [1.0, 1.5]
    assert found["queue"].values.tolist() == [0.0, 0.5]
    assert found["jct"].values.tolist() == [2.5, 3.0]
    # The reader of a chat: a's tokens at 1, 2 and 3 s instead of 1, 1.21, 1.42; b's 0.5 s late, and 1 s apart.
    by_hand = [quality(times, Expected()) for times in ([1.0, 2.0, 3.0], [1.5, 2.5])]
    assert result.requests.quality.tolist() == pytest.approx(by_hand)
    assert found["quality"].mean == pytest.approx(sum(by_hand) / 2)
    assert found["tpot"].values.tolist() == [1.0, 1.0]
    assert found["normalized"].values.tolist() == [1.0, 1.25]
    m = metrics(result, Slo(ttft_s=1.2, tpot_s=1.0))
    assert m["throughput"]["output_tokens_per_s"] == 5 / 4
    assert m["throughput"]["total_tokens_per_s"] == 11 / 4
    assert m["goodput"] == {"ttft_slo_s": 1.2, "tpot_slo_s": 1.0, "requests_per_s": 1 / 4, "attainment": 0.5}
    assert m["latency_s"]["ttft"] == {"mean": 1.25, "p50": 1.0, "p90": 1.5, "p99": 1.5, "max": 1.5}
    assert m["engine"]["busy"] == 1.0
    assert m["engine"]["steps"] == 4
    tenants = by_tenant(result, Slo(ttft_s=1.2, tpot_s=1.0))
    assert [(t["tenant"], t["requests"], t["attainment"]) for t in tenants] == [("a", 1, 1.0), ("b", 1, 0.0)]


def test_wastes_worked_out_by_hand() -> None:
    """Pool of 32 slots in blocks of 4. In the four steps: a fills 4, 5, 6 slots; b fills 2, 3 in the last two.

    a's second block has one token to come in step 2 (1 reserved, 2 never filled), none in step 3 (2 never filled). b
    has one to come in step 3 (1 reserved, 1 never filled), none in step 4. In step 4 a's full block is kept for reuse.
    """
    result = run(TWO, Knobs(block_size=4, num_blocks=8), ONE_SECOND)
    slots = {name: share * 4 * 32 for name, share in result.memory.items()}
    assert slots == pytest.approx({"tokens": 4 + 5 + 8 + 3, "reserved": 2, "internal": 6, "external": 0, "cached": 4})
    assert result.kv_peak == 3 / 8
    assert metrics(result)["kv"]["mean"]["free"] == pytest.approx(1 - 32 / 128)


def test_idle_time_is_jumped_over() -> None:
    workload = from_list("gap", [TimedRequest(0.0, 4, 1), TimedRequest(1000.25, 4, 1)])
    result = run(workload, Knobs(), ONE_SECOND)
    assert result.stats.num_steps == 2
    assert result.requests.first_token_s.tolist() == [1.0, 1001.25]
    assert metrics(result)["engine"]["busy"] == pytest.approx(2 / 1001.25)
    running = result.series.levels[:, 0] > 0
    assert running.sum() == 2, "the first bucket and the last"
    assert running[0]
    assert running[-1]


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.sampled
def test_every_request_ends_and_every_token_is_counted(policy: str, depth: int) -> None:
    lengths = "prompt=40&output=20&prompt_cv=1&output_cv=1&shared=8"
    workload = synthetic(f"synthetic:gamma?rate=40&cv=2&requests=120&{lengths}&groups=5&tenants=3", seed=4)
    result = run(workload, Knobs(num_blocks=48, budget=24, policy=policy, depth=depth))
    requests = list(workload)
    fit = [q for q in requests if q.num_prompt + q.num_output <= 48 * 4]
    r = result.requests
    assert sum(result.refused.values()) == len(requests) - len(fit) > 0
    assert len(r) == len(fit) == result.stats.num_finished
    assert r.num_prompt.tolist() == [q.num_prompt for q in fit]
    assert r.num_output.tolist() == [q.num_output for q in fit]
    assert result.stats.num_sampled_tokens == sum(q.num_output for q in fit)
    assert result.series.counts[:, result.counters.index("output_tokens")].sum() == r.num_output.sum()
    assert result.series.counts[:, result.counters.index("finished")].sum() == len(fit)
    assert result.gap_counts.sum() == (r.num_output - 1).sum()
    assert np.all(r.arrival_s <= r.scheduled_s + 1e-9)
    assert np.all(r.scheduled_s < r.first_token_s)
    assert np.all(r.first_token_s <= r.finish_s)
    assert r.preemptions.sum() == result.stats.num_preemptions
    assert result.busy_s <= result.span_s + 1e-9
    assert 0 < sum(result.memory.values()) <= 1 + 1e-9
    assert len(result.tenants) == 3
    if policy == "fcfs":
        assert result.stats.num_preemptions > 0, "the pool is too roomy for this test"
        assert r.cached.sum() > 0


def test_slot_models_run_too() -> None:
    result = run(synthetic("synthetic:poisson?rate=20&requests=30&prompt=20&output=9"), Knobs(), name="slots")
    assert len(result.requests) == 30


def test_equal_input_gives_an_equal_schedule() -> None:
    workload = synthetic("synthetic:poisson?rate=30&requests=80&prompt=30&output=10&output_cv=1", seed=1)
    knobs = Knobs(num_blocks=48, budget=24)
    first, second = (run(workload, knobs, digests=True) for _ in range(2))
    assert first.digest == second.digest != ""
    assert np.array_equal(first.requests.finish_s, second.requests.finish_s)
    other = synthetic("synthetic:poisson?rate=30&requests=80&prompt=30&output=10&output_cv=1", seed=2)
    assert run(other, knobs, digests=True).digest != first.digest
    assert run(workload, replace(knobs, budget=23), digests=True).digest != first.digest


def test_a_recorder_hears_everything() -> None:
    workload = synthetic("synthetic:poisson?rate=30&requests=40&prompt=30&output=10")
    knobs = Knobs(num_blocks=40)
    recorder = Recorder()
    result = run(workload, knobs, recorder=recorder)
    spec, _ = tiny("llama_gqa")
    emitted = replay(recorder.iterations, lambda executor, clock: plain_core(spec, knobs, executor, clock))
    assert sum(len(out.token_ids) for out in emitted) == result.requests.num_output.sum()


def test_what_cannot_fit_is_refused_or_shortened_never_lost() -> None:
    sizes = [(1000, 24), (1000, 25), (160, 96), (161, 96), (1, 2000)]
    workload = from_list("sizes", [TimedRequest(0.0, p, n) for p, n in sizes])
    roomy, tight = Knobs(num_blocks=300), Knobs(num_blocks=64)
    assert run(workload, roomy).refused == {"longer than the context of 1024 tokens": 2}
    assert run(workload, tight).refused == {"longer than the KV pool of 256 tokens": 4}
    cut = run(workload, tight, truncate=True)
    assert cut.refused == {}
    assert cut.truncated == 4
    assert cut.requests.num_prompt.tolist() == [232, 231, 160, 160, 1]
    assert cut.requests.num_output.tolist() == [24, 25, 96, 96, 255]


def test_a_workload_that_runs_backwards_is_refused() -> None:
    with pytest.raises(InputError, match="arrives before"):
        run(from_list("back", [TimedRequest(5.0, 4, 1), TimedRequest(4.0, 4, 1)]), Knobs())


def test_an_empty_workload_has_no_numbers() -> None:
    m = metrics(run(from_list("none", []), Knobs()))
    assert m["requests"]["arrived"] == 0
    assert m["latency_s"]["ttft"]["p50"] is None
    assert m["throughput"]["requests_per_s"] is None


def test_a_policy_that_runs_nobody_is_noticed() -> None:
    spec, _ = tiny("llama_gqa")
    knobs = Knobs()
    clock = VirtualClock()
    core = plain_core(spec, knobs, SimExecutor(Linear(), clock, vocab_size=61), clock)
    core.scheduler.policy.order = lambda running, waiting: []  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        simulate(core, clock, TWO, SimLimits(64, 64, 61))


def test_progress_is_told() -> None:
    heard: list[Progress] = []
    workload = synthetic("synthetic:poisson?rate=5&requests=40&prompt=8&output=20")
    result = run(workload, Knobs(), progress=heard.append)
    assert len(heard) > 1
    assert heard[-1].done == heard[-1].arrived == 40
    assert heard[-1].tokens == 800
    assert heard[-1].now_s == pytest.approx(float(result.requests.finish_s.max()))


# -- a published trace -------------------------------------------------------------------------------------------


def expected_hits(requests: list[TimedRequest], block_tokens: int, block_size: int) -> list[int]:
    """Tokens in whole cache blocks that some earlier prompt begins with too; at least one is left to compute."""
    out = []
    for i, request in enumerate(requests):
        best = 0
        for earlier in requests[:i]:
            same = 0
            for a, b in zip(request.blocks, earlier.blocks, strict=False):
                if a != b:
                    break
                same += block_tokens
            best = max(best, min(same, request.num_prompt - 1, earlier.num_prompt))
        out.append(best // block_size * block_size)
    return out


def mooncake(n: int, num_output: int) -> Workload:
    trace = open_trace(shared("data", "traces", "mooncake_conversation.jsonl")).limited(n)
    return replace(trace, source=lambda: (replace(r, num_output=num_output) for r in trace))


def big(num_blocks: int, **more: Any) -> tuple[Any, Any, VirtualClock, SimLimits]:
    spec = find_spec("llama-3.1-8b")
    config, plan = sim_plan(
        from_kwargs(model="(test)", num_gpu_blocks_override=num_blocks, block_size=32, **more), spec, 2 * 10**12
    )
    clock = VirtualClock()
    core = build_sim(config, spec, plan, Linear(0.006, 25e-6, 2e-8), clock)
    return core, plan, clock, SimLimits(plan.max_model_len, plan.kv_capacity_tokens, spec.vocab_size)


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
def test_the_cache_hits_exactly_what_the_trace_says(prefix_cache: str) -> None:
    """First 200 requests of Mooncake's conversations, one after the other, with room for all."""
    workload = mooncake(200, 1).timed(lambda: (1000.0 * k for k in range(200)), "one by one")
    core, _, clock, limits = big(100_000, prefix_cache=prefix_cache)
    result = simulate(core, clock, workload, limits)
    expected = expected_hits(list(workload), 512, 32)
    assert result.requests.cached.tolist() == expected
    assert sum(expected) > 100_000
    assert core.kv.stats().num_prefix_hit_tokens == sum(expected)
    assert metrics(result)["prefix_cache"]["hit_tokens"] == sum(expected)


def test_at_the_trace_s_own_pace_no_more_can_be_hit() -> None:
    workload = mooncake(120, 4)
    core, _, clock, limits = big(100_000)
    result = simulate(core, clock, workload, limits)
    bound = expected_hits(list(workload), 512, 32)
    assert 0 < result.requests.cached.sum() <= sum(bound)
    assert np.all(result.requests.cached <= np.array(bound))
    core, _, clock, limits = big(100_000, enable_prefix_caching=False)
    assert simulate(core, clock, workload, limits).requests.cached.sum() == 0


def test_a_device_s_defaults_are_decisions() -> None:
    _, plan, _, _ = big(5000)
    named = {d.name: d.value for d in plan.decisions}
    assert (plan.dtype, plan.max_num_seqs, plan.max_num_batched_tokens) == ("bfloat16", 256, 2048)
    assert {"dtype", "max_num_seqs", "max_num_batched_tokens"} <= named.keys()
    _, plan, _, _ = big(5000, max_num_seqs=7, max_num_batched_tokens=99, dtype="float32")
    assert (plan.dtype, plan.max_num_seqs, plan.max_num_batched_tokens) == ("float32", 7, 99)
