"""FastServe (row A12): short requests do not wait behind long ones, long ones do not starve, nobody's tokens change.

Virtual time: the real scheduler and KV manager, on a simulated device whose steps take 20 ms plus 0.5 ms per token, and
whose copies between device and host run at 10 GB/s. The memory holds one or two of the longest requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput
from penstock.core.page_ops import LoadOp, StoreOp
from penstock.core.request import Abort, Control, Request
from penstock.core.sequence import Sequence, Status
from penstock.executor.sim import SimExecutor
from penstock.kv.manager import KVManager
from penstock.sched.policy import make_policy
from penstock.sched.policy.fastserve import LOOKS, FastServe
from tests.engine.fake_model import VOCAB, spec
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, plain_core, request
from tests.engine.naive import fake_logits, generate
from tests.engine.policy_sim import LinearTimer, ask, poisson
from tests.unit.kv.test_kv_model import make_groups

TIMER = LinearTimer(base_s=0.02, token_s=0.0005)
KNOBS = Knobs(
    block_size=16, num_blocks=20, budget=128, max_num_seqs=32, host_blocks=400, preemption="swap", prefix_cache="none",
    conservativeness=1.0,
)  # fmt: skip


@dataclass
class Served:
    """Times of each request's tokens, in seconds since the start; `stored`: pages copied out by each step."""

    times_s: dict[str, list[float]] = field(default_factory=dict)
    ends_s: dict[str, float] = field(default_factory=dict)
    most_below: int = 0
    """Jobs below the first level, at most."""
    longest_step_s: float = 0.0
    num_swaps: int = 0
    num_tokens: int = 0

    def jct_s(self, load: Seq[Request]) -> list[float]:
        return [self.ends_s[r.request_id] - r.arrival_s for r in load]

    def longest_wait_s(self, r: Request) -> float:
        """Between its arrival, its tokens, and its end."""
        times = [r.arrival_s, *self.times_s[r.request_id]]
        return max(b - a for a, b in pairwise(times))


def serve(policy: str, load: Seq[Request], knobs: Knobs = KNOBS, *, cut_at: str = "") -> Served:
    """`load` to its end, or to that of the request called `cut_at`."""
    clock, served = VirtualClock(), Served()
    executor = SimExecutor(TIMER, clock, vocab_size=VOCAB, page_bytes=[16 * 24_576])
    core = plain_core(spec(slots=False), replace(knobs, policy=policy), executor, clock, TIMER)
    arrived = 0
    while arrived < len(load) or core.has_work:
        while arrived < len(load) and load[arrived].arrival_s <= clock.now():
            core.add(load[arrived])
            arrived += 1
        if not core.has_work:
            clock.advance_to(load[arrived].arrival_s)
            continue
        began = clock.now()
        for out in core.step():
            served.times_s.setdefault(out.request_id, []).extend([clock.now()] * len(out.token_ids))
            if out.finish_reason is not None:
                served.ends_s[out.request_id] = clock.now()
        served.longest_step_s = max(served.longest_step_s, clock.now() - began)
        if isinstance(core.scheduler.policy, FastServe):
            alive = {s.arrival for s in [*core.scheduler.waiting, *core.scheduler.running]}
            jobs = core.scheduler.policy._jobs
            served.most_below = max(served.most_below, sum(jobs[a].level > 0 for a in alive if a in jobs))
        if cut_at in served.ends_s:
            break
    served.num_swaps, served.num_tokens = core.stats.num_swaps, core.stats.num_scheduled_tokens
    return served


# -- what it is for --------------------------------------------------------------------------------------------------


def heavy_tail(seed: int, n: int, *, mean: float = 16, cv: float = 3.0, longest: int = 256) -> list[Request]:
    """Log-normal lengths: half of the outputs have 5 tokens or less, and 5 % of them half of all tokens."""
    rng = random.Random(seed)
    sigma = math.sqrt(math.log1p(cv * cv))
    load = []
    for _ in range(n):
        num_out = round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))
        load.append(ask(rng, 0.0, round(rng.uniform(8, 40)), min(longest, max(1, num_out))))
    return load


