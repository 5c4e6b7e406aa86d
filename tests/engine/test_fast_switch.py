"""Swapping by FastSwitch's tier (row A13): the same tokens, less waiting for copies, the same shares of clients."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.base.clock import VirtualClock
from penstock.core.batch import SchedulerOutput
from penstock.core.page_ops import LoadOp, StoreOp
from penstock.core.request import Abort, Control, Request
from penstock.core.sequence import Status
from penstock.executor.sim import SimExecutor
from penstock.kv.fast_switch import runs
from penstock.kv.tier_facts import counters_of
from tests.engine.fake_model import VOCAB, spec
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, plain_core, request
from tests.engine.naive import fake_logits, generate
from tests.engine.policy_sim import LinearTimer

KNOBS = Knobs(
    block_size=4, budget=64, host_blocks=64, preemption="swap", prefix_cache="none", swap_tier="fastswitch"
)  # fmt: skip


def test_runs_are_neighbours_at_both_ends() -> None:
    assert runs([4, 5, 6, 9, 8, 7], [1, 2, 4, 5, 6, 7]) == [(4, 1, 2), (6, 4, 1), (9, 5, 1), (8, 6, 1), (7, 7, 1)]
    assert runs([], []) == []


def stores_of(core: Any) -> list[list[StoreOp | LoadOp]]:
    """Swaps of each step, as they are submitted."""
    seen: list[list[StoreOp | LoadOp]] = []
    submit = core.executor.submit

    def watch(output: SchedulerOutput) -> None:
        seen.append([op for op in output.page_ops if isinstance(op, StoreOp | LoadOp)])
        submit(output)

    core.executor.submit = watch
    return seen


def test_A13_who_is_swapped_again_copies_only_what_is_new_and_in_runs() -> None:
    core, _ = fake_engine(KNOBS)
    seen = stores_of(core)
    r, collector = request([3 + i % 20 for i in range(22)], max_tokens=16), Collector()
    core.add(r)
    counts = []
    for _ in range(3):
        before = core.stats.num_sampled_tokens
        while core.stats.num_sampled_tokens < before + 4:
            collector.take(core.step())
        core.add(Control(kind="preempt", request_id=r.request_id))
        collector.take(core.step())
        stored = [op.count for step in seen for op in step if isinstance(op, StoreOp)]
        loaded = [op.count for step in seen for op in step if isinstance(op, LoadOp)]
        counts.append((stored, sum(loaded)))
        seen.clear()
    drain(core, collector)
    assert_idle(core)
    pages = core.kv.swaps.tier.pools[0].pages_per_slab
    # 25 tokens: 7 blocks in one run. 29: of 8 blocks 6 were full. 33: of 9 blocks 7 were.
    assert counts == [([7 * pages], 7 * pages), ([2 * pages], 8 * pages), ([2 * pages], 9 * pages)]
    assert core.kv.swaps.kept.num_reused == counters_of(core.kv)["reused_blocks"] == 6 + 7
    assert core.stats.num_recomputed_tokens == 0
    assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["full", "offload", "slots", "windows", "drafts"])
@pytest.mark.sampled
def test_A13_swapping_under_pressure_changes_no_token(model: str, depth: int) -> None:
    """A host that is too small for all, orders to preempt, aborts, resets; real threads bring back what is loaded."""
    shape: dict[str, Any] = {"slots": {"slots": True}, "windows": {"windows": (None, 5)}}.get(model, {})
    num_reused = num_waits = num_swaps = 0
    for seed in range(3):
        rng = random.Random(10 * seed + depth)
        knobs = replace(
            KNOBS, num_blocks=24, num_slots=8, budget=24, host_blocks=rng.choice([20, 40]), depth=depth,
            prefix_cache="radix" if model == "offload" else rng.choice(["none", "radix"]), offload=model == "offload",
            num_drafts=3 if model == "drafts" else 0,
        )  # fmt: skip
        core, _ = fake_engine(knobs, **shape)
        load = [request([3 + i % 5] * rng.randrange(1, 30), max_tokens=20, temperature=1.0, seed=i) for i in range(16)]
        gone: set[str] = set()
        collector, todo = Collector(), list(load)
        for _ in range(4000):
            if todo and rng.random() < 0.5:
                core.add(todo.pop())
            if core.groups and rng.random() < 0.3:
                core.add(Control(kind="preempt", request_id=rng.choice(sorted(core.groups))))
            if core.groups and rng.random() < 0.01:
                gone.add(name := rng.choice(sorted(core.groups)))
                core.add(Abort(request_id=name))
            if rng.random() < 0.02:
                core.add(Control(kind="reset_prefix_cache"))
            collector.take(core.step())
            num_waits += any(s.status is Status.LOADING for s in core.scheduler.running)
            if not todo and not core.has_work:
                break
        assert_idle(core)
        num_swaps += core.stats.num_swaps
        assert core.stats.num_failed_loads == 0
        num_reused += core.kv.swaps.kept.num_reused
        assert not core.kv.swaps.kept.contents()
        for r in load:
            if r.request_id not in gone:
                assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert (num_reused > 0) == (model not in ("slots", "windows"))
    assert num_waits > 0
    assert num_swaps > 10


def test_A13_copies_make_room_for_those_who_wait() -> None:
    """The host holds one of two: the copy of the one that is on the device goes."""
    core, _ = fake_engine(replace(KNOBS, host_blocks=8))
    one, two = (request([3 + i] * 20, max_tokens=12) for i in range(2))
    collector = Collector()
    for r in (one, two):
        core.add(r)
    collector.take(core.step())
    for r in (one, two):
        core.add(Control(kind="preempt", request_id=r.request_id))
        collector.take(core.step())
        while core.kv.swaps.loads:
            collector.take(core.step())
        assert len(core.kv.swaps.kept.contents()) == 1
    assert core.stats.num_swaps == 2
    drain(core, collector)
    assert_idle(core)
    for r in (one, two):
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


def test_A13_a_copy_that_changed_is_a_miss_and_is_not_kept() -> None:
    core, _ = fake_engine(KNOBS)
    r, collector = request([3 + i % 20 for i in range(22)], max_tokens=12), Collector()
    core.add(r)
    collector.take(core.step())
    store = core.executor._runner.storage.tiers[1]  # type: ignore[attr-defined]
    load = store.load

    def spoiled(op: LoadOp, planes: Any) -> Any:
        store.planes[0]["k"][op.src] += 1
        return load(op, planes)

    store.load = spoiled
    core.add(Control(kind="preempt", request_id=r.request_id))
    while core.stats.num_failed_loads == 0:
        collector.take(core.step())
    assert not core.kv.swaps.kept.contents()
    drain(core, collector)
    assert_idle(core)
    assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


# -- time --------------------------------------------------------------------------------------------------------------


class Stalls(SimExecutor):
    """Counts the seconds in which steps wait for copies, or for a load because there is nothing else to do."""

    stalled_s = 0.0

    def _copies_s(self, output: SchedulerOutput, start_s: float) -> float:
        waits_s = super()._copies_s(output, start_s)
        self.stalled_s += waits_s
        if not output.scheduled and self._loads:
            self.stalled_s += max(0.0, min(self._loads.values()) - start_s - waits_s)
        return waits_s


class Link(LinearTimer):
    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / 2e5


@dataclass
class Switching:
    stall_s: float
    num_switches: int
    shares: dict[str, float]
    end_s: float


def clients(seed: int) -> list[Request]:
    """Two clients whose long texts hold all places, and one who comes again and again with short ones."""
    rng = random.Random(seed)
    load = [request([3] * rng.randrange(60, 120), max_tokens=600, tenant=t, arrival_s=0.0) for t in "abab"]
    load += [
        request([5] * rng.randrange(20, 60), max_tokens=rng.randrange(10, 40), tenant="c", arrival_s=0.5 + 0.4 * i)
        for i in range(45)
    ]
    return load


def switching(tier: str, seed: int, until_s: float = 14.0) -> Switching:
    """Tokens are counted up to a time at which all three still have work."""
    clock, timer = VirtualClock(), Link()
    knobs = Knobs(
        block_size=16, num_blocks=200, host_blocks=400, budget=256, max_num_seqs=3, preemption="swap",
        prefix_cache="none", policy="fair", swap_tier=tier,
    )  # fmt: skip
    executor = Stalls(timer, clock, vocab_size=VOCAB, page_bytes=[16 * 2 * 4])
    core = plain_core(spec(slots=False), knobs, executor, clock)
    load, served = clients(seed), Counter[str]()
    by_id = {r.request_id: r for r in load}
    todo = sorted(load, key=lambda r: r.arrival_s)
    while todo or core.has_work:
        while todo and todo[0].arrival_s <= clock.now():
            core.add(todo.pop(0))
        if not core.has_work:
            clock.advance_to(todo[0].arrival_s)
        for out in core.step():
            if clock.now() <= until_s:
                served[by_id[out.request_id].tenant] += len(out.token_ids)
    total = sum(served.values())
    return Switching(
        executor.stalled_s, core.stats.num_swaps, {t: n / total for t, n in served.items()}, clock.now()
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_A13_time_stalled_on_swap_per_switch_is_halved_and_shares_stay(seed: int) -> None:
    block, groups = switching("host", seed), switching("fastswitch", seed)
    print(block, groups)
    assert min(block.num_switches, groups.num_switches) >= 15
    assert block.stall_s / block.num_switches >= 2 * groups.stall_s / groups.num_switches
    assert groups.end_s <= block.end_s
    for tenant, share in block.shares.items():
        assert groups.shares[tenant] == pytest.approx(share, abs=0.02)
