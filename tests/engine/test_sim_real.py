"""Workloads on the real engine and on what was measured of it: the same tokens, the same schedule, the same times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.policies.__main__ import cases
from benchmarks.policies.case import Case
from benchmarks.policies.compare import engine_settings, highest_rate, measured, same_tokens, simulated
from benchmarks.policies.loads import MAX_PROMPT, drawn, squeezed

from penstock import LLM, SamplingParams
from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError, EngineError
from penstock.config import from_kwargs
from penstock.core.step_shape import StepShape
from penstock.executor.sim import SimExecutor
from penstock.measure.stolen import StolenTime
from penstock.plan.calibrated import Calibration, load
from penstock.plan.measured import MeasuredTimer, StepLaw
from penstock.sim.build import build_sim
from penstock.sim.calibrate import collect, draw_round
from penstock.sim.calibrated import calibration_of, config_for, plan_for, run_calibrated
from penstock.sim.driver import Sample, simulate
from penstock.sim.fidelity import compare_runs, distance, fidelity
from penstock.sim.metrics import Distribution, distributions
from penstock.sim.real import limits_of, real_engine, run_on, run_real
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import TimedRequest, from_list, prompt_ids
from tests.command import penstock

SETTINGS = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 26, "max_model_len": 512}
CONFIG = from_kwargs({}, model="nano", **SETTINGS)
LOAD = synthetic("synthetic:poisson?rate=40&requests=16&prompt=60&output=8&prompt_cv=1&output_cv=0.5", seed=3)


@pytest.fixture(scope="module")
def steps() -> Calibration:
    with real_engine(CONFIG) as engine:
        limits = engine.core.scheduler.max_num_seqs, engine.core.scheduler.max_num_batched_tokens
        fitted, held = collect(engine, seconds=0.0, longest=96)
        assert limits == (engine.core.scheduler.max_num_seqs, engine.core.scheduler.max_num_batched_tokens)
        assert not engine.core.has_work
        return calibration_of(engine, CONFIG, fitted, held)


class Recorded:
    """Each step takes what the real one of the same number took."""

    name = "recorded"

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.differing = self.number = 0

    def step_s(self, shape: StepShape) -> float:
        real, seconds = self.samples[min(self.number, len(self.samples) - 1)]
        self.differing += real != shape
        self.number += 1
        return seconds

    def copy_s(self, num_bytes: int) -> float:
        return 0.0


LAZY = MeasuredTimer(
    StepLaw(base_s=1e-3, token_s=0, row_s=0, context_s=0, pair_s=0, logit_s=0, copy_bytes_per_s=1e9, num_samples=0,
            median_error=0)
)  # fmt: skip
"""For the scheduler, which never asks it here."""


def test_with_the_real_steps_times_a_simulation_is_what_happened() -> None:
    """The same schedule and the same times: what is left of an error is in the prediction of a step alone."""
    load = LOAD.limited(12)
    samples: list[Sample] = []
    with real_engine(CONFIG) as engine:
        real = run_on(engine, load, samples=samples)
        clock, timer = VirtualClock(), Recorded(samples)
        core = build_sim(CONFIG, engine.spec, engine.plan, LAZY, clock)
        core.executor = SimExecutor(timer, clock, vocab_size=engine.spec.vocab_size)
        limits = limits_of(engine)
    assert len(samples) == real.stats.num_steps
    played = simulate(core, clock, load, limits)
    assert timer.differing == 0, "another schedule"
    ours, theirs = real.requests, played.requests
    for name in ("scheduled_s", "first_token_s", "finish_s", "num_output", "cached", "preemptions"):
        close = 0.1 if name == "scheduled_s" else 1e-6  # read when a step begins, which is late if one has slept
        assert np.allclose(getattr(ours, name), getattr(theirs, name), rtol=0, atol=close), name
    assert np.allclose(np.repeat(real.gaps_s, real.gap_counts), np.repeat(played.gaps_s, played.gap_counts), atol=1e-6)


def test_tokens_are_those_of_LLM_and_the_same_under_every_policy() -> None:
    runs = {p: run_real("nano", {**SETTINGS, "scheduling_policy": p}, LOAD) for p in ("fcfs", "splitfuse")}
    same_tokens(runs, "fcfs")
    result = runs["fcfs"]
    requests = list(LOAD)
    assert [len(t) for t in result.tokens] == [r.num_output for r in requests] == result.requests.num_output.tolist()
    llm = LLM("nano", **SETTINGS)
    k = max(range(16), key=lambda k: requests[k].num_prompt)
    ids = prompt_ids(requests[k], k, llm.engine.spec.vocab_size, LOAD.block_tokens).tolist()
    params = SamplingParams(temperature=0, max_tokens=requests[k].num_output, ignore_eos=True)
    assert tuple(llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids) == result.tokens[k]
    broken = {"fcfs": result, "other": run_real("nano", SETTINGS, LOAD.resized(0.5))}
    with pytest.raises(EngineError, match="request 0 has other tokens under other than under fcfs"):
        same_tokens(broken, "fcfs")


def test_arrivals_are_waited_for_and_the_warm_up_is_not_counted() -> None:
    load = from_list("two", [TimedRequest(0.0, 8, 2), TimedRequest(0.4, 8, 2)])
    result = run_real("nano", SETTINGS, load)
    r = result.requests
    assert (r.first_token_s >= r.arrival_s).all()
    assert r.first_token_s[1] >= 0.4
    assert (result.stats.num_steps, result.stats.num_sampled_tokens, result.stats.num_finished) == (4, 4, 2)
    assert result.hits["queried"] == 16
    assert result.span_s >= 0.4


def test_steps_are_drawn_of_all_sizes_and_within_the_limits() -> None:
    rng = np.random.default_rng(0)
    rounds = [draw_round(rng, max_num_seqs=16, max_tokens=512, longest=1024, pool=4096) for _ in range(200)]
    assert {r.num_seqs for r in rounds} >= {1, 2, 4, 8, 16}
    assert min(r.budget for r in rounds) < 32
    assert max(r.budget for r in rounds) > 400
    assert all(q.num_prompt + q.num_output <= 1024 for r in rounds for q in r.requests)
    assert all(r.num_tokens <= 4096 + 24 * 17 for r in rounds)
    assert max(q.num_prompt for r in rounds for q in r.requests) > 900


def test_what_was_measured_is_the_engine_that_is_simulated(steps: Calibration) -> None:
    assert (steps.model, steps.settings["max_num_seqs"], steps.settings["ops"]) == ("nano", 4, "native")
    assert steps.num_samples > 64
    with real_engine(CONFIG) as engine:
        plan = plan_for(steps, config_for(steps, {}))
        for name in ("groups", "num_slabs", "max_num_seqs", "max_num_batched_tokens", "kv_capacity_tokens", "dtype"):
            assert getattr(plan, name) == getattr(engine.plan, name), name
    result = run_calibrated(steps, {"scheduling_policy": "splitfuse"}, LOAD)
    assert result.requests.num_output.tolist() == [r.num_output for r in LOAD]
    assert config_for(steps, {"max_num_seqs": 2}).scheduler.max_num_seqs == 2
    for name, value in (("dtype", "bfloat16"), ("kv_cache_dtype", "bfloat16"), ("threads", 1)):
        with pytest.raises(ConfigError, match=f"{name}: these step times were measured with"):
            config_for(steps, {name: value})


def test_both_are_compared_figure_by_figure(steps: Calibration) -> None:
    found = fidelity(CONFIG, SETTINGS, ["fcfs", "priority"], LOAD.limited(6), steps=steps)
    assert [r.label for r in found.runs] == [
        f"{p}, {k}" for p in ("fcfs", "priority") for k in ("measured", "simulated")
    ]
    assert {line.figure for line in found.lines} == {
        "TTFT p50, s", "TTFT p99, s", "TPOT p50, s", "TPOT p99, s", "output tokens/s",
    }  # fmt: skip
    assert found.worst == max(abs(line.ratio - 1) for line in found.lines)
    same = compare_runs("fcfs", [found.runs[0]], found.runs[0])
    assert all(line.ratio == 1 and line.low == line.high == line.measured for line in same)
    spread = compare_runs("fcfs", [found.runs[0], found.runs[1], found.runs[0]], found.runs[0])
    assert all(line.ratio == 1 and line.low <= line.measured <= line.high for line in spread)
    assert any(line.low < line.high for line in spread)
    a, b = (Distribution.of(np.array(v)) for v in ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 30.0, 40.0]))
    assert (distance(a, a), distance(a, b)) == (0.0, 0.5)


def test_the_commands(tmp_path: Path) -> None:
    file, page, numbers = tmp_path / "steps.json", tmp_path / "c.html", tmp_path / "c.json"
    flags = ["--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory-bytes", "64MiB"]
    done = penstock("sim", "calibrate", "nano", *flags, "--minutes", "0.001", "--longest", "64", "--out", str(file))
    assert done.returncode == 0, done.stderr
    assert "steps of nano" in done.stdout
    assert load(file).model == "nano"
    trace = "synthetic:poisson?rate=40&requests=6&prompt=30&output=4"
    done = penstock("sim", "--trace", trace, "--device", str(file), "--scheduling-policy", "fcfs,splitfuse")
    assert done.returncode == 0, done.stderr
    assert "splitfuse" in done.stdout
    done = penstock(
        "sim", "compare", "nano", "--steps", str(file), "--trace", trace, "--policies", "fcfs,fair", "--out", str(page),
        "--json", str(numbers),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TTFT p99" in done.stdout
    assert len(json.loads(numbers.read_text())["lines"]) == 10
    assert "fair, simulated" in page.read_text()
    for args, said in (
        (("--trace", trace, "--device", str(file), "--spec", "llama-3.1-8b"), "has another shape"),
        (("--trace", trace, "--device", str(file), "--dtype", "bfloat16"), "changes what a step costs"),
        (("--device", str(file)), "--trace names the requests"),
        (("--trace", trace), "--device names what is simulated"),
        (("compare", "nano", "--trace", "some.csv"), "say --limit N or --duration S"),
        (("compare", "nano", "--trace", trace, "--policies", "fcfs,none"), "none"),
        (("calibrate", "nano", "--out", str(tmp_path / "no" / "x.json")), "there is no such folder"),
    ):
        done = penstock("sim", *args)
        assert done.returncode == 1, args
        assert said in done.stderr


def test_the_harness_of_policies(steps: Calibration) -> None:
    case = Case(
        name="case", title="", goal="", share=0.5, requests=8, loads={"one": drawn(prompt=40, output=6)},
        variants={"fcfs": {}, "splitfuse": {"scheduling_policy": "splitfuse"}},
        figures=lambda r: {"JCT, s": distributions(r)["jct"].mean, "tokens": float(r.requests.num_output.sum())},
    )  # fmt: skip
    rate = 0.5 * highest_rate(case, case.loads["one"], steps, 0, 8)
    assert rate > 0
    virtual = simulated(case, "one", steps, rate=rate, seeds=(0, 1), n=8)
    real = measured(case, "one", "nano", steps, rate=rate, seeds=(0,), n=8, say=lambda line: None)
    for found in (virtual, real):
        assert set(found.figures) == {"fcfs", "splitfuse"}
        assert found.figures["fcfs"]["tokens"] == found.figures["splitfuse"]["tokens"]
        ratio = found.ratio("splitfuse", "tokens", "fcfs")
        assert ratio is not None
        assert ratio[0] == pytest.approx(1)
    assert virtual.figures["fcfs"]["tokens"][:1] == real.figures["fcfs"]["tokens"], "the same loads"
    assert engine_settings(steps, case, {"max_num_seqs": 2})["max_num_seqs"] == 2
    assert "splitfuse" in cases()


def test_loads_fit_a_small_machine() -> None:
    load = drawn(prompt=900, prompt_cv=2.0, output=200, output_cv=2.0)(5.0, 1, 50)
    assert max(r.num_prompt for r in load) == MAX_PROMPT
    assert [r.arrival_s for r in load] == [r.arrival_s for r in drawn(prompt=9)(5.0, 1, 50)], "lengths move no arrival"
    even = squeezed(from_list("x", [TimedRequest(t, 8, 4) for t in (10.0, 11.0, 14.0)]), 0.5)
    assert [r.arrival_s for r in even] == [0.0, 1.0, 4.0]


def test_runs_that_were_disturbed_are_repeated(steps: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes half of the time from every second run."""
    from penstock.sim import fidelity as module

    shares = iter([0.5, 0.0, 0.5, 0.5, 0.01])
    monkeypatch.setattr(module.StolenTime, "share", lambda self: next(shares))
    found = fidelity(CONFIG, SETTINGS, ["fcfs"], LOAD.limited(3), steps=steps, rounds=2, most_stolen=0.02)
    assert (found.stolen, found.repeated) == ((0.0, 0.01), 3)


def test_what_a_host_took_away_is_read_from_the_system(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3 4 5 6 7 100 0 0\ncpu0 1\n")
    watch = StolenTime(stat)
    stat.write_text("cpu  1 2 3 4 5 6 7 1000000 0 0\ncpu0 1\n")
    assert watch.share() == 1.0
    assert StolenTime(tmp_path / "none").share() == 0.0