def at_ninety_percent(load: list[Request], seed: int, knobs: Knobs = KNOBS) -> list[Request]:
    """The same requests as a Poisson stream, at 0.9 of the rate at which `fcfs` gets through them when all wait."""
    rate_hz = 0.9 * len(load) / max(serve("fcfs", load, knobs).ends_s.values())
    rng, now_s, timed = random.Random(seed), 0.0, []
    for r in load:
        now_s += rng.expovariate(rate_hz)
        timed.append(r.__class__(**{**{f: getattr(r, f) for f in r.__struct_fields__}, "arrival_s": now_s}))
    return timed


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_A12_mean_completion_is_at_most_seven_tenths_of_fcfs(seed: int) -> None:
    load = at_ninety_percent(heavy_tail(seed, 200), seed)
    first, multi = serve("fcfs", load), serve("fastserve", load)
    mean_s = fmean(first.jct_s(load)), fmean(multi.jct_s(load))
    spans = max(first.ends_s.values()), max(multi.ends_s.values())
    print(seed, [round(m, 3) for m in mean_s], round(mean_s[1] / mean_s[0], 3), [round(s, 1) for s in spans])
    assert mean_s[1] <= 0.7 * mean_s[0]
    assert spans[1] < 1.1 * spans[0], "the same throughput"
    assert multi.num_swaps > 10


# -- nobody starves --------------------------------------------------------------------------------------------------


def bound_s(served: Served, starvation_s: float, *, places: int, steps: int) -> float:
    """Of a wait: until it goes up, and until those who run, and those who went up before it, have had their quantum,
    `steps` steps each, `places` at a time. However many newcomers wait."""
    return starvation_s * (1 + 1 / LOOKS) + (served.most_below / places + 2) * steps * served.longest_step_s


@pytest.mark.parametrize("knobs", ["", ",batch=3"])
def test_A12_a_long_job_is_served_again_and_again_under_an_endless_stream_of_short_ones(knobs: str) -> None:
    """Short jobs alone are more than the engine can do: without going up, a long one gets nothing once it went down."""
    rng = random.Random(4)
    short = [ask(rng, t, 30, 4) for t in poisson(rng, 32, 14)]
    lone = ask(rng, 0.5, 30, 30)
    load = sorted([*short, lone], key=lambda r: r.arrival_s)
    machine = replace(KNOBS, max_num_seqs=4)
    places = 3 if knobs else 4
    waits, bounds = {}, {}
    for starvation_s in (1.0, 2.0, 1000.0):
        name = f"fastserve:quantum_s=0.1,starvation_s={starvation_s}{knobs}"
        served = serve(name, load, machine, cut_at=lone.request_id)
        waits[starvation_s] = served.longest_wait_s(lone)
        # A quantum of 0.1 s is 5 tokens, or a prompt of 30 and 4 tokens; and one step to find out.
        bounds[starvation_s] = bound_s(served, starvation_s, places=places, steps=7)
        print(starvation_s, round(waits[starvation_s], 2), round(bounds[starvation_s], 2), served.most_below)
    for starvation_s in (1.0, 2.0):
        assert starvation_s * 0.9 < waits[starvation_s] <= bounds[starvation_s]
    assert waits[1000.0] > bounds[2.0], "there is no stream to starve from"


