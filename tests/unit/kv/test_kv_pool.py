"""BlockPool: counts, broken slabs that join again, epochs."""

from __future__ import annotations

from random import Random

import pytest

from penstock.kv.block_pool import BROKEN, BlockPool


def test_hand_out_is_last_in_first_out_and_starts_ascending() -> None:
    pool = BlockPool(4, 2)
    assert pool.alloc_slabs(3) == [0, 1, 2]
    pool.unref(1)
    assert pool.alloc_slab() == 1
    assert pool.alloc_slab() == 3
    assert pool.alloc_slab() is None
    assert pool.num_free == 0
    pool.check_invariants()


def test_all_or_nothing() -> None:
    pool = BlockPool(2, 3)
    assert pool.alloc_slabs(3) is None
    assert pool.alloc_pages(7) is None
    assert pool.num_free == 2
    assert pool.num_free_pages == 6
    assert pool.alloc_pages(6) is not None
    assert pool.alloc_page() is None
    pool.check_invariants()


def test_a_slab_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(1, 1)
    slab = pool.alloc_slab()
    assert slab is not None
    pool.ref(slab)
    pool.unref(slab)
    assert pool.num_free == 0
    pool.unref(slab)
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="more often than it was taken"):
        pool.unref(slab)
    pool.refs[slab] = 0
    with pytest.raises(AssertionError, match="while it is free"):
        pool.ref(slab)


def test_broken_slabs_join_again() -> None:
    pool = BlockPool(3, 4)
    pages = pool.alloc_pages(5)
    assert pages is not None
    assert len(set(pages)) == 5
    assert pool.num_free == 1  # two are broken
    assert pool.num_free_pages == 7
    assert sorted({p // 4 for p in pages}) == [0, 1]
    assert pool.refs.count(BROKEN) == 2
    pool.ref_pages(pages[:1])
    pool.unref_pages(pages)
    pool.check_invariants()
    assert pool.num_free == 2  # the page with a second reference keeps its slab broken
    pool.unref_pages(pages[:1])
    assert pool.num_free == 3
    assert pool.num_free_pages == 12
    assert BROKEN not in pool.refs
    pool.check_invariants()


def test_pages_of_broken_slabs_go_before_whole_slabs_are_broken() -> None:
    pool = BlockPool(2, 3)
    first = pool.alloc_page()
    assert first is not None
    assert pool.alloc_slab() == 1
    rest = pool.alloc_pages(2)
    assert rest is not None
    assert {first, *rest} == {0, 1, 2}


def test_what_steps_in_flight_saw_waits_for_them() -> None:
    pool = BlockPool(2, 2)
    slab, page = pool.alloc_slab(), pool.alloc_page()
    assert slab is not None
    assert page is not None
    pool.submitted(1)
    pool.submitted(2)
    pool.unref(slab)
    pool.unref_pages([page])
    assert (pool.num_free, pool.num_quarantined, pool.waiting) == (0, 1, True)
    assert pool.num_free_pages == 1  # the other page of the broken slab
    pool.check_invariants()
    pool.retired(1)  # tagged with the newest submitted step, so step 2 has to retire as well
    assert pool.num_free == 0
    pool.submitted(3)  # came later and cannot have seen it
    pool.retired(2)
    assert (pool.num_free, pool.num_quarantined, pool.waiting) == (2, 0, False)
    pool.check_invariants()


def test_unseen_slabs_and_quiet_pools_do_not_wait() -> None:
    pool = BlockPool(2, 1)
    a, b = pool.alloc_slab(), pool.alloc_slab()
    assert a is not None
    assert b is not None
    pool.submitted(5)
    pool.unref(a, unseen=True)
    assert pool.num_free == 1
    pool.retired(5)
    pool.unref(b)
    assert pool.num_free == 2


def test_B04_random_work_leaves_nothing_behind() -> None:
    rng = Random(4)
    pool = BlockPool(12, 3)
    slabs: list[int] = []
    pages: list[int] = []
    step = 0
    inflight: list[int] = []
    for i in range(5000):
        action = rng.randrange(8)
        if action == 0 and (slab := pool.alloc_slab()) is not None:
            slabs.append(slab)
        elif action == 1 and (page := pool.alloc_page()) is not None:
            pages.append(page)
        elif action == 2 and slabs:
            slabs.append(rng.choice(slabs))
            pool.ref(slabs[-1])
        elif action == 3 and pages:
            pages.append(rng.choice(pages))
            pool.ref_pages(pages[-1:])
        elif action in (4, 5) and slabs:
            pool.unref(slabs.pop(rng.randrange(len(slabs))))
        elif action == 6 and pages:
            pool.unref_pages([pages.pop(rng.randrange(len(pages)))])
        elif action == 7:
            if inflight and rng.random() < 0.5:
                pool.retired(inflight.pop(0))
            elif len(inflight) < 2:
                step += 1
                inflight.append(step)
                pool.submitted(step)
        if i % 10 == 0:
            pool.check_invariants()
            for slab in set(slabs):
                assert pool.refs[slab] == slabs.count(slab)
            assert pool.page_refs == {page: pages.count(page) for page in set(pages)}
    pool.unref_slabs(slabs)
    pool.unref_pages(pages)
    for number in inflight:
        pool.retired(number)
    pool.check_invariants()
    assert pool.num_free == 12
    assert pool.refs == [0] * 12
    assert pool.page_refs == {}
