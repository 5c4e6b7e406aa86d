"""Runs of slabs, the contiguous managers on their own, and storage that exists where it is written."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.base.errors import ConfigError, EngineError
from penstock.core.cache_spec import CacheGroup, CacheSpec, PlaneSpec
from penstock.core.page_ops import PageOp
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.core.sequence import Sequence
from penstock.kv.block_pool import BlockPool
from penstock.kv.contiguous import ContiguousManager
from penstock.runner.lazy import LazyStorage
from penstock.runner.storage import Storage

GROUP = CacheGroup(
    0, CacheSpec("paged", (PlaneSpec("k", 2, 8, "float32"), PlaneSpec("v", 2, 8, "bfloat16"))), (0, 1, 2)
)


def sequence(number: int, prompt: int, max_tokens: int) -> Sequence:
    rules = TokenRules()
    request = Request(request_id=str(number), prompt_token_ids=[1] * prompt, rules=rules, max_tokens=max_tokens)
    return Sequence(number, request, number)


def test_first_fit_is_the_lowest_run_that_brute_force_finds() -> None:
    rng = random.Random(1)
    for _ in range(200):
        pool = BlockPool(24, 2)
        taken = [pool.alloc_run(s, 1)[0] for s in range(24) if rng.random() < 0.5]
        own = [s for s in taken if rng.random() < 0.3]
        n = rng.randrange(1, 7)
        usable = [pool.refs[s] == 0 or s in own for s in range(24)]
        expected = next((s for s in range(25 - n) if all(usable[s : s + n])), None)
        assert pool.find_run(n, own) == expected
        if expected is not None:
            free = pool.num_free
            run = pool.alloc_run(expected, n, own)
            assert run == list(range(expected, expected + n))
            assert pool.num_free == free - len(set(run) - set(own))
            assert all(pool.refs[s] == 1 for s in {*taken, *run})
        pool.check_invariants()


def test_a_run_that_is_not_free_is_our_own_bug() -> None:
    pool = BlockPool(8, 1)
    pool.alloc_run(3, 2)
    with pytest.raises(AssertionError, match="not all free"):
        pool.alloc_run(2, 2)


def test_admission_without_a_run_is_refused_and_gaps_are_stranded() -> None:
    kv = ContiguousManager([GROUP], [10], 4, max_model_len=40, reserve="oracle")
    first, gone, last, head = (sequence(i, 8, 5) for i in range(4))  # 12 slots are written: 3 blocks each
    for seq in (first, gone, last):
        assert kv.can_admit(seq, kv.match(seq), 8)
        kv.admit(seq, kv.match(seq))
    kv.release(gone)
    head.request = sequence(9, 8, 9).request  # 4 blocks: 4 are free, but not in one run
    assert kv.pools[0].num_free == 4
    assert not kv.can_admit(head, kv.match(head), 8)
    assert kv.num_stranded(head) == 4
    with pytest.raises(EngineError, match="no run of 4 blocks"):
        kv.admit(head, kv.match(head))
    kv.release(last)
    assert kv.num_stranded(head) == 0
    kv.admit(head, kv.match(head))
    assert head.tables[0].ids == [3, 4, 5, 6]
    kv.check_invariants([first, head])


def test_lazy_storage_does_what_storage_does() -> None:
    """The same operations on both, at every offset against pages of memory; poison shows what was never handed out."""
    rng = random.Random(3)
    eager, lazy = Storage((GROUP,), [40], 3), LazyStorage((GROUP,), [40], 3)
    for step in range(300):
        count = rng.choice([1, 3, 30])
        dst = rng.randrange(0, 121 - count)
        for storage in (eager, lazy):
            for array in storage.planes[0].values():
                array[dst, step % 3] = step
        src = rng.choice([-1, -1, (dst + count) % (121 - count)])
        if src >= 0 and abs(src - dst) < count:
            continue
        for storage in (eager, lazy):
            storage.apply([PageOp(0, src, dst, count)])
        for name, array in eager.planes[0].items():
            assert np.array_equal(array, lazy.planes[0][name])


def test_lazy_storage_takes_and_returns_memory_by_the_page() -> None:
    storage = LazyStorage((GROUP,), [4096], 16)
    assert storage.num_bytes == 4096 * 3 * 16 * 16 * (4 + 2)
    assert storage.resident_bytes() == 0
    plane = storage.planes[0]["k"]  # 1024 bytes a page of the cache
    plane[5] = 1
    assert storage.resident_bytes() == 4096
    plane[8:16] = 1
    assert storage.resident_bytes() == 3 * 4096
    storage.apply([PageOp(0, -1, 6, 10)])
    assert storage.resident_bytes() == 2 * 4096 - 4096 + 4 * 2048 - 4096, "k keeps the page of 4...7; v wrote 6 and 7"
    assert plane[5].all()
    assert not plane[6:].any()


def test_addresses_that_cannot_be_had_are_refused_with_advice() -> None:
    huge = CacheGroup(0, CacheSpec("paged", (PlaneSpec("k", 1 << 20, 1 << 20, "float32"),)), (0,))
    with pytest.raises(ConfigError, match=r"kv_allocator: no \d+ bytes of addresses .* lower max_num_seqs"):
        LazyStorage((huge,), [1 << 10], 1)
