"""Preemption by swap beside recompute: exact, timed, and the cheaper one chosen by cost (row A08)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.base.clock import VirtualClock
from penstock.core.request import Abort, Control
from penstock.executor.sim import SimExecutor
from tests.engine.fake_model import VOCAB, spec
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, plain_core, request
from tests.engine.naive import fake_logits, generate
from tests.engine.test_seconds_budget import Linear


class Costs(Linear):
    """A device on which one token costs a millisecond; copies cost what the test says."""

    copy_bytes_per_s = 1e9

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / self.copy_bytes_per_s


def timed(copy_bytes_per_s: float, mode: str):  # type: ignore[no-untyped-def]
    """Virtual seconds to finish a load that is preempted all the time, and the engine's counters."""
    timer = Costs()
    object.__setattr__(timer, "copy_bytes_per_s", copy_bytes_per_s)
    clock = VirtualClock()
    knobs = Knobs(block_size=4, num_blocks=40, budget=64, host_blocks=200, preemption=mode, prefix_cache="none")
    executor = SimExecutor(timer, clock, vocab_size=VOCAB, page_bytes=[4 * 2 * 4])  # a block of k and v, float32
    core = plain_core(spec(slots=False), knobs, executor, clock, timer)
    for i in range(12):
        core.add(request([3 + i] * 40, max_tokens=30))
    drain(core, Collector())
    return clock.now(), core.stats


def test_A08_auto_takes_the_cheaper_way_by_cost() -> None:
    recompute_s, recompute = timed(1e9, "recompute")
    swap_s, swap = timed(1e9, "swap")
    fast_s, fast = timed(1e9, "auto")
    slow_s, slow = timed(1.0, "auto")
    assert recompute.num_preemptions > 5
    assert recompute.num_swaps == 0
    assert swap.num_swaps == swap.num_preemptions
    assert 0 < swap_s < recompute_s, "on a fast link nothing is computed twice"
    assert (fast.num_swaps, fast_s) == (fast.num_preemptions, swap_s)
    assert (slow.num_swaps, slow_s) == (0, recompute_s)


def test_A08_what_is_swapped_is_not_computed_again() -> None:
    for mode, again in (("recompute", True), ("swap", False)):
        core, forward = fake_engine(
            Knobs(block_size=4, budget=64, host_blocks=64, preemption=mode, prefix_cache="none")
        )
        r = request([3 + i % 20 for i in range(22)], max_tokens=8)
        collector = Collector()
        core.add(r)
        for _ in range(4):
            collector.take(core.step())
        core.add(Control(kind="preempt", request_id=r.request_id))
        drain(core, collector)
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
        assert (forward.num_tokens > 22 + 7) == again
        assert_idle(core)


def test_a_full_host_falls_back_to_recompute_and_aborts_free_it() -> None:
    core, _ = fake_engine(Knobs(block_size=4, num_blocks=64, budget=96, host_blocks=6, preemption="swap"))
    load = [request([3 + i] * 20, max_tokens=12, request_id=f"q{i}") for i in range(4)]
    collector = Collector()
    for r in load:
        core.add(r)
    collector.take(core.step())
    for r in load:
        core.add(Control(kind="preempt", request_id=r.request_id))
    core.add(Abort(request_id="q3"))
    core.add(Abort(request_id="q0"))
    collector.take(core.step())
    assert core.stats.num_swaps == 1, "the host holds one of four"
    drain(core, collector)
    assert_idle(core)
    for r in load[1:3]:
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert all(pool.num_free == pool.num_slabs for pool in core.kv.swaps.tier.pools)


@pytest.mark.parametrize("slots", [False, True])
def test_swapping_under_pressure_changes_no_token(slots: bool) -> None:
    rng = random.Random(17)
    base = Knobs(block_size=4, num_blocks=24, num_slots=8, budget=24, host_blocks=30, preemption="swap")
    for depth, prefix in ((1, "radix"), (2, "none"), (2, "radix")):
        core, _ = fake_engine(replace(base, depth=depth, prefix_cache=prefix), slots=slots)
        load = [request([3 + i % 5] * rng.randrange(1, 30), max_tokens=20, temperature=1.0, seed=i) for i in range(30)]
        collector = Collector()
        for r in load:
            core.add(r)
        drain(core, collector)
        assert_idle(core)
        assert core.stats.num_swaps > 3
        for r in load:
            assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