def test_A12_a_job_is_raised_even_if_the_others_come_back_as_soon_as_they_are_served() -> None:
    """Four clients send a short request, and the next one when they have its answer: the first level is never empty."""
    rng, clock = random.Random(5), VirtualClock()
    executor = SimExecutor(TIMER, clock, vocab_size=VOCAB, page_bytes=[16 * 24_576])
    knobs = replace(KNOBS, policy="fastserve:quantum_s=0.1,starvation_s=1.5", max_num_seqs=2)
    core = plain_core(spec(slots=False), knobs, executor, clock, TIMER)
    lone = ask(rng, 0.0, 30, 40)
    core.add(lone)
    mine = {lone.request_id: -1}
    for client in range(4):
        core.add(r := ask(rng, 0.0, 20, 3))
        mine[r.request_id] = client
    last_s, waits, done = 0.0, [], False
    while not done:
        for out in core.step():
            if mine[out.request_id] == -1 and out.token_ids:
                waits.append(clock.now() - last_s)
                last_s = clock.now()
            if out.finish_reason is not None:
                done = mine[out.request_id] == -1
                core.add(r := ask(rng, clock.now(), 20, 3))
                mine[r.request_id] = mine[out.request_id]
        assert clock.now() < 100, "it starves"
    most = 1.5 * (1 + 1 / LOOKS) + (1 / 2 + 2) * 7 * 0.05
    print(round(max(waits), 2), "of at most", round(most, 2), "clients served", len(mine))
    assert 1.4 < max(waits) <= most
    assert len(mine) > 100


# -- levels ----------------------------------------------------------------------------------------------------------


def queued(number: int, num_prompt: int, *, n: int = 1) -> Sequence:
    return Sequence(number, request([3 + number % 20] * num_prompt, max_tokens=500, n=n), arrival=number)


def runs(seq: Sequence, num_generated: int) -> Sequence:
    """As after a prefill and so many tokens."""
    seq.status, seq.tables = Status.RUNNING, [object()]
    seq.token_ids.extend([5] * (num_generated - seq.num_generated))
    seq.num_computed = len(seq.token_ids) - 1
    return seq


def stepped(policy: FastServe, running: list[Sequence], waiting: list[Sequence], now_s: float = 0.0) -> list[int]:
    """A step's order, by sequence."""
    policy.begin_step(now_s, None)
    policy.not_before_s(running, waiting)
    return [s.seq_id for s in policy.order(running, waiting)]


def test_A12_a_job_joins_the_first_level_whose_quantum_covers_its_prompt() -> None:
    """Quanta 0.1, 0.2, 0.4, ... s at 1 ms per token of a prompt."""
    policy = FastServe(quantum_s=0.1)
    lengths = [1, 100, 101, 200, 201, 1000]
    waiting = [queued(i, n) for i, n in enumerate(lengths)]
    order = stepped(policy, [], waiting[::-1])
    assert [policy.level(s) for s in waiting] == [0, 0, 1, 1, 2, 4]
    assert order == [1, 0, 3, 2, 4, 5], "within a level, who came first into it"


def test_A12_what_the_prefix_cache_has_of_a_prompt_takes_no_time() -> None:
    core, _ = fake_engine(Knobs(policy="fastserve:quantum_s=0.1,prompt_s=0.02", block_size=4, num_blocks=64, budget=64))
    stem = [3 + i % 7 for i in range(24)]
    policy: Any = core.scheduler.policy
    levels = []
    for _ in range(2):
        core.add(request([*stem, 9, 9], max_tokens=2, eos=()))
        core.step()
        (seq,) = core.scheduler.running
        levels.append(policy.level(seq))
        drain(core, Collector())
    assert levels == [3, 0], "26 tokens in 0.52 s; 2 of them in 0.04 s"


def test_A12_a_job_goes_down_when_its_quantum_is_used_and_comes_last_there() -> None:
    policy = FastServe(quantum_s=0.1)
    job, below = runs(queued(0, 50), 1), queued(1, 150)
    assert stepped(policy, [job], [below]) == [0, 1]
    assert (policy.level(job), policy.level(below)) == (0, 1)
    stepped(policy, [runs(job, 2)], [below])
    assert policy.level(job) == 0, "0.05 s of prompt and 0.04 s: not yet"
    assert policy.outranks(job, below)
    stepped(policy, [runs(job, 3)], [below])
    assert policy.level(job) == policy.level(below) == 1, "0.11 s"
    assert policy.outranks(below, job), "it was in that level already"
    stepped(policy, [runs(job, 12)], [below])
    assert policy.level(job) == 1, "0.18 s more"
    stepped(policy, [runs(job, 13)], [below])
    assert policy.level(job) == 2


