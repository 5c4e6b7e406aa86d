"""The KV manager: one rule at a time, with small numbers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.core.batch import TableUpdate
from penstock.core.page_ops import PageOp
from penstock.core.sampling import TokenRules
from penstock.kv.block_pool import BlockPool
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.manager import KVManager
from penstock.kv.prefix.hash_chain import HashChain
from penstock.kv.prefix.radix import RadixCache
from penstock.kv.room import Room, Want
from tests.unit.kv.test_kv_model import computed, make_groups, make_seq, run, start, started

CACHES = ["radix", "hash"]


def make_kv(num_slabs: int = 16, block_size: int = 4, **kwargs: Any) -> KVManager:
    return KVManager(make_groups(2), [num_slabs], block_size, **kwargs)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="hash, none, radix"):
        make_kv(prefix_cache="tree")
    with pytest.raises(ConfigError, match="fifo, flops, lfu, lru"):
        make_kv(eviction="mru")


def test_new_blocks_are_zeroed_and_told_once() -> None:
    kv = make_kv()
    seq = started(kv, 7, list(range(6)))
    # two slabs of two pages, neighbours, so one operation
    assert kv.drain() == ([TableUpdate(7, 0, 0, [0, 1])], [PageOp(0, -1, 0, 4)])
    assert kv.drain() == ([], [])
    assert kv.grow(seq, 9)
    assert kv.drain() == ([TableUpdate(7, 0, 2, [2])], [PageOp(0, -1, 4, 2)])
    kv.check_invariants([seq])


def test_decoding_within_a_block_plans_nothing() -> None:
    class Counting(RadixCache):
        calls = 0

        def insert(self, *args: Any) -> Any:
            self.calls += 1
            return super().insert(*args)

    cache = Counting(32, EVICTION_POLICIES.get("lru")())
    kv = KVManager(make_groups(2), [8], 32, prefix_cache=cache)
    seq = computed(kv, 0, list(range(40)))
    kv.drain()
    assert cache.calls == 1
    for token in range(23):
        seq.token_ids.append(token)
        assert kv.grow(seq, seq.num_known)
        seq.num_computed += 1
        kv.commit(seq)
    assert cache.calls == 1
    assert kv.drain() == ([], [])
    seq.token_ids.append(99)
    assert kv.grow(seq, 64)
    seq.num_computed += 1
    kv.commit(seq)
    assert cache.calls == 2


def test_grow_is_all_or_nothing() -> None:
    kv = make_kv(4)
    a = started(kv, 0, list(range(8)))
    b = started(kv, 1, list(range(50, 57)))
    kv.drain()
    assert kv.grow(b, 8)
    assert not kv.grow(b, 9)
    assert kv.drain() == ([], [])
    assert b.tables[0].num_blocks == 2
    kv.release(a)
    assert kv.grow(b, 16)
    assert not kv.grow(b, 17)
    kv.check_invariants([b])


def test_a_released_sequence_is_never_told_about() -> None:
    kv = make_kv()
    a = started(kv, 0, [1, 2, 3])
    b = started(kv, 1, [4, 5, 6])
    kv.release(a)
    tables, _ = kv.drain()
    assert [t.seq_id for t in tables] == [1]
    assert (a.tables, a.node, a.num_computed, a.num_cached) == ([], None, 0, 0)
    kv.release(a)  # owning nothing, it may be released again
    assert start(kv, a)
    tables, _ = kv.drain()
    assert tables == [TableUpdate(0, 0, 0, [0])]
    kv.check_invariants([a, b])


@pytest.mark.parametrize("cache", CACHES)
def test_B05_a_second_request_skips_the_prefix(cache: str) -> None:
    kv = make_kv(prefix_cache=cache)
    prompt = list(range(11))
    a = computed(kv, 0, prompt)
    b = started(kv, 1, [*prompt[:9], 99, 98])
    assert b.num_computed == b.num_cached == 8
    assert b.tables[0].ids[:2] == a.tables[0].ids[:2]
    # A prompt known to the last token still computes one: the logits of the last are wanted.
    c = started(kv, 2, prompt[:8])
    assert c.num_cached == 4
    kv.check_invariants([a, b, c])
    stats = kv.stats()
    assert stats.num_prefix_query_tokens == 11 + 11 + 8
    assert stats.num_prefix_hit_tokens == 12
    for seq in (a, b, c):
        kv.release(seq)
    again = make_seq(3, prompt)
    assert kv.match(again).num_tokens == 8  # blocks outlive their sequences
    kv.check_invariants([])


@pytest.mark.parametrize("cache", CACHES)
def test_B05_equal_blocks_computed_twice_are_kept_once(cache: str) -> None:
    kv = make_kv(prefix_cache=cache)
    a = started(kv, 0, list(range(9)))
    b = started(kv, 1, list(range(9)))  # before a is computed: nothing to find yet
    assert b.num_cached == 0
    kv.drain()
    free = kv.stats().groups[0].free
    run(kv, a)
    run(kv, b)
    assert b.tables[0].ids[:2] == a.tables[0].ids[:2]
    assert b.tables[0].ids[2] != a.tables[0].ids[2]
    assert kv.drain() == ([TableUpdate(1, 0, 0, a.tables[0].ids[:2])], [])
    assert kv.stats().groups[0].free == free + 2
    kv.check_invariants([a, b])


def test_B05_a_collision_is_a_miss() -> None:
    cache = HashChain(4, EVICTION_POLICIES.get("lru")(), lambda parent, tokens: b"same")
    kv = make_kv(prefix_cache=cache)
    a = computed(kv, 0, list(range(12)))
    kv.check_invariants([a])  # only the first of three colliding blocks is kept
    same, other = make_seq(1, list(range(12))), make_seq(2, list(range(20, 32)))
    assert kv.match(same).num_tokens == 4
    assert kv.match(other).num_tokens == 0
    assert start(kv, other)
    run(kv, other)
    kv.check_invariants([a, other])
    kv.release(a)
    kv.release(other)
    kv.check_invariants([])
    assert kv.stats().groups[0].evictable == 1


def test_B05_a_collision_adopts_no_orphans() -> None:
    """Evicting a parent alone would let another parent with the same hash lead to children of the first."""
    names = {b"\x01": b"P", b"\x02": b"P", b"\x03": b"C"}  # blocks of token 1 and of token 2 collide
    cache = HashChain(1, EVICTION_POLICIES.get("fifo")(), lambda parent, tokens: names[tokens[:1]])
    kv = make_kv(3, 1, prefix_cache=cache, eviction="fifo")
    a = computed(kv, 0, [1, 3])
    kv.release(a)
    b = started(kv, 1, [2], num_tokens=2)  # needs to evict one block: the child, although the parent is older
    assert kv.stats().num_evicted_blocks == 1
    assert kv.match(make_seq(2, [1, 3, 0])).num_tokens == 1
    kv.check_invariants([b])


@pytest.mark.parametrize("cache", CACHES)
def test_namespaces_and_taints_do_not_mix(cache: str) -> None:
    kv = make_kv(32, prefix_cache=cache)
    prompt = list(range(9))
    kinds: list[dict[str, Any]] = [{}, {"namespace": b"x"}, {"taint": "lossy"}, {"namespace": b"x", "taint": "lossy"}]
    for i, kind in enumerate(kinds):
        seq = make_seq(i, prompt, **kind)
        assert kv.match(seq).num_tokens == 0
        assert start(kv, seq)
        run(kv, seq)
    for i, kind in enumerate(kinds):
        assert kv.match(make_seq(10 + i, prompt, **kind)).num_tokens == 8
    # namespace and taint are told apart even if their bytes run together
    assert kv.match(make_seq(20, prompt, namespace=b"xlossy")).num_tokens == 0


def test_what_became_lossy_is_not_found() -> None:
    kv = make_kv()
    seq = computed(kv, 0, list(range(17)), num_computed=6)
    seq.taint_start = 6
    run(kv, seq)
    clean = make_seq(1, list(range(17)))
    assert kv.match(clean).num_tokens == 4
    # nor does the lossy sequence, resumed, find clean blocks where its own were lossy
    assert start(kv, clean)
    run(kv, clean)
    kv.release(seq)
    assert kv.match(seq).num_tokens == 4
    kv.check_invariants([clean])


def test_a_fork_of_a_lossy_sequence_is_lossy() -> None:
    kv = make_kv()
    seq = computed(kv, 0, list(range(6)), num_computed=5)
    seq.taint_start = 5
    run(kv, seq)
    child = make_seq(1, list(range(9)))
    assert kv.fork(seq, child)
    assert kv.grow(child, 9)
    run(kv, child)
    assert kv.match(make_seq(2, list(range(9)))).num_tokens == 4


def test_prompt_logprobs_never_read_the_cache() -> None:
    kv = make_kv()
    computed(kv, 0, list(range(9)))
    b = make_seq(1, list(range(9)), rules=TokenRules(num_prompt_logprobs=0))
    assert kv.match(b).num_tokens == 0
    assert start(kv, b)
    assert kv.stats().num_prefix_query_tokens == 9


def test_B04_samples_share_the_prompt_and_copy_what_they_write() -> None:
    kv = make_kv(32)
    parent = computed(kv, 0, list(range(10)))
    kv.drain()
    children = [make_seq(i, list(range(10))) for i in range(1, 4)]
    for child in children:
        assert kv.fork(parent, child)
    family = [parent, *children]
    assert kv.stats().groups[0].used == 3  # one copy of the prompt for four samples
    kv.drain()
    for i, seq in enumerate(family):
        seq.token_ids.append(100 + i)
        assert kv.grow(seq, 11)
    kv.check_invariants(family)
    assert kv.stats().num_cow_copies == 3  # the last one owns the tail alone
    tables, ops = kv.drain()
    tails = [seq.tables[0].ids[2] for seq in family]
    assert len(set(tails)) == 4
    assert ops == [PageOp(0, 2 * tails[3], 2 * tail, 2) for tail in tails[:3]]
    assert tables == [TableUpdate(seq.seq_id, 0, 2, seq.tables[0].ids[2:]) for seq in family[:3]]
    assert kv.stats().groups[0].used == 6


@pytest.mark.parametrize("cache", ["radix", "hash", "none"])
def test_B04_ten_thousand_random_operations_leave_no_reference(cache: str) -> None:
    rng = Random(44)
    kv = KVManager(make_groups(2), [60], 4, prefix_cache=cache)
    live: list[Any] = []
    for i in range(10_000):
        action = rng.randrange(10)
        if (action == 0 or not live) and len(live) < 12:
            seq = make_seq(i, [rng.randrange(2) for _ in range(rng.randint(1, 14))])
            if start(kv, seq):
                run(kv, seq)
                live.append(seq)
        elif action < 3 and live and len(live) < 12:
            child = make_seq(i, [0])
            parent = rng.choice(live)
            child.token_ids = parent.token_ids[:]
            assert kv.fork(parent, child)
            live.append(child)
        elif action == 3 and live:
            kv.release(live.pop(rng.randrange(len(live))))
        elif action == 4 and rng.random() < 0.2 and live:
            kv.make_ragged(rng.choice(live), 0)
        elif live:
            seq = rng.choice(live)
            if seq.num_known < 40 and kv.grow(seq, seq.num_known + 1):
                seq.token_ids.append(rng.randrange(2))
                run(kv, seq)
            else:
                live.remove(seq)
                kv.release(seq)
        if i % 97 == 0:
            kv.check_invariants(live)
            kv.drain()
    assert kv.stats().num_cow_copies > 500
    for seq in live:
        kv.release(seq)
    kv.check_invariants([])
    kv.reset_prefix_cache()
    assert kv.pools[0].refs == [0] * 60
    assert kv.pools[0].page_refs == {}
    assert kv.stats().groups[0].free == 60


def test_matched_blocks_do_not_count_as_room() -> None:
    kv = make_kv(4)
    a = computed(kv, 0, list(range(12)))
    kv.release(a)
    assert kv.stats().groups[0].evictable == 3
    b = make_seq(1, [*range(9), 50])
    match = kv.match(b)
    assert match.num_tokens == 8
    assert kv.can_admit(b, match, 16)  # 2 matched + 1 free + 1 evicted
    assert not kv.can_admit(b, match, 17)
    kv.admit(b, match)
    assert kv.grow(b, 16)
    assert not kv.grow(b, 17)
    kv.check_invariants([b])


def test_a_match_that_went_stale_is_looked_up_again() -> None:
    kv = make_kv(4)
    a = computed(kv, 0, list(range(12)))
    kv.release(a)
    b, c = make_seq(1, list(range(13))), make_seq(2, [70])
    match = kv.match(b)
    assert match.num_tokens == 12
    assert start(kv, c, 8)  # evicts one of the matched blocks
    kv.admit(b, match)
    assert b.num_computed == 8
    kv.check_invariants([b, c])


def test_failed_growth_evicts_nothing() -> None:
    kv = make_kv(4)
    a = computed(kv, 0, list(range(8)))
    kv.release(a)
    b = started(kv, 1, [9])
    assert not kv.grow(b, 17)
    assert kv.stats().num_evicted_blocks == 0


def test_a_reset_forgets_and_what_ran_before_it_stays_out() -> None:
    kv = make_kv()
    a = computed(kv, 0, list(range(10)), num_computed=5)
    kv.reset_prefix_cache()
    run(kv, a)
    assert kv.match(make_seq(1, list(range(10)))).num_tokens == 0
    child = make_seq(2, list(range(10)))
    assert kv.fork(a, child)
    kv.check_invariants([a, child])
    kv.release(a)
    kv.release(child)
    assert kv.stats().groups[0].free == 16
    assert start(kv, a)
    run(kv, a)
    assert kv.match(make_seq(3, list(range(10)))).num_tokens == 8
    kv.check_invariants([a])


def test_ragged_tables_own_their_pages() -> None:
    kv = make_kv(8)
    seq = computed(kv, 0, list(range(9)))
    kv.drain()
    slabs = list(seq.tables[0].ids)
    assert kv.make_ragged(seq, 0)
    assert kv.make_ragged(seq, 0)  # already
    layers = seq.tables[0].layers
    assert seq.tables[0].ids == []
    assert [len(pages) for pages in layers] == [3, 3]
    tables, ops = kv.drain()
    assert tables == [TableUpdate(0, 0, 0, layers[0], 0), TableUpdate(0, 0, 0, layers[1], 1)]
    assert ops == [PageOp(0, slabs[b] * 2 + i, layers[i][b], 1) for b in range(3) for i in range(2)]
    kv.check_invariants([seq])
    stats = kv.stats().groups[0]
    assert (stats.used, stats.evictable) == (3, 2)  # its cached blocks are nobody's now
    child = make_seq(1, list(range(9)))
    assert kv.fork(seq, child)
    kv.drain()
    assert kv.grow(child, 13)
    tables, ops = kv.drain()
    assert kv.stats().num_cow_copies == 2  # the shared tail, once per layer
    assert [(op.src, op.count) for op in ops if op.src >= 0] == [(layers[0][2], 1), (layers[1][2], 1)]
    child.token_ids.extend(range(4))
    run(kv, child)
    kv.check_invariants([seq, child])
    assert kv.match(make_seq(2, list(child.token_ids))).num_tokens == 8  # nothing new of it entered
    kv.release(seq)
    kv.release(child)
    kv.check_invariants([])
    assert kv.stats().groups[0].used == 0


def test_room_is_counted_in_pages_rounded_up() -> None:
    pool = BlockPool(2, 3)
    cache = RadixCache(1, EVICTION_POLICIES.get("lru")())
    entry, _ = cache.acquire(b"", None, 0, 0)
    slab = pool.alloc_slab()
    assert slab is not None
    entry, _, _ = cache.insert(entry, bytes(4), [(slab,)])
    cache.release(entry)
    assert pool.alloc_pages(3) is not None
    room = Room((0,), (), [pool], cache)
    assert not room.reserve([Want(0, 0, 4)])
    assert room.num_evicted_blocks == 0
    assert room.reserve([Want(0, 0, 1)])
    assert pool.num_free_pages == 3


def test_ragged_needs_room() -> None:
    kv = make_kv(5)
    seq = started(kv, 0, list(range(9)))
    assert not kv.make_ragged(seq, 0)
    assert seq.tables[0].layers is None
    kv.check_invariants([seq])


def test_what_a_step_in_flight_saw_is_neither_free_nor_evictable() -> None:
    kv = make_kv(4)
    a = started(kv, 0, list(range(10)))
    run(kv, a)  # two cached blocks and a private tail
    kv.drain()
    kv.submitted(1)
    kv.release(a)
    stats = kv.stats().groups[0]
    assert (stats.free, stats.evictable, stats.quarantined, stats.used, kv.reclaiming) == (1, 0, 1, 2, True)
    b = make_seq(1, [50])
    assert not start(kv, b, 8)
    assert start(kv, b)
    kv.check_invariants([b])
    kv.submitted(2)
    kv.retired(1)
    stats = kv.stats().groups[0]
    assert (stats.free, stats.evictable, stats.quarantined, stats.used, kv.reclaiming) == (1, 2, 0, 1, False)
    # step 2 cannot have seen them: they can be had while it is in flight
    assert kv.grow(b, 16)
    kv.check_invariants([b])
