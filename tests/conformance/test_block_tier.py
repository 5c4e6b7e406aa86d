"""What every tier owes, and what an engine makes of one that takes its time or loses what it was given.

A tier is two things under one name: who has which id (`BLOCK_TIERS`), and the bytes on a rank (`PAGE_STORES`). Being
registered enrols it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.base.clock import MonotonicClock
from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.cache_spec import CacheSpec, PlaneSpec, group_layers
from penstock.core.page_ops import HOST, AnyPageOp, LoadOp, PageOp, StoreOp
from penstock.core.protocols import IdTier
from penstock.core.request import Abort, Control
from penstock.core.sequence import Sequence as Seq
from penstock.core.sequence import Status
from penstock.engine.core import EngineCore
from penstock.executor.inproc import InprocExecutor
from penstock.executor.rank import RankSpec
from penstock.kv.block_pool import BlockPool
from penstock.kv.manager import KVManager
from penstock.kv.outbox import Outbox
from penstock.kv.tier_facts import counters_of
from penstock.kv.tiers import BLOCK_TIERS
from penstock.runner.rows import RowStore
from penstock.runner.runner import Runner
from penstock.runner.sampler import Sampler
from penstock.runner.storage import Storage
from penstock.runner.tiers import PAGE_STORES
from penstock.sched.policy import make_policy
from penstock.sched.scheduler import Scheduler
from tests.engine.fake_model import VOCAB, FakeForward
from tests.engine.fake_model import spec as fake_spec
from tests.engine.harness import Collector, Knobs, assert_idle, drain, plan_for, request
from tests.engine.naive import fake_logits, generate

every = pytest.mark.parametrize("name", BLOCK_TIERS.names())
both = pytest.mark.parametrize("late", [False, True], ids=["in-step", "late"])

GROUPS = group_layers(
    [
        CacheSpec("paged", (PlaneSpec("k", 2, 4, "bfloat16"), PlaneSpec("v", 2, 4, "float32"))),
        CacheSpec("slot", (PlaneSpec("state", 3, 5, "float16"),)),
        CacheSpec("paged", (PlaneSpec("k", 2, 4, "bfloat16"), PlaneSpec("v", 2, 4, "float32"))),
    ]
)
S, DEVICE_SLABS, TIER_SLABS = 8, [12, 5], [6, 2]


# -- ids and bytes -----------------------------------------------------------------------------------------------------


class Bench:
    """A tier, its bytes and a device. What is planned is carried out by `run`, as a step does it."""

    def __init__(self, name: str, late: bool = False) -> None:
        self.outbox = Outbox([BlockPool(n, g.pages_per_slab) for g, n in zip(GROUPS, DEVICE_SLABS, strict=True)])
        self.tier: IdTier = BLOCK_TIERS.get(name)(GROUPS, TIER_SLABS, self.outbox, late=late)
        self.storage = Storage(GROUPS, DEVICE_SLABS, S, host_slabs=TIER_SLABS, tier=name, poison=True)
        self.moves = 0

    def run(self) -> dict[int, bool]:
        """Until all loads are reported."""
        ops = self.outbox.drain()[1]
        moves = self.storage.apply(ops)
        while {op.move for op in ops if isinstance(op, LoadOp)} - moves.keys():
            moves |= self.storage.ended(1.0)
        return moves

    def fill(self, group: int, slab: int, value: int) -> None:
        """Bytes that are different everywhere and follow from `value`."""
        for name, plane in self.storage.planes[group].items():
            width = GROUPS[group].pages_per_slab
            part = plane[slab * width : (slab + 1) * width]
            rng = np.random.default_rng([value, *name.encode()])
            part[...] = rng.integers(1, 1000, part.shape).astype(plane.dtype)

    def read(self, group: int, slab: int) -> list[bytes]:
        width = GROUPS[group].pages_per_slab
        return [p[slab * width : (slab + 1) * width].tobytes() for p in self.storage.planes[group].values()]

    def load(self, group: int, ids: Sequence[int], slabs: Sequence[int]) -> int:
        self.moves += 1
        self.tier.load(group, ids, slabs, self.moves)
        return self.moves


def test_ids_and_bytes_of_a_tier_have_one_name() -> None:
    assert BLOCK_TIERS.names() == PAGE_STORES.names()


@every
@both
def test_what_was_stored_comes_back(name: str, late: bool) -> None:
    bench = Bench(name, late)
    assert (bench.tier.name, bench.tier.late) == (name, late)
    ids = bench.tier.prepare_store([3, 1])
    assert ids is not None
    for g, slabs in enumerate(([2, 7, 4], [3])):
        for i, slab in enumerate(slabs):
            bench.fill(g, slab, 10 * g + i)
        bench.tier.store(g, slabs, ids[g])
    stored = [[bench.read(0, slab) for slab in (2, 7, 4)], [bench.read(1, 3)]]
    for g, slabs in enumerate(([2, 7, 4], [3])):
        bench.outbox.zero_slabs(g, slabs)  # they are somebody else's right behind the store
    moves = [bench.load(0, ids[0], [1, 0, 11]), bench.load(1, ids[1], [4])]
    assert bench.run() == dict.fromkeys(moves, True)
    assert not any(bytes_.strip(b"\0") for slab in (2, 7, 4) for bytes_ in bench.read(0, slab))
    assert [bench.read(0, slab) for slab in (1, 0, 11)] == stored[0]
    assert [bench.read(1, 4)] == stored[1]
    again = bench.load(0, ids[0][1:2], [9])
    assert bench.run() == {again: True}, "a load takes nothing away"
    assert bench.read(0, 9) == stored[0][1]


@every
def test_ids_are_nobody_elses_and_a_full_tier_refuses(name: str) -> None:
    tier = Bench(name).tier
    first, second = tier.prepare_store([2, 1]), tier.prepare_store([3, 1])
    assert first is not None
    assert second is not None
    for a, b in zip(first, second, strict=True):
        assert len({*a, *b}) == len(a) + len(b)
    assert [tier.num_free(g) for g in range(2)] == [1, 0]
    for too_much in ([2, 0], [0, 1], [1, 1]):
        assert tier.prepare_store(too_much) is None
        assert [tier.num_free(g) for g in range(2)] == [1, 0], "all or nothing"
    assert tier.prepare_store([0, 0]) == [[], []]
    tier.check_invariants([[*first[0], *second[0]], [*first[1], *second[1]]])
    tier.complete_load(first)
    assert [tier.num_free(g) for g in range(2)] == [3, 1]
    again = tier.prepare_store([3, 1])
    assert again is not None
    assert not {*again[0]} & {*second[0]}
    tier.check_invariants([[*again[0], *second[0]], [*again[1], *second[1]]])
    with pytest.raises(AssertionError):
        tier.check_invariants([again[0], again[1]])
    with pytest.raises(AssertionError):
        tier.check_invariants([[*again[0], *again[0]], [*again[1], *second[1]]])


@every
def test_freed_ids_are_used_again_within_a_step(name: str) -> None:
    """Operations go in order: what is read out of an id, freed and stored anew in one list is two different blocks."""
    bench = Bench(name)
    rng = random.Random(3)
    held: list[tuple[list[list[int]], list[bytes]]] = []
    num_used_again = 0
    for i in range(60):
        expected: list[tuple[int, list[bytes]]] = []
        sources, targets, freed = [0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], set[int]()
        for slab in sources:
            bench.fill(0, slab, 6 * i + slab)
        for _ in range(8):
            if held and targets and rng.random() < 0.5:
                ids, bytes_ = held.pop(rng.randrange(len(held)))
                slab = targets.pop()
                bench.load(0, ids[0], [slab])
                bench.tier.complete_load(ids)
                freed.update(ids[0])
                expected.append((slab, bytes_))
            elif sources and (taken := bench.tier.prepare_store([1, 0])) is not None:
                slab = sources.pop()
                bench.tier.store(0, [slab], taken[0])
                held.append((taken, bench.read(0, slab)))
                num_used_again += taken[0][0] in freed
        assert all(bench.run().values())
        for slab, bytes_ in expected:
            assert bench.read(0, slab) == bytes_
        bench.tier.check_invariants([[i for ids, _ in held for i in ids[0]], []])
    assert num_used_again > 20


@every
def test_what_was_never_stored_is_not_brought_back(name: str) -> None:
    bench = Bench(name)
    ids = bench.tier.prepare_store([2, 0])
    assert ids is not None
    bench.fill(0, 0, 1)
    bench.fill(0, 5, 2)
    before = bench.read(0, 5)
    bench.tier.store(0, [0], ids[0][:1])
    move = bench.load(0, ids[0], [3, 5])
    assert bench.run() == {move: False}, "one block of two is missing: all of the load failed"
    assert bench.read(0, 5) == before
    move = bench.load(0, ids[0][::-1], [3, 5])
    assert bench.run() == {move: False}, "whichever of them it is"


def test_a_byte_that_changed_in_host_memory_is_a_failed_load() -> None:
    bench = Bench("host")
    ids = bench.tier.prepare_store([1, 0])
    assert ids is not None
    bench.fill(0, 0, 1)
    bench.tier.store(0, [0], ids[0])
    bench.run()
    store: Any = bench.storage.tiers[HOST]
    store.planes[0]["v"][ids[0][0] * GROUPS[0].pages_per_slab + 1, 3, 1, 2] += 1
    move = bench.load(0, ids[0], [5])
    assert bench.run() == {move: False}


# -- an engine that waits ----------------------------------------------------------------------------------------------


@dataclass
class SlowRank:
    """A rank on which late loads take a while, and some loads fail: what it brings back then is nothing at all.

    `delay`: steps until a load begins to write. `fails(move)`: whether that load does.
    """

    runner: Runner
    packed_file: str = ""
    delay: Callable[[], int] = lambda: 0
    fails: Callable[[int], bool] = lambda move: False
    steps: list[SchedulerOutput] = field(default_factory=list)
    waiting: list[tuple[int, list[AnyPageOp]]] = field(default_factory=list)

    def execute(self, output: SchedulerOutput) -> StepOutput:
        self.steps.append(output)
        lost: dict[int, bool] = {}
        ops: list[AnyPageOp] = []
        late: dict[int, list[AnyPageOp]] = {}
        for op in output.page_ops:
            if isinstance(op, LoadOp) and self.fails(op.move):
                lost[op.move] = False
            elif isinstance(op, LoadOp) and op.late:
                late.setdefault(op.move, []).append(op)
            else:
                ops.append(op)
        self.waiting += [(output.step + self.delay(), load) for load in late.values()]
        due = [load for at, load in self.waiting if at <= output.step]
        self.waiting = [(at, load) for at, load in self.waiting if at > output.step]
        ops += [op for load in due for op in load]
        result = self.runner.execute(msgspec.structs.replace(output, page_ops=ops))
        return msgspec.structs.replace(result, moves=result.moves | lost)


def engine(
    name: str, late: bool, k: Knobs, *, slots: bool = False, windows: Sequence[int | None] = (), offload: bool = False,
    **slowness: Any,
) -> tuple[EngineCore, SlowRank]:  # fmt: skip
    spec = fake_spec(slots=slots, windows=windows)
    plan = plan_for(spec, k)
    clock = MonotonicClock()
    storage = Storage(plan.groups, plan.num_slabs, k.block_size, host_slabs=plan.num_host_slabs, poison=True, tier=name)
    rows = RowStore(plan.groups, plan.num_slabs, k.block_size, VOCAB)
    sampler = Sampler(VOCAB)
    runner = Runner(FakeForward(plan.groups), rows, storage, sampler, clock=clock, depth=k.depth, strict=True)
    kv = KVManager(
        plan.groups, plan.num_slabs, k.block_size, prefix_cache=k.prefix_cache, host_slabs=plan.num_host_slabs,
        tier=name, offload=offload, step_tokens=plan.step_tokens, slot_checkpoint_tokens=k.checkpoint_tokens,
    )  # fmt: skip
    kv.swaps.tier.late = late
    scheduler = Scheduler(
        kv, make_policy(k.policy), max_num_seqs=k.max_num_seqs, max_num_batched_tokens=k.budget,
        block_size=k.block_size, preemption_mode="swap", conservativeness=0.0,
    )  # fmt: skip
    slow = SlowRank(runner, **slowness)
    rank = RankSpec(config={}, plan=plan, wire=k.wire)
    executor = InprocExecutor(rank, lambda spec, loading: slow, depth=k.depth)  # type: ignore[arg-type, return-value]
    return EngineCore(scheduler, kv, executor, clock, check_invariants=True), slow


def preempted(core: EngineCore, prompt: int = 22, **kw: Any) -> tuple[Any, Collector, Seq]:
    """A request that has computed its prompt and a token or two, and is swapped out by the next step."""
    r = request([3 + i % 20 for i in range(prompt)], **{"max_tokens": 8, **kw})
    core.add(r)
    collector = Collector()
    before = core.stats.num_sampled_tokens
    while core.stats.num_sampled_tokens < before + 2:
        collector.take(core.step())
    [seq] = core.scheduler.running
    assert seq.num_inflight == 0, "only then it is swapped"
    core.add(Control(kind="preempt", request_id=r.request_id))
    return r, collector, seq


KNOBS = Knobs(block_size=4, budget=64, host_blocks=64, prefix_cache="none")


@every
def test_a_sequence_waits_in_a_state_of_its_own_and_others_go_on(name: str) -> None:
    core, rank = engine(name, True, KNOBS, delay=lambda: 5)
    r, collector, seq = preempted(core)
    collector.take(core.step())
    assert core.stats.num_swaps == 1
    assert seq.status is Status.LOADING
    assert (seq.num_computed, seq.num_inflight) == (0, 0)
    other = request([5] * 9, max_tokens=3)
    core.add(other)
    ran = []
    while seq.status is Status.LOADING:
        collector.take(core.step())
        ran.append(len(rank.steps[-1].scheduled))
    assert ran[:3] == [1, 1, 1], "the newcomer overtakes the one that waits"
    assert 0 in ran, "when nobody else runs, steps without rows ask for news"
    assert len(ran) <= 6
    computed = sum(row.num_tokens for step in rank.steps for row in step.scheduled if row.seq_id == seq.seq_id)
    drain(core, collector)
    assert_idle(core)
    again = sum(row.num_tokens for step in rank.steps for row in step.scheduled if row.seq_id == seq.seq_id)
    assert again - computed == 8 - 2, "nothing was computed twice"
    for each in (r, other):
        assert collector.requests[each.request_id].tokens[0] == generate(fake_logits, each)[0]


@every
def test_a_load_in_the_step_makes_nobody_wait(name: str) -> None:
    core, rank = engine(name, False, KNOBS)
    r, collector, seq = preempted(core)
    collector.take(core.step())
    assert core.stats.num_swaps == 1
    assert seq.status is Status.RUNNING
    assert any(isinstance(op, LoadOp) for op in rank.steps[-1].page_ops)
    assert rank.steps[-1].scheduled[0].seq_id == seq.seq_id
    drain(core, collector)
    assert not core.kv.swaps.loads
    assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


@every
@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_memory_that_is_being_written_is_nobodys_until_the_load_is_reported(name: str, end: str) -> None:
    """Whoever waited is gone, by an abort or a preemption; its load still writes, and reads what was stored."""
    core, _ = engine(name, True, KNOBS, delay=lambda: 6)
    r, collector, seq = preempted(core)
    collector.take(core.step())
    held = [set(table.ids) for table in seq.tables]
    tier = core.kv.swaps.tier
    stored = [tier.num_free(g) for g in range(len(held))]
    assert seq.status is Status.LOADING
    core.add(Abort(request_id=r.request_id) if end == "abort" else Control(kind="preempt", request_id=r.request_id))
    others = [request([4 + i] * 30, max_tokens=4) for i in range(4)]
    for other in others:
        core.add(other)
    while core.kv.swaps.loads:
        collector.take(core.step())
        assert not any(s.load in core.kv.swaps.loads for s in core.scheduler.running)
        if core.kv.swaps.loads:
            for running in core.scheduler.running:
                for table, before in zip(running.tables, held, strict=True):
                    assert not before & set(table.ids), "somebody was given memory that a load writes"
            assert [tier.num_free(g) for g in range(len(held))] == stored
    drain(core, collector)
    assert_idle(core)
    for each in [*others, *([r] if end == "preempt" else [])]:
        assert collector.requests[each.request_id].tokens[0] == generate(fake_logits, each)[0]
    assert core.stats.num_failed_loads == 0


@every
def test_while_a_load_is_on_its_way_nobody_is_preempted_for_memory_that_will_come(name: str) -> None:
    """Two grow into each other's room. The youngest waits for its blocks: what it holds cannot be had before they are
    there, so the one in need waits for that rather than preempt it and then the other as well."""
    core, _ = engine(name, True, Knobs(block_size=4, num_blocks=14, budget=64, host_blocks=64, prefix_cache="none"),
                     delay=lambda: 12)  # fmt: skip
    load = [request([3 + i] * n, max_tokens=16) for i, n in enumerate((14, 14, 14))]
    collector = Collector()
    for r in load:
        core.add(r)
    collector.take(core.step())
    first, second, third = core.scheduler.running
    core.add(Control(kind="preempt", request_id=load[2].request_id))
    collector.take(core.step())
    assert third.status is Status.LOADING
    num_waits = 0
    while core.kv.swaps.loads:
        collector.take(core.step())
        num_waits += not (first.num_inflight or second.num_inflight) and core.kv.pools[0].num_free == 0
    assert num_waits > 2
    assert [s.num_preemptions for s in (first, second, third)] == [0, 0, 1]
    drain(core, collector)
    assert_idle(core)
    for r in load:
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


@every
def test_a_load_for_nobody_is_waited_for(name: str) -> None:
    """Its sequence was the only one and is gone. An engine that stopped here would hold its memory for ever."""
    core, _ = engine(name, True, KNOBS, delay=lambda: 4)
    r, collector, _ = preempted(core)
    collector.take(core.step())
    core.add(Abort(request_id=r.request_id))
    collector.take(core.step())
    assert not core.groups
    assert core.kv.swaps.loads
    assert core.has_work
    drain(core, collector, limit=6)
    assert_idle(core)
    assert core.kv.swaps.tier.num_free(0) == 64


@every
@both
@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_that_fails_is_a_miss(name: str, late: bool, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed again, whether the step that carried it has run rows over nothing or not."""
    # Who is promised a token is in flight in every step, and who is in flight is not swapped.
    monkeypatch.setattr("penstock.sched.scheduler.may_promise", lambda *_: False)
    knobs = Knobs(block_size=4, budget=64, host_blocks=64, depth=depth, wire=True)
    core, _ = engine(name, late, knobs, fails=lambda move: move == 0, delay=lambda: 2)
    load = [request([3 + i % 7 for i in range(17 + j)], max_tokens=12, temperature=1.0, seed=j) for j in range(3)]
    collector = Collector()
    for r in load:
        core.add(r)
    while core.stats.num_swaps < 2:  # not while a step works on it
        core.add(Control(kind="preempt", request_id=load[0].request_id))
        collector.take(core.step())
        core.kv.reset_prefix_cache()
    drain(core, collector)
    assert_idle(core)
    assert core.stats.num_failed_loads == 1
    for r in load:
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


