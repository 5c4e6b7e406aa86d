"""J29, Andes: quality of experience in an overload, and what it may cost. Virtual time; lengths are drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.qoe import Expected
from penstock.core.sequence import Sequence, Status
from penstock.core.step_shape import StepShape
from penstock.plan.simulated import sim_plan
from penstock.sched.policy import make_policy
from penstock.sched.policy.andes import Andes
from penstock.sim.build import build_sim
from penstock.sim.driver import SimLimits, simulate
from penstock.sim.metrics import metrics
from penstock.sim.result import SimResult
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import TimedRequest, Workload, from_list
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, request
from tests.engine.naive import fake_logits, generate

SPEC = find_spec("llama-3.2-1b")


class SmallMachine:
    """Two cores: a step takes 25 ms and 3 ms per token, so 12 streams are each three times as fast as they are read."""

    name = "small"

    def step_s(self, shape: StepShape) -> float:
        return 0.025 + 0.003 * shape.num_tokens

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / 5e9


def play(policy: str, workload: Workload, *, digests: bool = False, **settings: Any) -> SimResult:
    given = {
        "max_num_seqs": 12, "max_num_batched_tokens": 256, "max_model_len": 2048, "block_size": 16,
        "scheduling_policy": policy, "model": "m",
    }  # fmt: skip
    config, plan = sim_plan(from_kwargs(**(given | settings)), SPEC, 64 << 30)
    clock = VirtualClock()
    core = build_sim(config, SPEC, plan, SmallMachine(), clock)
    limits = SimLimits(plan.max_model_len, plan.kv_capacity_tokens, SPEC.vocab_size, truncate=True)
    return simulate(core, clock, workload, limits, digests=digests)


def heavy_tail(rate: float, seed: int, n: int = 120) -> Workload:
    lengths = "prompt=128&output=96&prompt_cv=0.8&output_cv=1.2"
    return synthetic(f"synthetic:poisson?rate={rate}&requests={n}&{lengths}", seed)


def tokens_per_s(result: SimResult) -> float:
    return float(result.requests.num_output.sum()) / result.span_s


@pytest.mark.parametrize("swap_space", [2.0, 0.0], ids=["swap", "recompute"])
@pytest.mark.parametrize("seed", [1, 2])
def test_J29_K07_mean_quality_beats_fcfs_in_an_overload_at_the_same_throughput(seed: int, swap_space: float) -> None:
    load = heavy_tail(1.4, seed)  # 1.0 request/s is what the machine can do
    runs = {name: play(name, load, swap_space=swap_space) for name in ("fcfs", "andes")}
    told = {name: (r.requests.quality.mean(), metrics(r)["qoe"]["p10"], tokens_per_s(r)) for name, r in runs.items()}
    print(told, runs["andes"].stats.num_preemptions)
    assert told["andes"][0] > 1.2 * told["fcfs"][0]
    assert told["andes"][1] > told["fcfs"][1]
    assert told["andes"][2] == pytest.approx(told["fcfs"][2], rel=0.05)
    assert metrics(runs["andes"])["qoe"]["mean"] == pytest.approx(told["andes"][0])
    assert runs["andes"].stats.num_preemptions > 0, "nobody gave up a place"


def test_J29_memory_as_well_as_places_is_what_they_share() -> None:
    load = heavy_tail(1.3, 3)
    scarce = {"kv_cache_memory_bytes": 3000 * 32768, "max_num_seqs": 48, "swap_space": 2.0}
    fcfs, andes = play("fcfs", load, **scarce), play("andes", load, **scarce)
    assert andes.requests.quality.mean() > 1.15 * fcfs.requests.quality.mean()
    assert tokens_per_s(andes) == pytest.approx(tokens_per_s(fcfs), rel=0.05)


def test_J29_as_long_as_everybody_fits_it_is_fcfs() -> None:
    load = heavy_tail(0.3, 5, 40)
    runs = [play(name, load, digests=True) for name in ("fcfs", "andes")]
    assert runs[0].digest == runs[1].digest
    assert runs[1].stats.num_preemptions == 0


@pytest.mark.parametrize(("knobs", "most"), [("preemptions=0.2,overhead=1", 0.2), ("preemptions=0", 0.0)])
def test_J29_the_cap_on_preemptions_holds(knobs: str, most: float) -> None:
    result = play(f"andes:{knobs}", heavy_tail(1.6, 1), swap_space=2.0)
    assert result.stats.num_preemptions <= most * len(result.requests) + 1
    if most:
        assert result.stats.num_preemptions > 0.8 * most * len(result.requests)


def test_J29_what_is_computed_again_is_a_small_part() -> None:
    def again(overhead: float) -> float:
        knobs = f"andes:preemptions=9,overhead={overhead}"
        result = play(knobs, heavy_tail(1.6, 1, 80), enable_prefix_caching=False)
        total = int(result.requests.num_prompt.sum() + result.requests.num_output.sum())
        return result.stats.num_recomputed_tokens / total

    few, many = again(0.03), again(5.0)
    assert 0 < few < 0.06, "the last ones to go may be above the bound"
    assert many > 5 * few


# -- nobody starves --------------------------------------------------------------------------------------------------


def stream_of_newcomers(seconds: float, n: int) -> Workload:
    """A long prompt that gains little per token, and after it newcomers who gain more, twice what can be served."""
    old = TimedRequest(0.5, 900, 40)
    short = [TimedRequest(0.02 * i, 30, 60) for i in range(8)] + [
        TimedRequest(1.0 + seconds * i / n, 30, 60) for i in range(n)
    ]
    return from_list("newcomers", sorted([old, *short], key=lambda r: r.arrival_s))


def test_J29_nobody_starves_behind_a_stream_of_newcomers() -> None:
    load = stream_of_newcomers(45.0, 100)
    (row,) = [i for i, r in enumerate(load) if r.num_prompt == 900]

    def first_s(max_wait_s: float) -> float:
        result = play(f"andes:max_wait_s={max_wait_s}", load, swap_space=2.0, max_num_seqs=4)
        assert not np.isnan(result.requests.finish_s).any()
        return float(result.requests.first_token_s[row] - 0.5)

    assert first_s(12.0) < 12.0 + 6.0
    assert first_s(1e6) > 40.0, "the bound is what helps it"


def test_J29_those_overdue_are_served_one_after_the_other_and_keep_their_places() -> None:
    """Four are due at once, in an overload that goes on: each begins within the bound and the runs before its own."""
    old = [TimedRequest(0.5 + 0.01 * i, 700, 30) for i in range(4)]
    short = [TimedRequest(0.02 * i, 30, 60) for i in range(8)] + [TimedRequest(1.0 + i / 2, 30, 60) for i in range(90)]
    load = from_list("many", sorted([*old, *short], key=lambda r: r.arrival_s))
    result = play("andes:max_wait_s=10,preemptions=9", load, swap_space=2.0, max_num_seqs=4)
    r = result.requests
    rows = np.flatnonzero(r.num_prompt == 700)
    begins = np.sort(r.first_token_s[rows])
    assert begins[-1] < 0.5 + 10 + 4 * 8.0, "each takes at most 8 s"
    assert (r.finish_s[rows] - r.first_token_s[rows]).max() < 8.0, "nobody takes the place of one who was overdue"


# -- who gives a place up --------------------------------------------------------------------------------------------


def sequence(number: int, num_prompt: int, arrival_s: float, status: Status, **more: Any) -> Sequence:
    seq = Sequence(number, request([3] * num_prompt, max_tokens=400, arrival_s=arrival_s, **more), arrival=number)
    seq.status = status
    if status is Status.RUNNING:
        seq.tables, seq.num_computed = [object()], num_prompt
    return seq


def generated(seq: Sequence, num: int) -> None:
    seq.token_ids.extend([5] * num)
    seq.num_computed += num


def after_ten_seconds(policy: Andes, running: list[Sequence], tokens: list[int]) -> None:
    """They have had their places for 10 s and generated so many tokens, evenly."""
    for second in range(11):
        policy.begin_step(float(second), None)
        policy.not_before_s(running, [])
        for seq, num in zip(running, tokens, strict=True):
            generated(seq, num // 10 if second < 10 else 0)


def test_J29_the_reader_with_most_left_to_read_gives_way() -> None:
    policy = Andes(horizon_s=10.0, preemptions=9)
    running = [sequence(i, 50, 0.0, Status.RUNNING) for i in range(3)]
    after_ten_seconds(policy, running, [50, 200, 50])
    newcomer = sequence(9, 50, 9.5, Status.WAITING)
    assert policy.displaced(running, newcomer) is running[1]
    assert policy.gain(running[1]) < policy.gain(running[0])
    assert policy.order(running, [newcomer])[:3] == running, "decodes first, all of them"


def test_J29_who_is_shown_more_than_expected_gains_nothing() -> None:
    policy = Andes(horizon_s=10.0)
    patient = sequence(0, 50, 0.0, Status.RUNNING, expected_ttft_s=15.0)
    usual = sequence(1, 50, 0.0, Status.RUNNING)
    after_ten_seconds(policy, [patient, usual], [50, 50])
    assert policy.gain(patient) == 0.0
    assert policy.gain(usual) > 0.001


def test_J29_nobody_gives_way_before_a_token_or_for_one_who_gains_as_much() -> None:
    policy = Andes(horizon_s=10.0, preemptions=9)
    running = [sequence(i, 50, 9.0, Status.RUNNING) for i in range(3)]
    policy.begin_step(10.0, None)
    policy.not_before_s(running, [])
    newcomer = sequence(9, 20, 9.0, Status.WAITING)
    assert policy.gain(newcomer) > 2 * policy.gain(running[0])
    assert policy.displaced(running, newcomer) is None, "they have just come"
    generated(running[1], 1)
    policy.begin_step(10.1, None)
    policy.not_before_s(running, [])
    assert policy.displaced(running, newcomer) is running[1]
    assert policy.displaced(running, sequence(8, 50, 9.0, Status.WAITING)) is None, "it would only change places"


def test_J29_what_a_request_expects_decides_who_goes_first() -> None:
    policy = Andes()
    policy.begin_step(3.0, None)
    patient = sequence(0, 40, 2.5, Status.WAITING, expected_ttft_s=600.0)
    hasty = sequence(1, 40, 2.5, Status.WAITING, expected_ttft_s=0.2)
    assert policy.order([], [patient, hasty]) == [hasty, patient]
    assert policy.gain(patient) == 0.0, "within the horizon it expects nothing"


def test_a_long_queue_is_looked_at_from_both_ends() -> None:
    policy = Andes(window=8)
    policy.begin_step(100.0, None)
    queue = [sequence(i, 40, 0.1 * i, Status.WAITING) for i in range(900)]
    order = policy.order([], queue)
    assert [s.seq_id for s in order] == [899, 898, 897, 896, 3, 2, 1, 0], "fresh ones gain most"


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ("horizon_s=0", "horizon_s"), ("max_wait_s=-1", "horizon_s"), ("margin=0.5", "margin"), ("window=1", "window"),
        ("preemptions=-1", "preemptions"), ("overhead=nan", "preemptions"), ("tds=0", "tds"), ("ttft_s=-2", "ttft"),
    ],
)  # fmt: skip
def test_knobs_that_make_no_sense_are_refused(knobs: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make_policy(f"andes:{knobs}")


# -- tokens are those of the naive loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_J29_tokens_do_not_depend_on_whose_place_was_taken(depth: int) -> None:
    rng = random.Random(depth)
    knobs = Knobs(
        policy="andes:horizon_s=5,preemptions=9,overhead=9,max_wait_s=20,margin=1", num_blocks=24, budget=12,
        max_num_seqs=4, host_blocks=20, preemption="auto", depth=depth,
    )  # fmt: skip
    core, _ = fake_engine(knobs)
    clock = core.clock = VirtualClock()
    collector, load = Collector(), []
    for _ in range(180):
        if len(load) < 30 and rng.random() < 0.5:
            ids = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 24))]
            load.append(request(ids, max_tokens=rng.randrange(4, 20), arrival_s=clock.now()))
            core.add(load[-1])
        if core.has_work:
            collector.take(core.step())
        clock.advance_to(clock.now() + 0.1)
    drain(core, collector, limit=5000)
    assert_idle(core)
    assert core.stats.num_preemptions > 5
    for one in load:
        got = collector.requests[one.request_id]
        assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, one)


def test_a_workload_may_have_readers_of_its_own() -> None:
    load = heavy_tail(0.5, 1, 10)
    strict = load.read_by(Expected(0.0, 1000.0))
    assert play("fcfs", strict).requests.quality.max() < 0.6
    assert play("fcfs", load).requests.quality.min() > 0.9