def test_A12_what_is_computed_again_after_a_preemption_costs_nothing() -> None:
    policy = FastServe(quantum_s=0.1)
    job = runs(queued(0, 90), 1)
    stepped(policy, [job], [])
    assert policy.level(job) == 1
    served = policy._job(job).served
    job.num_computed = 0
    stepped(policy, [job], [])
    job.num_computed = 60
    stepped(policy, [job], [])
    assert policy._job(job).served == served


def test_A12_who_starves_goes_up_with_time_for_its_prompt_and_the_longest_wait_first() -> None:
    policy = FastServe(quantum_s=0.1, starvation_s=16.0)
    old, older = queued(0, 1000), queued(1, 150)
    policy.begin_step(0.0, None)
    policy.not_before_s([], [older])
    stepped(policy, [], [old, older], now_s=1.0)
    stepped(policy, [], [old, older], now_s=15.9)
    assert (policy.level(old), policy.level(older)) == (4, 1)
    late = queued(2, 10)
    assert stepped(policy, [], [old, older, late], now_s=17.0) == [1, 0, 2], "at the head"
    assert (policy.level(old), policy.level(older)) == (0, 0)
    old.num_computed, old.status, old.tables = 999, Status.RUNNING, [object()]
    stepped(policy, [old], [older, late], now_s=18.0)
    assert policy.level(old) == 0, "a prompt that is begun there ends there"
    stepped(policy, [runs(old, 1)], [older, late], now_s=19.0)
    assert policy.level(old) == 1


def test_jobs_that_ended_are_forgotten() -> None:
    policy = FastServe(quantum_s=0.1, starvation_s=16.0)
    for i in range(200):
        stepped(policy, [], [queued(i, 10)], now_s=0.5 * i)
    assert len(policy._jobs) < 8


def test_A12_who_is_lower_yields_and_within_a_level_nobody() -> None:
    policy = FastServe(quantum_s=0.1)
    high, low, other = runs(queued(0, 20), 1), runs(queued(1, 150), 1), queued(2, 20)
    stepped(policy, [high, low], [other])
    assert policy.displaced([high, low], other) is low
    assert policy.displaced([high], other) is None
    low.num_inflight = 1
    assert policy.displaced([high, low], other) is None, "a step works on it"
    low.num_inflight, low.status = 0, Status.LOADING
    assert policy.displaced([high, low], other) is None, "what it waits for would be lost"


@pytest.mark.parametrize(
    ("knobs", "needle"),
    [("quantum_s=0", "above 0"), ("ratio=1", "above 1"), ("starvation_s=inf", "above 0"), ("batch=-1", "batch"),
     ("spare=0.95", "0.9"), ("prompt_s=-1", "above 0")],
)  # fmt: skip
def test_knobs_that_make_no_sense_are_refused(knobs: str, needle: str) -> None:
    with pytest.raises(ConfigError, match=needle):
        make_policy(f"fastserve:{knobs}")


# -- pausing, and swapping ahead ---------------------------------------------------------------------------------------


def watched(core: Any) -> list[SchedulerOutput]:
    """Steps, as they are submitted."""
    seen: list[SchedulerOutput] = []
    submit = core.executor.submit

    def watch(output: SchedulerOutput) -> None:
        seen.append(output)
        submit(output)

    core.executor.submit = watch
    return seen


def test_A12_a_long_job_pauses_for_a_short_one_and_keeps_its_cache() -> None:
    knobs = replace(KNOBS, policy="fastserve:quantum_s=0.1,batch=1,token_s=0.1", num_blocks=64, max_num_seqs=4)
    core, forward = fake_engine(knobs)
    seen, collector = watched(core), Collector()
    long, short = request([4] * 20, max_tokens=30), request([5] * 20, max_tokens=1)
    core.add(long)
    for _ in range(10):
        collector.take(core.step())
    core.add(short)
    collector.take(core.step())
    assert collector.requests[short.request_id].reasons, "it did not wait"
    assert len(core.scheduler.running) == 1
    drain(core, collector)
    assert_idle(core)
    assert all(len(step.scheduled) == 1 for step in seen)
    assert (core.stats.num_preemptions, core.stats.num_swaps) == (0, 0)
    assert forward.num_tokens == 20 + 29 + 20, "nothing was computed twice"
    for r in (long, short):
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