@every
@both
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", ["full", "offload", "slots", "windows"])
@pytest.mark.sampled(8)
def test_no_token_changes_whatever_loads_do(name: str, late: bool, depth: int, model: str) -> None:
    """Under memory pressure, orders to preempt and aborts; loads take 0 to 4 steps, and every fifth one fails.

    In one step with the rows that read them, only loads of models without states fail: this model checks those.
    """
    rng = random.Random(depth)
    shape: dict[str, Any] = {
        "full": {}, "offload": {"offload": True}, "slots": {"slots": True}, "windows": {"windows": (None, 5)}
    }[model]  # fmt: skip
    may_fail = late or model in ("full", "offload")
    num_waits = num_failed = num_loaded = 0
    for prefix in ("hash", "radix") if model == "offload" else ("none", "radix"):
        knobs = Knobs(
            block_size=4, num_blocks=24, num_slots=8, budget=24, host_blocks=40, depth=depth, prefix_cache=prefix
        )
        core, _ = engine(
            name, late, knobs, delay=lambda: rng.randrange(5), fails=lambda move: may_fail and move % 5 == 2, **shape
        )
        load = [request([3 + i % 5] * rng.randrange(1, 30), max_tokens=20, temperature=1.0, seed=i) for i in range(16)]
        gone = set()
        collector, todo, orders = Collector(), list(load), 20
        for _ in range(4000):
            if todo and rng.random() < 0.5:
                core.add(todo.pop())
            if core.groups and orders and rng.random() < 0.3:
                orders -= 1
                core.add(Control(kind="preempt", request_id=rng.choice(sorted(core.groups))))
            if core.groups and rng.random() < 0.01:
                gone.add(rng.choice(sorted(core.groups)))
                core.add(Abort(request_id=max(gone & core.groups.keys(), default="")))
            collector.take(core.step())
            num_waits += any(s.status is Status.LOADING for s in core.scheduler.running)
            if not todo and not core.has_work:
                break
        assert_idle(core)
        assert not core.kv.swaps.loads
        assert core.stats.num_swaps > 0
        num_failed += core.stats.num_failed_loads
        num_loaded += core.kv.stats().num_loaded_blocks
        for r in load:
            if r.request_id not in gone:
                assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert (num_waits > 5) == late
    assert (num_failed > 0) == may_fail
    assert (num_loaded > 5) == (model == "offload")


