"""B17: blocks lie on one rank each, full homes borrow, and the ledger of who owes what to whom always balances."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import PageOp
from penstock.kv.allocators import paged
from penstock.kv.block_pool import BlockPool
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.ledger import Ledger
from penstock.kv.placed import PlacedManager
from penstock.kv.ranked_pool import RankedPool, slabs_of
from tests.unit.kv.test_kv_machine import PHASES, Machine
from tests.unit.kv.test_kv_model import Config, computed, make_groups, make_seq, run, start, started


def placed_groups(size: int, *layers: int) -> tuple[CacheGroup, ...]:
    return tuple(
        msgspec.structs.replace(g, spec=msgspec.structs.replace(g.spec, ranks=size, whole=True))
        if g.spec.kind == "paged" else g
        for g in make_groups(*layers)
    )  # fmt: skip


def manager(size: int, per_rank: int, **options: Any) -> PlacedManager:
    return PlacedManager(placed_groups(size, 1), [size * per_rank], 2, **options)


def ranks(kv: PlacedManager, seq: Any) -> list[int]:
    return [slab % kv.ledger.size for slab in seq.tables[0].ids]


class Lending(Machine):
    """The life of an engine, and at its end nobody owes anybody anything."""

    borrowed = 0

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        kv = self.world.kv
        assert isinstance(kv, PlacedManager)
        type(self).borrowed += kv.ledger.num_borrowed
        self.world.close()
        for seq in list(self.world.seqs):
            kv.release(seq)
        assert kv.ledger.debts == []
        assert not any(rank.lent or rank.borrowed for rank in kv.rank_blocks())


@pytest.mark.parametrize("prefix", ["radix", "hash", "none"])
@pytest.mark.parametrize(("size", "layers"), [(2, (2,)), (3, (1, 1)), (2, (1, 0, 1))])
def test_B17_the_ledger_balances_at_every_step(prefix: str, size: int, layers: tuple[int, ...]) -> None:
    """Admission, growth, forks, hits, eviction, preemption and ends: after each the books are counted again, and every
    sequence reads back its own history."""
    groups = placed_groups(size, *layers)

    def config(eviction: str, block_size: int, depth: int, per_rank: int) -> Config:
        num = [size * per_rank if g.spec.kind == "paged" else 8 for g in groups]
        return Config(prefix, eviction, block_size, depth, groups, num)

    class Configured(Lending):
        config_strategy = st.builds(
            config, st.sampled_from(EVICTION_POLICIES.names()), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
            st.sampled_from([4, 7, 12]),
        )  # fmt: skip

    run_state_machine_as_test(
        Configured,
        settings=settings(
            max_examples=8, stateful_step_count=20, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), phases=PHASES,
        ),
    )  # fmt: skip
    assert Configured.borrowed > 20, "hardly anybody borrowed"


def test_B17_a_sequence_stays_at_home_until_that_is_full_then_borrows_where_most_is_free() -> None:
    kv = manager(3, 4, prefix_cache="none")
    other = started(kv, 0, list(range(4)))  # two blocks of rank 0
    long = make_seq(1, list(range(8)))
    assert start(kv, long)
    assert kv.ledger.home(0) == 0
    assert kv.ledger.home(1) == 1, "where all of it has room"
    assert ranks(kv, long) == [1, 1, 1, 1]
    run(kv, long)
    for token in range(8):
        long.token_ids.append(token)
        assert kv.grow(long, long.num_known)
        run(kv, long)
    assert ranks(kv, long) == [1, 1, 1, 1, 2, 2, 0, 2], "of those with as many free ones the lowest"
    assert kv.ledger.debts == [(1, 1, 0, 1), (1, 1, 2, 3)]
    assert [(r.free, r.lent, r.borrowed) for r in kv.rank_blocks()] == [(1, 1, 0), (0, 0, 4), (1, 3, 0)]
    assert kv.stats().num_borrowed_blocks == kv.stats().num_lent_blocks == 4
    kv.check_invariants([other, long])
    kv.release(long)
    assert kv.ledger.debts == []
    assert kv.stats().num_lent_blocks == 0
    assert kv.stats().num_borrowed_blocks == 4, "since start"
    kv.check_invariants([other])


def test_B17_who_finds_blocks_elsewhere_owes_them_and_what_only_the_cache_has_nobody_owes() -> None:
    kv = manager(2, 6)
    first = computed(kv, 0, list(range(9)))
    assert kv.ledger.home(0) == 0
    second = computed(kv, 1, [*range(8), 50])
    assert kv.ledger.home(1) == 0, "most of it is there"
    fill = started(kv, 2, [100 + i for i in range(12)])
    assert ranks(kv, fill) == [1] * 6
    kv.release(first)
    kv.release(second)
    assert kv.ledger.debts == []
    run(kv, fill)
    kv.release(fill)
    kv.check_invariants([])
    third = make_seq(3, [*range(8), *range(200, 212)])
    assert start(kv, third)
    assert kv.ledger.home(3) == 0
    assert sorted(set(ranks(kv, third))) == [0, 1]
    owed = sum(rank == 1 for rank in ranks(kv, third))
    assert kv.ledger.debts == [(3, 0, 1, owed)]
    kv.check_invariants([third])


def test_B17_a_fork_owes_what_its_parent_does_and_copies_where_the_original_is() -> None:
    kv = manager(2, 4, prefix_cache="none")
    filler = started(kv, 0, list(range(2)))
    parent = computed(kv, 1, list(range(11)))  # six blocks, four at home; the last is half full
    assert ranks(kv, parent) == [1, 1, 1, 1, 0, 0]
    child = make_seq(2, list(range(11)))
    assert kv.fork(parent, child)
    assert kv.ledger.debts == [(1, 1, 0, 2), (2, 1, 0, 2)], "a block that two share is lent to each"
    kv.drain()
    child.token_ids.append(7)
    assert kv.grow(child, 12)
    copies = [op for op in kv.drain()[1] if isinstance(op, PageOp) and op.src >= 0]
    assert [(op.src % 2, op.dst % 2) for op in copies] == [(0, 0)], "no bytes go from rank to rank"
    assert kv.ledger.debts == [(1, 1, 0, 2), (2, 1, 0, 2)]
    kv.check_invariants([filler, parent, child])
    kv.release(parent)
    assert kv.ledger.debts == [(2, 1, 0, 2)]
    kv.check_invariants([filler, child])


def test_B17_without_room_beside_the_original_nothing_is_copied_and_nothing_left_behind() -> None:
    kv = manager(2, 2, prefix_cache="none")
    parent = computed(kv, 0, list(range(3)))
    child = make_seq(1, list(range(3)))
    assert kv.fork(parent, child)
    assert ranks(kv, parent) == [0, 0]
    child.token_ids.append(7)
    before = list(child.tables[0].ids)
    assert not kv.grow(child, 4), "rank 1 is free, but the half block is on rank 0"
    assert child.tables[0].ids == before
    kv.check_invariants([parent, child])
    kv.release(parent)
    assert kv.grow(child, 4), "nobody shares it any more"


def test_B17_the_audit_finds_books_that_do_not_say_what_tables_do() -> None:
    kv = manager(2, 4, prefix_cache="none")
    seq = computed(kv, 0, list(range(12)))
    kv.check_invariants([seq])
    kv.ledger._lent[1][0] -= 1
    with pytest.raises(AssertionError, match="rank 1 has lent 1 blocks to rank 0, which owes 2"):
        kv.check_invariants([seq])
    kv.ledger._lent[1][0] += 1
    kv.ledger._held[0][1] += 1
    with pytest.raises(AssertionError, match="sequence 0 has"):
        kv.check_invariants([seq])
    kv.ledger._held[0][1] -= 1
    kv.ledger.leave(0)
    with pytest.raises(AssertionError, match="do not stand in the ledger"):
        kv.check_invariants([seq])
    kv.release(seq)
    kv.ledger.enter(5, 0, [1])
    with pytest.raises(AssertionError, match="own nothing and stand in the ledger"):
        kv.check_invariants([])


def test_a_ledger_gives_back_no_more_than_there_is() -> None:
    ledger = Ledger(2)
    ledger.enter(0, 0, [0, 1])
    ledger.give_back(0, [1])
    assert ledger.debts == []
    with pytest.raises(AssertionError, match="gives back more"):
        ledger.give_back(0, [1])
    with pytest.raises(AssertionError, match="already"):
        ledger.enter(0, 1, [])
    ledger.leave(0)
    ledger.leave(0)  # whoever owns nothing may be released again


def test_slabs_of_ranks_are_handed_out_and_come_back_as_in_one_pool() -> None:
    rng = Random(3)
    for size, num in ((2, 11), (3, 12), (5, 3)):
        pool = RankedPool(num, 2, size)
        assert sum(slabs_of(num, rank, size) for rank in range(size)) == num
        held: list[int] = []
        step = 0
        for _ in range(400):
            what = rng.random()
            if what < 0.45:
                n = rng.randrange(4)
                rank = rng.randrange(size)
                free, all_free = pool.num_free_on(rank), pool.num_free
                slabs = pool.alloc_on(rank, n) if what < 0.15 else pool.alloc_near(rank, n)
                if slabs is None:
                    assert n > (free if what < 0.15 else all_free)
                else:
                    assert len(set(slabs)) == n
                    if what < 0.15:
                        assert {slab % size for slab in slabs} <= {rank}
                    else:
                        assert sum(slab % size == rank for slab in slabs) >= min(n, free), "home first"
                    held += slabs
            elif what < 0.85 and held:
                slab = held.pop(rng.randrange(len(held)))
                pool.unref(slab)
            elif what < 0.9:
                pool.submitted(step)
                step += 1
            elif what < 0.95 and step:
                pool.retired(step - 1)
            else:
                pool.freshen()
            pool.check_invariants()
            assert pool.num_free + pool.num_quarantined + len(held) == num
            touched = num - pool.num_fresh
            assert all(slab < touched for slab in held), "what is fresh was never handed out"


def test_memory_that_is_kept_back_is_kept_back_on_every_rank() -> None:
    pool = RankedPool(8, 1, 2)
    pool.num_kept_back = 5  # 3, 4, 5, 6, 7: two of rank 0, three of rank 1
    assert [pool.num_free_on(0), pool.num_free_on(1), pool.num_free] == [2, 1, 3]
    assert [pool.num_slabs_on(0), pool.num_slabs_on(1)] == [2, 1]
    assert sorted(pool.alloc_near(1, 3) or []) == [0, 1, 2]
    assert pool.alloc_slabs(1) is None


def test_whoever_has_blocks_on_ranks_gets_the_manager_that_keeps_a_ledger() -> None:
    how = {"max_model_len": 8, "max_num_seqs": 1, "prefix_cache": "none"}
    assert isinstance(paged(placed_groups(2, 1), [4], 2, **how), PlacedManager)
    plain = paged(make_groups(1), [4], 2, **how)
    assert not isinstance(plain, PlacedManager)
    assert type(plain.pools[0]) is BlockPool