def test_A12_who_cannot_run_leaves_its_turn_to_others() -> None:
    """A job at the head of the first level, which the memory does not hold beside its equals: no row stays empty."""
    knobs = replace(KNOBS, policy="fastserve:batch=2", num_blocks=20, conservativeness=0.0)
    core, _ = fake_engine(knobs)
    seen = watched(core)
    for i, num_prompt in enumerate((100, 100, 250)):
        core.add(request([3 + i] * num_prompt, max_tokens=6, eos=()))
    while any(not s.is_decoding for s in core.scheduler.running) or not core.scheduler.running:
        core.step()
    (large,) = core.scheduler.waiting
    policy: Any = core.scheduler.policy
    policy._enter(policy._job(large), 0, at_head=True)
    del seen[:]
    for _ in range(3):
        core.step()
    assert core.scheduler.waiting == [large]
    assert policy.order(core.scheduler.running, [large])[-1] is core.scheduler.running[-1]
    assert [len(step.scheduled) for step in seen] == [2, 2, 2]
    drain(core, Collector())
    assert_idle(core)


def crowd(policy: str) -> tuple[Any, list[SchedulerOutput]]:
    """Three long jobs in level 2 and below fill the memory, and one of them runs at a time."""
    knobs = replace(KNOBS, policy=policy, num_blocks=30, conservativeness=0.0, max_num_seqs=8)
    core, _ = fake_engine(knobs)
    seen = watched(core)
    for i in range(3):
        core.add(request([3 + i] * 130, max_tokens=60, eos=()))
        for _ in range(4):
            core.step()
    return core, seen


def test_A12_a_newcomer_finds_room_that_was_made_ahead() -> None:
    """Without `spare` somebody is copied out in the very step in which the newcomer enters; with it, before."""
    copied = {}
    for spare in (0.0, 0.2):
        core, seen = crowd(f"fastserve:quantum_s=0.1,batch=1,spare={spare}")
        before = core.stats.num_swaps
        del seen[:]
        core.add(request([20] * 70, max_tokens=1, eos=()))
        core.step()
        assert any(row.num_tokens == 70 for row in seen[0].scheduled), "it runs at once"
        copied[spare] = (before, core.stats.num_swaps - before, core.scheduler.swap_ahead.num_out)
        drain(core, Collector())
        assert_idle(core)
    assert copied[0.0] == (0, 1, 0)
    assert copied[0.2][0] == copied[0.2][2] == 1
    assert copied[0.2][1] == 0


def test_A12_whose_turn_is_furthest_off_goes_first_and_comes_back_before_it() -> None:
    core, seen = crowd("fastserve:quantum_s=0.1,batch=1,spare=0.1")
    policy: Any = core.scheduler.policy
    collector = Collector()
    while not core.scheduler.waiting:
        collector.take(core.step())
    away = [s for s in core.scheduler.waiting if s.swapped is not None]
    assert len(away) == 1
    assert all(policy.outranks(s, away[0]) for s in core.scheduler.running), "it comes last"
    for _ in range(3):
        core.step()
    assert away[0] in core.scheduler.waiting, "there is no room"
    (paused,) = [s for s in core.scheduler.running if s.seq_id not in {row.seq_id for row in seen[-1].scheduled}]
    core.add(Abort(request_id=paused.request.request_id))
    del seen[:]
    core.step()
    assert away[0] in core.scheduler.running
    assert core.scheduler.swap_ahead.num_back == 1
    assert any(isinstance(op, LoadOp) for op in seen[0].page_ops)
    assert away[0].seq_id not in {row.seq_id for row in seen[0].scheduled}, "it has its cache, and not yet its turn"
    assert not any(isinstance(op, StoreOp) for op in seen[0].page_ops)
    drain(core, collector)
    assert_idle(core)


