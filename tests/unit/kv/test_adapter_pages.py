"""One pool for keys and values and for adapters: who has which block, who gives one up."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from penstock.core.adapter import AdapterRef, namespace_of
from penstock.core.page_ops import AdapterOp
from penstock.core.sampling import TokenRules
from penstock.core.sequence import Sequence
from penstock.kv.adapter_pages import AdapterLimits, blocks_of
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.manager import KVManager
from penstock.sched.adapters import WithAdapters
from penstock.sched.policy.fcfs import Fcfs
from tests.unit.kv.test_kv_model import make_groups, make_seq, run, start

UNITS = 4


def make_kv(num_slabs: int = 16, most: int = 8, groups: Any = None, **more: Any) -> KVManager:
    groups = groups or make_groups(2)
    return KVManager(groups, [num_slabs] * len(groups), 4, adapters=AdapterLimits(UNITS, most), **more)


def ref_of(number: int, num_blocks: int = 2) -> AdapterRef:
    return AdapterRef(b"%d" % number, str(number), num_units=num_blocks * UNITS - 1)


def seq_of(seq_id: int, prompt: list[int], ref: AdapterRef | None) -> Sequence:
    space = namespace_of(b"", ref)
    return make_seq(seq_id, prompt, rules=TokenRules(adapter=ref), namespace=space)


def entered(kv: KVManager, seq_id: int, prompt: list[int], ref: AdapterRef | None) -> Sequence:
    seq = seq_of(seq_id, prompt, ref)
    assert start(kv, seq)
    run(kv, seq)
    return seq


def told(kv: KVManager) -> list[tuple[str, int]]:
    """Adapters that the rank is told of, and how many blocks they have."""
    ops = kv.drain()[1]
    return [(op.adapter.path, len(op.blocks or ())) for op in ops if isinstance(op, AdapterOp)]


def groups_of(kv: KVManager) -> tuple[int, int, int]:
    (group,) = kv.stats().groups
    assert group.total == group.free + group.used + group.evictable + group.quarantined
    return group.free, group.used, group.evictable


def test_J26_keys_and_values_have_less_by_what_adapters_have() -> None:
    kv = make_kv()
    assert groups_of(kv) == (16, 0, 0)
    a = entered(kv, 0, list(range(7)), ref_of(1, 3))
    assert told(kv) == [("1", 3)]
    assert groups_of(kv) == (16 - 2 - 3, 5, 0)
    b = entered(kv, 1, list(range(50, 55)), ref_of(1, 3))
    assert told(kv) == [], "it is there"
    assert groups_of(kv) == (9, 7, 0)
    assert not start(kv, seq_of(3, list(range(80, 100)), ref_of(2, 5))), "five blocks and five more, of nine"
    longest = make_seq(2, list(range(100, 137)))
    assert not start(kv, longest), "37 tokens are ten blocks, and nine are left"
    kv.check_invariants([a, b])
    kv.release(a)
    assert groups_of(kv)[2] == 1, "b has the adapter still"
    kv.release(b)
    free, used, evictable = groups_of(kv)
    assert (used, free + evictable) == (0, 16)
    assert kv.stats().num_adapter_blocks == 3
    assert start(kv, longest)
    kv.check_invariants([longest])


@pytest.mark.parametrize("units", [(1, 1), (UNITS, 1), (UNITS + 1, 2), (0, 1)])
def test_J26_an_adapter_takes_whole_blocks(units: tuple[int, int]) -> None:
    ref = AdapterRef(b"a", "a", num_units=units[0])
    assert blocks_of(ref, UNITS) == units[1]
    kv = make_kv()
    entered(kv, 0, [1], ref)
    assert kv.stats().num_adapter_blocks == units[1]


def test_J26_a_block_of_an_adapter_is_a_slab_of_every_full_group() -> None:
    kv = make_kv(groups=make_groups(2, latent=1))
    seq = entered(kv, 0, [1, 2, 3], ref_of(1))
    (op,) = [op for op in kv.drain()[1] if isinstance(op, AdapterOp)]
    assert op.blocks is not None
    assert [len(block) for block in op.blocks] == [2, 2]
    assert [(g.free, g.used) for g in kv.stats().groups] == [(13, 3), (13, 3)]
    kv.check_invariants([seq])


def test_J26_an_adapter_is_loaded_at_the_cost_of_cached_texts() -> None:
    kv = make_kv(8)
    kv.release(entered(kv, 0, list(range(24)), None))
    assert groups_of(kv) == (2, 0, 6)
    seq = entered(kv, 1, [90, 91], ref_of(1, 4))
    assert groups_of(kv) == (0, 5, 3)
    assert kv.stats().num_evicted_blocks == 3
    kv.check_invariants([seq])


def test_J26_texts_grow_at_the_cost_of_adapters_that_nobody_has() -> None:
    kv = make_kv(8, prefix_cache="none")
    kv.release(entered(kv, 0, [1], ref_of(1, 4)))
    other = entered(kv, 1, [1], ref_of(2, 2))
    told(kv)
    grown = seq_of(2, list(range(20)), None)
    assert start(kv, grown)
    assert told(kv) == [("1", 0)], "the one that is idle goes, and its place in the list is before what is zeroed"
    assert groups_of(kv) == (0, 8, 0)
    assert not kv.grow(grown, 21), "the other one is in use"
    kv.check_invariants([other, grown])


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu", "priority"])
@pytest.mark.parametrize("first", ["text", "adapter"])
def test_J26_texts_and_adapters_leave_in_one_order(name: str, first: str) -> None:
    """Whichever came first, and was used first, goes first."""
    kv = make_kv(8, eviction=name)
    for i, what in enumerate(("text", "adapter") if first == "text" else ("adapter", "text")):
        if what == "text":
            kv.release(entered(kv, i, list(range(12)), None))
        else:
            kv.release(entered(kv, i, [1], ref_of(1, 3)))
    assert groups_of(kv) == (2, 0, 6)
    seq = entered(kv, 2, list(range(50, 59)), None)
    held, texts = kv.stats().num_adapters_held, kv.stats().num_evicted_blocks
    assert (held, texts) == ((1, 1) if first == "text" else (0, 0))
    kv.check_invariants([seq])


def test_J26_what_a_step_in_flight_reads_is_not_given_up() -> None:
    kv = make_kv(8, prefix_cache="none")
    seq = entered(kv, 0, [1], ref_of(1, 4))
    kv.drain()
    kv.submitted(0)
    kv.release(seq)
    assert kv.reclaiming
    assert groups_of(kv)[2] == 0
    late = seq_of(1, list(range(20)), None)
    assert not start(kv, late)
    kv.check_invariants([])
    kv.retired(0)
    assert groups_of(kv) == (4, 0, 4)
    assert start(kv, late)
    kv.check_invariants([late])


def test_J26_there_are_no_more_adapters_than_places() -> None:
    kv = make_kv(64, most=2)
    a, b = entered(kv, 0, [1], ref_of(1)), entered(kv, 1, [1], ref_of(2))
    third = seq_of(2, [1], ref_of(3))
    assert not start(kv, third)
    kv.release(b)
    kv.drain()
    assert start(kv, third)
    assert told(kv) == [("2", 0), ("3", 2)], "the place is free before it is taken"
    kv.check_invariants([a, third])


def test_J26_reading_ahead_takes_what_is_free_or_idle_and_nothing_from_those_ahead() -> None:
    kv = make_kv(8)
    assert kv.adapters is not None
    running = entered(kv, 0, list(range(8)), ref_of(1, 1))
    waiting = [ref_of(n) for n in (2, 3, 4)]
    assert kv.adapters.ahead(waiting) == waiting[:2], "five blocks are free"
    assert kv.stats().num_adapter_blocks == 5
    assert kv.adapters.ahead(waiting) == waiting[:2]
    kv.check_invariants([running])
    grown = seq_of(1, list(range(60, 72)), None)
    assert start(kv, grown), "what was read ahead is idle"
    kv.check_invariants([running, grown])


def test_J26_those_who_wait_are_read_ahead_once() -> None:
    kv, policy = make_kv(8), WithAdapters(Fcfs(), 1)
    running = entered(kv, 0, list(range(8)), ref_of(1, 1))
    waiting = [seq_of(i, [1], ref_of(i)) for i in (2, 3, 4)]
    told(kv)
    found = []
    for _ in range(3):
        policy.begin_step(0.0, kv)
        policy.order([running], waiting)
        found += told(kv)
    assert found == [("2", 2), ("3", 2)]
    grown = seq_of(9, list(range(60, 72)), None)
    assert start(kv, grown)
    told(kv)
    policy.order([running, grown], waiting)
    assert told(kv) == []
    kv.release(grown)
    policy.order([running], waiting)
    assert told(kv) == [("4", 2)], "what had to make room is not read again before its turn"


def test_J26_the_audit_finds_a_block_that_both_have() -> None:
    kv = make_kv()
    assert kv.adapters is not None
    seq = entered(kv, 0, list(range(6)), ref_of(1))
    kv.check_invariants([seq])
    slab = kv.adapters.held[0].blocks[0][0]
    seq.tables[0].ids[-1] = slab
    kv.pools[0].refs[slab] += 1
    with pytest.raises(AssertionError, match=f"slab {slab} of group 0 has an adapter's numbers and is in use"):
        kv.check_invariants([seq])


@pytest.mark.parametrize("name", [*EVICTION_POLICIES.names()])
@pytest.mark.parametrize("cache", ["radix", "hash", "none"])
def test_J26_whatever_comes_nobody_has_what_another_has(name: str, cache: str) -> None:
    """Random arrivals, growth, forks, ends and steps in flight; the books are audited after each."""
    for seed in range(3):
        rng, kv = Random(f"{name} {cache} {seed}"), make_kv(24, most=5, eviction=name, prefix_cache=cache)
        assert kv.adapters is not None
        refs = [None, *(ref_of(n, 1 + n % 4) for n in range(9))]
        live: list[Sequence] = []
        step, retired, number, most, gone = 0, 0, 0, 0, 0
        for _ in range(150):
            what = rng.random()
            if what < 0.35 and len({s.request.rules.adapter for s in live}) < 5:
                seq = seq_of(number, [rng.randrange(3) for _ in range(rng.randrange(1, 24))], rng.choice(refs))
                number += 1
                if start(kv, seq):
                    run(kv, seq)
                    live.append(seq)
            elif what < 0.5 and live:
                seq = rng.choice(live)
                seq.token_ids.extend([7] * rng.randrange(1, 6))
                if kv.grow(seq, seq.num_known):
                    run(kv, seq)
                else:
                    kv.release(seq)
                    live.remove(seq)
            elif what < 0.6 and live:
                parent = rng.choice(live)
                child = seq_of(number, parent.token_ids.tolist(), parent.request.rules.adapter)
                number += 1
                if kv.fork(parent, child):
                    live.append(child)
            elif what < 0.75 and live:
                seq = live.pop(rng.randrange(len(live)))
                kv.release(seq)
            elif what < 0.85:
                kv.adapters.ahead([ref for ref in rng.sample(refs, 4) if ref is not None])
            elif what < 0.87:
                kv.reset_prefix_cache()
            elif what < 0.94:
                gone += sum(not n for _, n in told(kv))
                kv.submitted(step)
                step += 1
            elif retired < step:
                kv.retired(retired)
                retired += 1
            kv.check_invariants(live)
            most = max(most, kv.stats().num_adapters_held)
        assert most == 5
        assert gone >= 1
        for seq in live:
            kv.release(seq)
        kv.retired(step - 1)
        kv.check_invariants([])
        kv.adapters.give_up_all()
        assert kv.stats().num_adapter_blocks == 0
        (group,) = kv.stats().groups
        assert group.free + group.evictable == group.total