# -- a prefix cache that reaches into a tier ---------------------------------------------------------------------------


def questions(n: int, *, beginnings: int = 6) -> list[Any]:
    """Requests one after the other, whose 24 first tokens are one of a few beginnings in turn."""
    return [request([5 + i % beginnings] * 24 + [3, 4 + i % 7], max_tokens=3) for i in range(n)]


@every
@both
@pytest.mark.parametrize("prefix", ["radix", "hash"])
@pytest.mark.sampled
def test_evicted_blocks_are_found_again_in_the_tier(name: str, late: bool, prefix: str) -> None:
    """Six beginnings of six blocks in a device of 16: the next one was always evicted, and is never computed again."""
    knobs = Knobs(block_size=4, num_blocks=16, budget=64, host_blocks=64, prefix_cache=prefix)
    core, rank = engine(name, late, knobs, offload=True, delay=lambda: 2)
    plain, ranked = engine(name, late, knobs)
    load = questions(24)
    for r in load:
        for each in (core, plain):
            collector = Collector()
            each.add(r)
            drain(each, collector)
            assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
            assert collector.requests[r.request_id].cached == (24 if each is core and r in load[6:] else 0)
    for each in (core, plain):
        assert_idle(each)
    computed, all_of_it = (sum(row.num_tokens for s in r.steps for row in s.scheduled) for r in (rank, ranked))
    assert all_of_it - computed == 18 * 24
    stats = core.kv.stats()
    assert stats.num_loaded_blocks == 18 * 6
    assert stats.num_offloaded_blocks >= stats.num_loaded_blocks
    assert counters_of(core.kv)["tier_read_bytes:host"] == stats.num_loaded_blocks * core.kv.swaps.block_bytes > 0
    assert stats.num_prefix_hit_tokens == 18 * 24
    core.kv.reset_prefix_cache()
    core.kv.check_invariants([])
    assert core.kv.swaps.tier.num_free(0) == 64