def test_A12_estimated_next_turn() -> None:
    """Section 4.2: the quanta of everybody in the levels above, or until it would go up."""
    policy = FastServe(quantum_s=0.1, batch=2, starvation_s=10.0)
    jobs = [queued(0, 20), queued(1, 20), queued(2, 150), queued(3, 500)]
    stepped(policy, [], jobs)
    assert policy.next_run_s(jobs) == pytest.approx([0.0, 0.0, 2 * 0.1 / 2, (2 * 0.1 + 0.2) / 2])
    policy.begin_step(9.9, None)
    assert policy.next_run_s(jobs)[3] == pytest.approx(0.1)


# -- [EX] ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["full", "slots", "windows", "drafts", "fastswitch", "recompute"])
@pytest.mark.sampled
def test_A12_tokens_are_those_of_the_naive_loop(model: str, depth: int) -> None:
    """Little memory, a host that is too small for all, few rows in a step, orders to preempt, aborts, samples."""
    shape: dict[str, Any] = {"slots": {"slots": True}, "windows": {"windows": (None, 5)}}.get(model, {})
    num_out = num_back = num_preempted = 0
    for seed in range(2):
        rng = random.Random(10 * seed + depth)
        batch = rng.choice([0, 1, 2]) if seed else 1
        knobs = replace(
            KNOBS, policy=f"fastserve:batch={batch},spare=0.3,quantum_s=0.04,prompt_s=0.002,starvation_s=0.05",
            block_size=4, num_blocks=24, num_slots=6, max_num_seqs=6, budget=24, host_blocks=rng.choice([20, 60]),
            depth=depth, prefix_cache=rng.choice(["none", "radix"]), num_drafts=3 if model == "drafts" else 0,
            swap_tier="fastswitch" if model == "fastswitch" else "host", conservativeness=0.0,
            preemption="recompute" if model == "recompute" else "swap",
        )  # fmt: skip
        core, _ = fake_engine(knobs, **shape)
        load = [
            request([3 + i % 5] * rng.randrange(1, 30), max_tokens=rng.choice([1, 3, 20]), temperature=1.0, seed=i,
                    n=rng.choice([1, 1, 1, 2]))
            for i in range(14)
        ]  # fmt: skip
        gone: set[str] = set()
        collector, todo = Collector(), list(load)
        for _ in range(6000):
            if todo and rng.random() < 0.4:
                core.add(todo.pop())
            if core.groups and rng.random() < 0.05:
                core.add(Control(kind="preempt", request_id=rng.choice(sorted(core.groups))))
            if core.groups and rng.random() < 0.01:
                gone.add(name := rng.choice(sorted(core.groups)))
                core.add(Abort(request_id=name))
            collector.take(core.step())
            assert not batch or all(len(rows) <= batch for _, rows in core.inflight)
            if not todo and not core.has_work:
                break
        assert_idle(core)
        assert core.stats.num_failed_loads == 0
        ahead = core.scheduler.swap_ahead
        num_out, num_back = num_out + ahead.num_out, num_back + ahead.num_back
        num_preempted += core.stats.num_preemptions
        for r in load:
            for index in range(r.n if r.request_id not in gone else 0):
                assert collector.requests[r.request_id].tokens[index] == generate(fake_logits, r, index)[0]
    print(model, depth, num_preempted, num_out, num_back)
    assert num_preempted > 10
    assert num_out > 0


def test_a_busy_step_looks_at_few_of_those_that_wait() -> None:
    policy = FastServe(quantum_s=0.1)
    waiting = [queued(i, 20 + i % 200) for i in range(5000)]
    order = stepped(policy, [], waiting)
    assert len(order) == 64
    assert {policy.level(waiting[i]) for i in order} == {0}


def test_the_pool_of_a_manager_is_asked_for_prefixes() -> None:
    policy = FastServe(quantum_s=0.1)
    policy.begin_step(0.0, KVManager(make_groups(1), [32], 4))
    assert policy.level(queued(0, 150)) == 1
