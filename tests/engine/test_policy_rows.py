"""Catalogue rows of the scheduling policies, each asserted in its own words, in counts or in virtual time.

Virtual time: the real scheduler and KV manager, on a simulated device whose steps take 10 ms plus 20 us per token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from penstock.core.request import Request
from penstock.core.sequence import Sequence
from penstock.kv.manager import KVManager
from penstock.sched.policy.cache_aware import CacheAware
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, request
from tests.engine.naive import fake_logits, generate
from tests.engine.policy_sim import ask, play, poisson, prompt, quantile
from tests.unit.kv.test_kv_model import make_groups

# -- request-level batching ------------------------------------------------------------------------------------------


def test_A03_wasted_slots_are_counted_and_gone_with_continuous_batching() -> None:
    rng = random.Random(3)
    load = [ask(rng, 0.0, rng.randrange(8, 40), rng.choice([2, 4, 8, 60])) for _ in range(96)]
    use = {
        policy: play(policy, load, max_num_seqs=8, budget=512).slots for policy in ("static:size=8", "dynamic", "fcfs")
    }
    print({policy: (slots.wasted, slots.used, round(slots.wasted_share, 3)) for policy, slots in use.items()})
    assert use["fcfs"].wasted == 0
    assert use["static:size=8"].used == use["fcfs"].used, "the same work"
    assert use["static:size=8"].wasted > 0.5 * use["static:size=8"].used
    assert use["dynamic"].wasted > 0.5 * use["dynamic"].used, "request-level too"


def test_A04_timeout_and_size_trade_latency_for_throughput() -> None:
    """One Poisson load; throughput is requests per second that the device is busy (what a serverless user pays)."""
    rng = random.Random(5)
    load = [ask(rng, t, rng.choice([16, 32, 64]), rng.choice([4, 8, 16])) for t in poisson(rng, 15, 20)]

    def point(timeout_s: float, size: int) -> tuple[float, float]:
        played = play(f"dynamic:timeout_s={timeout_s},size={size}", load, max_num_seqs=64)
        return fmean(played.latency_s(load)), len(load) / played.busy_s

    timeouts = [point(t, 16) for t in (0.05, 0.2, 0.4, 0.8)]
    sizes = [point(0.5, n) for n in (2, 4, 8, 16)]
    print("timeouts 0.05 .. 0.8 s, size 16:", [(round(a, 3), round(b, 1)) for a, b in timeouts])
    print("sizes 2 .. 16, timeout 0.5 s:", [(round(a, 3), round(b, 1)) for a, b in sizes])
    assert timeouts == sorted(timeouts), "a longer timeout costs latency and buys throughput"
    assert [b for _, b in timeouts] == sorted(b for _, b in timeouts)
    assert [b for _, b in sizes] == sorted(b for _, b in sizes), "a larger batch buys throughput"
    fixed, tuned = point(0.0, 2), min(timeouts + sizes)
    print("fixed (0, 2):", fixed, "tuned:", tuned)
    assert tuned[0] < fixed[0]
    assert tuned[1] > fixed[1]


def test_A04_a_batch_starts_full_or_at_its_timeout_and_lets_nobody_in() -> None:
    rng = random.Random(1)
    lone = [ask(rng, 1.0, 20, 4)]
    assert play("dynamic:timeout_s=0.25,size=4", lone).steps[0][0] == pytest.approx(1.25)
    full = [ask(rng, 1.0 + 0.01 * i, 20, 4) for i in range(4)]
    assert play("dynamic:timeout_s=0.25,size=4", full).steps[0][0] == pytest.approx(1.03)
    late = [*full, ask(rng, 1.05, 20, 4)]
    played = play("dynamic:timeout_s=0.25,size=4", late)
    batch_ends = max(played.end_s[r.request_id] for r in full)
    assert played.first_s[late[-1].request_id] > max(batch_ends, 1.05 + 0.25)
    unheeded = play("dynamic:timeout_s=0.25,size=4", lone, hooks=False)
    assert unheeded.steps[0][0] == pytest.approx(1.0), "without a driver that waits, it starts at once"


# -- priority --------------------------------------------------------------------------------------------------------


def two_classes(seed: int) -> tuple[list[Request], list[Request]]:
    """Two urgent requests a second for 30 s, and for 20 s about twice the patient ones that the engine can serve."""
    rng = random.Random(seed)
    high = [ask(rng, t, rng.choice([400, 800, 1600]), 30, priority=0) for t in poisson(rng, 2, 30)]
    low = [ask(rng, t, rng.choice([100, 300, 600]), rng.choice([50, 150]), priority=1) for t in poisson(rng, 20, 20)]
    return high, low


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.sampled
def test_A09_urgent_requests_do_not_feel_an_overload(seed: int) -> None:
    """p99 TTFT of the high class within 1.2x of its unloaded value; all low-priority work completes."""
    high, low = two_classes(seed)
    both = sorted(high + low, key=lambda r: r.arrival_s)
    machine = {"budget": 256, "max_num_seqs": 16, "num_blocks": 700}
    alone = quantile(play("priority", high, **machine).ttft_s(high), 0.99)
    loaded = play("priority", both, **machine)  # asserts that everybody ends
    p99 = {
        "alone": alone,
        "priority": quantile(loaded.ttft_s(high), 0.99),
        "no displacement": quantile(play("priority", both, hooks=False, **machine).ttft_s(high), 0.99),
        "fcfs": quantile(play("fcfs", both, **machine).ttft_s(high), 0.99),
    }
    print({name: round(value, 3) for name, value in p99.items()}, loaded.num_preemptions, "preemptions")
    assert p99["priority"] <= 1.2 * alone
    assert p99["fcfs"] > 5 * alone, "no overload"
    assert 0 < loaded.num_preemptions <= len(high) * 2, "somebody is displaced again and again"
    order = sorted(low, key=lambda r: loaded.first_s[r.request_id])
    overtakes = sum(a.arrival_s > b.arrival_s for a, b in pairwise(order))
    assert overtakes <= 2 * loaded.num_preemptions, "not FCFS within a class"


@pytest.mark.parametrize("depth", [1, 2])
def test_A09_the_p99_of_many_urgent_requests_is_within_a_fifth_of_unloaded(depth: int) -> None:
    """Of one load's 60 requests the p99 is the largest time, and one in ten such loads missed 1.2x: here are three,
    those that missed among them."""
    machine = {"budget": 256, "max_num_seqs": 16, "num_blocks": 700, "depth": depth}
    alone: list[float] = []
    loaded: list[float] = []
    for seed in (4, 5, 6):
        high, low = two_classes(seed)
        alone += play("priority", high, **machine).ttft_s(high)
        both = sorted(high + low, key=lambda r: r.arrival_s)
        loaded += play("priority", both, **machine).ttft_s(high)
    assert len(alone) > 150
    ratios = {q: round(quantile(loaded, q) / quantile(alone, q), 3) for q in (0.9, 0.95, 0.99)}
    print(depth, len(alone), ratios)
    assert max(ratios.values()) <= 1.2, ratios


def test_A09_ageing_lets_low_priority_through_an_endless_overload() -> None:
    """Urgent requests alone are more than the engine can do; a patient one gets its turn when it has aged enough."""
    rng = random.Random(4)
    high = [ask(rng, t, 300, 60, priority=0) for t in poisson(rng, 30, 40)]
    low = ask(rng, 0.5, 300, 60, priority=1)
    load = sorted([*high, low], key=lambda r: r.arrival_s)
    ends = {}
    for ageing_s in (2, 8, 10_000):
        ends[ageing_s] = play(f"priority:ageing_s={ageing_s}", load, budget=256, max_num_seqs=16).end_s[low.request_id]
    print({k: round(v, 1) for k, v in ends.items()})
    assert ends[2] < ends[8] < 40 < ends[10_000]


def test_A09_displaced_requests_keep_their_tokens() -> None:
    """[EX] under constant displacement: whoever loses its slot or its memory to a more urgent one resumes exactly."""
    rng = random.Random(9)
    core, _ = fake_engine(Knobs(policy="priority:ageing_s=5", num_blocks=24, block_size=4, budget=16, max_num_seqs=4))
    load, collector = [], Collector()
    for i in range(80):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))]
        load.append(request(own, max_tokens=rng.randrange(1, 20), priority=rng.randrange(4), arrival_s=0.01 * i))
        core.add(load[-1])
        for _ in range(rng.randrange(0, 8)):
            collector.take(core.step())
    drain(core, collector, limit=5000)
    assert_idle(core)
    assert core.stats.num_preemptions > 20
    for r in load:
        got = collector.requests[r.request_id]
        assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, r)


# -- SplitFuse -------------------------------------------------------------------------------------------------------


def variation(steps: Seq[tuple[float, int]], start_s: float, end_s: float) -> float:
    """Coefficient of variation of tokens per step, without filling and draining."""
    tokens = [n for when, n in steps if start_s <= when <= end_s]
    return pstdev(tokens) / fmean(tokens)


@pytest.mark.parametrize(("rate_hz", "bound"), [(32, 0.2), (45, 0.2), (24, 0.4)])
def test_A11_steps_have_a_near_constant_number_of_tokens(rate_hz: float, bound: float) -> None:
    """Mixed load, prompts of 32 ... 1,500 tokens: CV < 0.2 near (32/s) and beyond (45/s) saturation, throughput within
    5 % of the Sarathi policy's. Far below saturation (24/s) the load itself varies more than the backlog evens out:
    the CV is halved, no more, and that is the price of not holding prompts back for longer."""
    rng = random.Random(2)
    load = [
        ask(rng, t, rng.choice([32, 64, 128, 256, 1500]), rng.choice([40, 120, 240])) for t in poisson(rng, rate_hz, 20)
    ]
    played = {p: play(p, load, budget=256, max_num_seqs=256, num_blocks=16_000) for p in ("fcfs", "splitfuse")}
    cv = {p: variation(x.steps, 4, 20) for p, x in played.items()}
    speed = {p: x.tokens_per_s for p, x in played.items()}
    ttft = {p: fmean(x.ttft_s(load)) for p, x in played.items()}
    print(rate_hz, *({p: round(v, 3) for p, v in d.items()} for d in (cv, speed, ttft)))
    assert cv["splitfuse"] < bound
    assert cv["splitfuse"] <= 0.6 * cv["fcfs"] + 1e-9
    assert speed["splitfuse"] >= 0.95 * speed["fcfs"]


# -- cache-aware -----------------------------------------------------------------------------------------------------


def shared_prefixes(seed: int, gap_s: float = 0.0, own: int = 40) -> list[Request]:
    """20 stems of 256 tokens, 12 requests each, shuffled; all at once or `gap_s` apart on average."""
    rng = random.Random(seed)
    prompts = [stem + prompt(rng, own) for stem in [prompt(rng, 256) for _ in range(20)] for _ in range(12)]
    rng.shuffle(prompts)
    now, load = 0.0, []
    for tokens in prompts:
        load.append(request(tokens, max_tokens=rng.choice([5, 10, 20]), arrival_s=now))
        now += rng.expovariate(1 / gap_s) if gap_s else 0.0
    return load


def best_hit_rate(load: Seq[Request], block_size: int) -> float:
    """Of the offline optimum: every distinct block is computed once, all other full blocks of prompts are hits."""
    seen: set[tuple[int, ...]] = set()
    hits = asked = 0
    for r in load:
        ids = r.prompt_token_ids
        asked += len(ids)
        for end in range(block_size, len(ids) + 1, block_size):
            path = tuple(ids[:end])
            hits += block_size * (path in seen and end < len(ids))
            seen.add(path)
    return hits / asked


@pytest.mark.parametrize("gap_s", [0.0, 0.02, 0.08])
@pytest.mark.parametrize("num_blocks", [160, 320])
@pytest.mark.sampled
def test_A20_hit_rate_is_at_least_that_of_first_come_first_served(gap_s: float, num_blocks: int) -> None:
    """Undersized cache: 160 blocks hold 8, 320 hold 17 of the 20 stems' requests, running ones included.

    With a queue to choose from the gain is large; without one (0.08 s apart) there is no order to choose, and the rates
    are equal but for chance: 5 of 144 such loads fell short by up to 0.3 percentage points.
    """
    for seed in (1, 2):
        load = shared_prefixes(seed, gap_s)
        rates = {
            policy: play(policy, load, num_blocks=num_blocks, max_num_seqs=4).hit_rate
            for policy in ("fcfs", "cache-aware", "cache-aware:order=dfs")
        }
        print(gap_s, num_blocks, seed, {p: round(v, 4) for p, v in rates.items()})
        assert rates["cache-aware"] >= rates["fcfs"]
        if gap_s == 0:
            assert rates["cache-aware"] >= 0.95 * best_hit_rate(load, 16) > 1.2 * rates["fcfs"]


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
@pytest.mark.sampled
def test_A20_depth_first_order_reaches_the_offline_optimum(prefix_cache: str, max_num_seqs: int) -> None:
    for seed in (1, 2):
        load = shared_prefixes(seed)
        played = play(
            "cache-aware:order=dfs", load, num_blocks=160, max_num_seqs=max_num_seqs, prefix_cache=prefix_cache
        )
        assert played.num_preemptions == 0
        assert played.num_evicted_blocks > 160
        assert played.hit_rate == pytest.approx(best_hit_rate(load, 16), abs=1e-9)


@pytest.mark.parametrize("knob", ["max_overtaken=20,max_wait_s=1000", "max_overtaken=100000,max_wait_s=3"])
def test_A20_nobody_is_overtaken_without_bound(knob: str) -> None:
    """A request that shares nothing, in an overload of requests that share everything."""
    rng = random.Random(6)
    stem = prompt(rng, 256)
    load = [request(stem + prompt(rng, 10), max_tokens=20, arrival_s=t) for t in poisson(rng, 60, 12)]
    lone = ask(rng, load[40].arrival_s, 266, 20)
    load.insert(41, lone)
    unbounded = play("cache-aware:max_overtaken=100000,max_wait_s=1000", load, max_num_seqs=8)
    bounded = play(f"cache-aware:{knob}", load, max_num_seqs=8)
    starts = [(p.first_s[lone.request_id], p) for p in (unbounded, bounded)]
    younger = [sum(p.first_s[r.request_id] < start for r in load[41:]) for start, p in starts]
    waits = [p.first_s[lone.request_id] - lone.arrival_s for p in (unbounded, bounded)]
    print(knob, "overtaken", younger, "waited", [round(w, 2) for w in waits])
    if "=20," in knob:
        assert younger[1] <= 20 + 8 < younger[0]
    else:
        assert waits[1] < 3 + 2 < waits[0]


@pytest.mark.parametrize("order", ["lpm", "dfs"])
def test_A20_ten_thousand_waiting_cost_no_more_lookups_than_a_hundred(order: str) -> None:
    class Counting(KVManager):
        num_matches = 0

        def match(self, seq: Sequence) -> Any:
            self.num_matches += 1
            return super().match(seq)

    kv = Counting(make_groups(1), [64], 16)
    policy = CacheAware(order=order)
    rng = random.Random(1)
    stems = [prompt(rng, 32) for _ in range(50)]
    waiting = [Sequence(i, request(rng.choice(stems) + prompt(rng, 8)), arrival=i) for i in range(10_000)]
    for step in range(20):
        kv.num_matches = 0
        policy.begin_step(0.01 * step, kv)
        offered = policy.order([], waiting)
        assert kv.num_matches <= 2 * policy.lookups
        assert 0 < len(offered) <= policy.lookups
