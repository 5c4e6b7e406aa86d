"""Catalogue rows of metrics on the virtual clock: the real scheduler and KV manager, a formula for the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from penstock.base.clock import VirtualClock
from penstock.config import from_kwargs
from penstock.measure.cost import Price
from penstock.measure.energy import Power
from penstock.plan.devices import find_device
from penstock.plan.simulated import device_plan
from penstock.sim.alone import Alone, with_alone
from penstock.sim.build import build_sim
from penstock.sim.driver import SimLimits, simulate
from penstock.sim.metrics import distributions, metrics, steady
from penstock.sim.report import html_page, table
from penstock.sim.result import Charges, SimResult
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import TimedRequest, Workload, from_list
from tests.engine.policy_sim import LinearTimer

SPEC = find_spec("llama-3.1-8b")
TIMER = LinearTimer(base_s=0.01, token_s=0.0002)


def run(workload: Workload, **settings: Any) -> SimResult:
    config, plan = device_plan(from_kwargs(model="llama-3.1-8b", **settings), SPEC, find_device("a100-80g"))
    clock = VirtualClock()
    core = build_sim(config, SPEC, plan, TIMER, clock)
    limits = SimLimits(plan.max_model_len, plan.kv_capacity_tokens, SPEC.vocab_size)
    return with_alone(simulate(core, clock, workload, limits), TIMER, plan.max_num_batched_tokens)


@cache
def steady_load() -> SimResult:
    return run(synthetic("synthetic:poisson?rate=10&prompt=100&output=40&output_cv=0.7&requests=300", 1))


def test_K01_the_ttft_of_every_request_is_queue_and_prefill() -> None:
    result = steady_load()
    r, d = result.requests, distributions(result)
    queue, prefill = r.scheduled_s - r.arrival_s, r.first_token_s - r.scheduled_s
    assert (queue >= 0).all()
    assert (prefill >= TIMER.base_s + 100 * TIMER.token_s - 1e-9).all()
    assert queue + prefill == pytest.approx(r.first_token_s - r.arrival_s)
    found = metrics(result)["latency_s"]
    for name in ("ttft", "queue", "prefill"):
        assert {"p50", "p90", "p99"} <= found[name].keys()
    assert d["queue"].mean + d["prefill"].mean == pytest.approx(d["ttft"].mean)


def answers_beside_long_prompts() -> Workload:
    """Four short requests decode; two prompts of 2,000 tokens come by."""
    short = [TimedRequest(0.0, 16, 300) for _ in range(4)]
    return from_list("mixed", short + [TimedRequest(0.5 + 0.5 * i, 2000, 2) for i in range(2)])


def test_K02_the_longest_gap_and_the_mean_differ_and_chunks_bring_them_together() -> None:
    """Chunked or not, a token takes about as long on average; the longest gap is what chunks are for."""
    load = answers_beside_long_prompts()
    whole = run(load, scheduling_policy="prefill-first", max_num_batched_tokens=4096)
    chunked = run(load, max_num_batched_tokens=128)
    found = {}
    for name, result in (("whole", whole), ("chunked", chunked)):
        latency = metrics(result)["latency_s"]
        r = result.requests
        mine = r.num_output == 300
        assert latency["tpot"]["mean"] is not None
        tpot = ((r.finish_s - r.first_token_s)[mine] / 299).mean()
        found[name] = (tpot, latency["tbt"]["max"], latency["tbt"]["p99"])
        assert latency["tbt"]["max"] == pytest.approx(result.gaps_s.max())
    (mean_whole, max_whole, p99_whole), (mean_chunked, max_chunked, p99_chunked) = found["whole"], found["chunked"]
    assert p99_whole < 0.05  # fewer than one gap in a hundred is long
    assert max_whole > 0.4  # 2,000 tokens at 0.2 ms and the step itself
    assert max_whole > 20 * mean_whole
    assert max_chunked < 0.05
    assert p99_chunked <= max_chunked
    assert mean_chunked == pytest.approx(mean_whole, rel=0.4)
    assert max_whole > 8 * max_chunked


def test_K03_the_residual_is_below_five_percent_in_steady_load_and_printed() -> None:
    result = steady_load()
    found = metrics(result)["decomposition"]
    assert abs(found["residual"]) < 0.05
    assert abs(found["residual_all_tokens"]) < 0.05
    assert found["predicted_s"] == pytest.approx(found["jct_s"], rel=0.05)
    assert "JCT beyond TTFT + TPOT x tokens" in html_page([result])
    shown = table([result])
    assert any("JCT beyond" in str(cell) for cell in shown.columns[0].cells)


def test_K03_the_residual_is_not_always_small() -> None:
    """Answers of all lengths at once: the long ones end alone and fast, so the mean pace is nobody's."""
    load = from_list("burst", [TimedRequest(0.0, 400, 10 if i % 8 else 400) for i in range(64)])
    assert abs(metrics(run(load))["decomposition"]["residual"]) > 0.05