@pytest.mark.parametrize("num_computed", [5, 22, 40])
def test_A08_auto_changes_its_mind_where_both_ways_cost_the_same(num_computed: int) -> None:
    """There and back again, block by block, against one step of as many tokens: counted here by hand."""
    bytes_of_block = 4 * 2 * 4 * 2  # tokens, k and v, bytes of a float32, layers
    both_ways = 2 * -(-num_computed // 4) * bytes_of_block
    recompute_s = 1e-3 + 1e-3 * num_computed + 1e-4  # `Linear`: a step, its tokens, its row
    for faster in (0.95, 1.05):
        timer = Costs()
        object.__setattr__(timer, "copy_bytes_per_s", both_ways / recompute_s * faster)
        core, _ = fake_engine(Knobs(block_size=4, budget=64, host_blocks=64, prefix_cache="none"), timer=timer)
        r = request([3 + i % 20 for i in range(num_computed)], max_tokens=4)
        core.add(r)
        collector = Collector()
        collector.take(core.step())
        core.add(Control(kind="preempt", request_id=r.request_id))
        drain(core, collector)
        assert (core.stats.num_preemptions, core.stats.num_swaps) == (1, int(faster > 1)), faster
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


def test_A08_on_the_virtual_clock_a_late_load_takes_its_time_and_nobody_elses() -> None:
    """`Linear`: a step takes 1 ms, a token 1 ms more, a row 0.1 ms more; a block of 64 bytes takes 1 ms to copy."""
    timer = Costs()
    object.__setattr__(timer, "copy_bytes_per_s", 64e3)
    clock = VirtualClock()
    knobs = Knobs(block_size=4, budget=64, host_blocks=64, preemption="swap", prefix_cache="none")
    core = plain_core(spec(slots=False), knobs, SimExecutor(timer, clock, vocab_size=VOCAB, page_bytes=[32]), clock)
    core.kv.swaps.tier.late = True
    r, collector = request([3] * 40, max_tokens=4), Collector()
    core.add(r)
    collector.take(core.step())
    core.add(Control(kind="preempt", request_id=r.request_id))
    begin_s = clock.now()
    collector.take(core.step())
    assert clock.now() - begin_s == pytest.approx(0.020), "ten blocks out, then ten in, and nobody else to run"
    assert core.stats.num_sampled_tokens == 1
    other = request([5] * 9, max_tokens=30)
    core.add(Control(kind="preempt", request_id=r.request_id))
    core.add(other)
    begin_s = clock.now()
    collector.take(core.step())
    assert clock.now() - begin_s == pytest.approx(0.010 + 0.0101), "its blocks go out with the newcomer's step"
    while core.stats.num_sampled_tokens < 8:
        before_s = clock.now()
        collector.take(core.step())
        assert clock.now() - before_s <= 0.0042, "a step with two decodes at most: none waits for the load"
    drain(core, collector)
    assert_idle(core)
    assert (core.stats.num_preemptions, core.stats.num_swaps) == (2, 2)
    assert len(collector.requests[r.request_id].tokens[0]) == 4


@pytest.mark.parametrize("times", [1, 2])
def test_what_was_swapped_out_before_a_reset_does_not_enter_the_cache_after_it(times: int) -> None:
    """It goes on with its old blocks, as what runs does, however often it is swapped out; nobody else reads them."""
    core, _ = fake_engine(Knobs(block_size=4, budget=64, host_blocks=64, preemption="swap"))
    first = request([3 + i % 20 for i in range(22)], max_tokens=16)
    collector = Collector()
    core.add(first)
    for i in range(times):
        while core.stats.num_swaps == i:
            collector.take(core.step())
            core.add(Control(kind="preempt", request_id=first.request_id))
            if i == 0:
                core.add(Control(kind="reset_prefix_cache"))
            collector.take(core.step())
    drain(core, collector)
    assert core.stats.num_swaps == times
    assert collector.requests[first.request_id].tokens[0] == generate(fake_logits, first)[0]
    assert core.kv.cache.contents() == ([], []), "blocks of before the reset"
    second = request([3 + i % 20 for i in range(22)], max_tokens=2)
    core.add(second)
    drain(core, collector)
    assert collector.requests[second.request_id].cached == 0
    assert core.kv.cache.contents() != ([], []), "what is computed after the reset does"
    assert_idle(core)