@every
@both
def test_copies_that_are_bad_are_computed_again_once(name: str, late: bool) -> None:
    """Who meets them computes instead, and what it computes takes their place."""
    knobs = Knobs(block_size=4, num_blocks=16, budget=64, host_blocks=64)
    bad = True
    core, _ = engine(name, late, knobs, offload=True, fails=lambda move: bad)
    for i, r in enumerate(questions(18)):
        bad = i < 12
        collector = Collector()
        core.add(r)
        drain(core, collector)
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert core.stats.num_failed_loads == 6, "once for each beginning"
    assert_idle(core)


@every
def test_the_tier_keeps_what_was_used_last_and_makes_room_for_those_who_wait(name: str) -> None:
    knobs = Knobs(block_size=4, num_blocks=16, budget=64, host_blocks=12)
    core, _ = engine(name, False, knobs, offload=True)
    load = questions(12)
    for r in load:
        collector = Collector()
        core.add(r)
        drain(core, collector)
    tier = core.kv.swaps.tier
    assert tier.num_free(0) == 0
    assert core.kv.stats().num_loaded_blocks == 0, "six beginnings in turn: always the next one has just been given up"
    r, collector, _ = preempted(core)
    collector.take(core.step())
    assert core.stats.num_swaps == 1
    drain(core, collector)
    assert_idle(core)
    assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


def test_operations_of_a_load_say_where_from_and_whether_it_is_late() -> None:
    bench = Bench("host", late=True)
    bench.tier.store(0, [3], [1])
    bench.outbox.zero_slabs(0, [3])
    bench.tier.load(0, [1], [2], 7)
    assert bench.outbox.drain()[1] == [
        StoreOp(0, 6, 2, 2, HOST), PageOp(0, -1, 6, 2), LoadOp(0, 2, 4, 2, 7, True, HOST)
    ]  # fmt: skip