def test_K04_steady_rates_are_told_apart_and_leave_out_warm_up_and_drain() -> None:
    """A load whose rates are known, and behind it one straggler whose output nobody else is served beside."""
    times = np.arange(400) * 0.1
    load = [TimedRequest(float(t), 50, 20) for t in times] + [TimedRequest(40.0, 50, 2000)]
    result = run(from_list("straggler", load))
    found = metrics(result)
    part, whole = found["steady"], found["throughput"]
    assert part["settled"]
    assert part["end_s"] <= 40.5
    assert part["requests_per_s"] == pytest.approx(10, rel=0.05)
    assert part["input_tokens_per_s"] == pytest.approx(500, rel=0.05)
    assert part["output_tokens_per_s"] == pytest.approx(200, rel=0.05)
    assert part["total_tokens_per_s"] == pytest.approx(700, rel=0.05)
    assert whole["input_tokens_per_s"] < 400  # the whole run is longer than the load
    given = steady(result, warmup_s=10.0)
    assert given["start_s"] == pytest.approx(10.0, abs=0.5)
    assert "10 s" in str(given["method"])


def test_K06_alone_is_what_a_run_of_one_request_takes() -> None:
    for num_prompt, num_output in ((1, 1), (300, 17), (5000, 40)):
        result = run(from_list("one", [TimedRequest(0.0, num_prompt, num_output)]))
        assert result.alone_s is not None
        assert result.alone_s[0] == pytest.approx(float(result.requests.finish_s[0]), rel=1e-3)
        found = metrics(result)["slowdown"]
        assert found["max"] == pytest.approx(1.0, rel=1e-3)


def test_K06_alone_follows_a_timer_that_grows_with_the_context() -> None:
    class Growing(LinearTimer):
        def step_s(self, shape: Any) -> float:
            return super().step_s(shape) + 1e-6 * shape.num_context

    timer = Growing()
    (found,) = Alone(timer, 256).jct_s(np.array([1000]), np.array([700]))
    steps = [timer.step_s(s) for s in shapes(1000, 700, 256)]
    assert found == pytest.approx(sum(steps), rel=1e-6)


def shapes(num_prompt: int, num_output: int, budget: int) -> list[Any]:
    from penstock.core.step_shape import EMPTY

    chunks = [EMPTY.plus(at, min(budget, num_prompt - at), 1) for at in range(0, num_prompt, budget)]
    return chunks + [EMPTY.plus(num_prompt + i, 1, 1) for i in range(num_output - 1)]


def test_K06_mean_and_tail_of_the_slowdown_by_size_class_tell_policies_apart() -> None:
    """Last come, first served by priority: the mean over all sizes hides whom it hurts."""
    load = synthetic("synthetic:gamma?rate=6&cv=2&prompt=200&output=60&output_cv=1.5&requests=200", 3)
    found = metrics(run(load, max_num_seqs=4))
    slow = found["slowdown"]
    classes = slow["classes"]
    assert len(classes) == 4
    assert sum(c["requests"] for c in classes) == 200
    sizes = [(c["from_tokens"], c["to_tokens"]) for c in classes]
    assert sizes == sorted(sizes)
    assert all(c["mean"] <= c["p99"] <= c["max"] for c in classes)
    assert classes[0]["mean"] > 2 * classes[-1]["mean"]  # first come, first served: the small ones wait for the large
    assert found["latency_s"]["jct"]["p99"] > found["latency_s"]["jct"]["mean"]
    whole = sum(c["mean"] * c["requests"] for c in classes) / 200
    assert slow["mean"] == pytest.approx(whole)


def test_K09_K10_a_run_is_charged_in_money_and_joules() -> None:
    from dataclasses import replace

    result = steady_load()
    assert metrics(result)["cost"] is None
    bill = Charges(Price(per_hour=7.2, source="a test"), Power(10, 110, "a test"), (500.0, "a test"))
    found = metrics(replace(result, bill=bill))
    money, joules = found["cost"], found["energy"]
    assert money["cost"] == pytest.approx(0.002 * result.span_s)
    tokens = found["throughput"]
    parts = money["per_million_input"] * tokens["prompt_tokens"] + money["per_million_output"] * tokens["output_tokens"]
    assert parts / 1e6 == pytest.approx(money["cost"])
    stats = result.stats
    assert stats.prefill_s + stats.decode_s == pytest.approx(result.busy_s)
    assert money["input_share"] == pytest.approx(stats.prefill_s / result.busy_s)
    assert joules["joules"] == pytest.approx(10 * result.span_s + 100 * result.busy_s)
    assert joules["energy_source"] == "model"
    page = html_page([replace(result, bill=bill)])
    assert "energy is a model: 10 W idle" in page
    assert "7.2 USD an hour (a test)" in page


def test_K09_seconds_of_mixed_steps_go_to_prompts_but_for_what_decodes_take_alone() -> None:
    """100 tokens of prompt cost 20 ms on top of a step that decodes would have taken anyway."""
    beside = [TimedRequest(0.0, 1, 400)] + [TimedRequest(1.0 + i, 100, 1) for i in range(3)]
    stats = run(from_list("mixed", beside)).stats
    mixed = 3 * 100 * TIMER.token_s
    assert stats.prefill_s == pytest.approx(mixed, rel=0.02)
    alone = run(from_list("prompts", [TimedRequest(float(i), 100, 1) for i in range(3)])).stats
    assert alone.decode_s == 0.0
    assert alone.prefill_s == pytest.approx(3 * (0.01 + 100 * TIMER.token_s))
