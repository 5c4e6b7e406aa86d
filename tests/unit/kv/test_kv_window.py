"""Window groups of the KV manager, law by law (rows C84, G26). The machine of `test_kv_machine` plays them all at once.

Block size 4 and window 5: a token at a block boundary sees one block before it.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.core.batch import GONE
from penstock.core.cache_spec import CacheSpec
from penstock.core.page_ops import LoadOp, StoreOp
from penstock.core.sequence import Sequence
from penstock.kv.allocators import contiguous, virtual
from penstock.kv.manager import KVManager
from penstock.kv.window_pool import WindowPool
from tests.unit.kv.test_kv_model import PAGED, computed, make_groups, make_seq, run, start, started

WINDOW = make_groups(0, windows=(5,))
MIXED = make_groups(2, windows=(5, 5))
S = 4
TEXT = list(range(100, 140))


def make(num_slabs: int = 20, prefix: str = "radix", step_tokens: int | None = None) -> KVManager:
    return KVManager(WINDOW, [num_slabs], S, prefix_cache=prefix, step_tokens=step_tokens)


def pool_of(kv: KVManager, group: int = 0) -> WindowPool:
    pool = kv.pools[group]
    assert isinstance(pool, WindowPool)
    return pool


def compute(kv: KVManager, seq: Sequence, chunk: int = S) -> None:
    """Compute all that is known, growing by `chunk` tokens at a time."""
    while seq.lag:
        n = min(chunk, seq.lag)
        assert kv.grow(seq, seq.num_computed + n)
        run(kv, seq, seq.num_computed + n)
        kv.check_invariants([seq])


def begin(kv: KVManager, seq: Sequence) -> int:
    """Admit as the scheduler does; returns the tokens found in the cache."""
    match = kv.match(seq)
    assert kv.can_admit(seq, match, seq.num_known)
    kv.admit(seq, match)
    kv.restore(seq)
    return seq.num_cached


def told(kv: KVManager, tokens: list[int] = TEXT, seq_id: int = 0) -> None:
    """Run a sequence and end it: the prefix cache has all its blocks, idle from the first to the last."""
    seq = make_seq(seq_id, tokens)
    begin(kv, seq)
    compute(kv, seq)
    kv.release(seq)


def found(kv: KVManager, num_tokens: int, seq_id: int = 99) -> int:
    """Tokens of the cache for somebody who shares so many with TEXT."""
    return kv.match(make_seq(seq_id, [*TEXT[:num_tokens], 1, 2, 3])).num_tokens


@pytest.mark.parametrize(
    ("window", "computed", "first"), [(5, 0, 0), (5, 7, 0), (5, 8, 1), (5, 11, 1), (5, 12, 2), (1, 8, 2), (4, 7, 1)]
)
def test_what_a_window_still_shows(window: int, computed: int, first: int) -> None:
    """By the definition: the token at `computed` sees window - 1 tokens before it and itself."""
    spec = CacheSpec("window", PAGED.planes, window)
    assert spec.first_block(computed, S) == first
    assert first == min(p // S for p in range(max(0, computed - window + 1), computed + 1))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 32])
def test_the_most_blocks_of_a_sequence_are_enough_and_hardly_too_many(size: int) -> None:
    for window in (1, 2, 5, 9, 31):
        for step in (1, 2, 8, 33):
            spec = CacheSpec("window", PAGED.planes, window)
            seen = max(-(-(c + step) // size) - spec.first_block(c, size) for c in range(200))
            assert seen <= spec.most_blocks(10**6, step, size) <= seen + 1
            assert spec.most_blocks(3, step, size) <= -(-3 // size)
    assert CacheSpec("paged", PAGED.planes).most_blocks(100, 1, size) == -(-100 // size)


def test_layers_of_equal_window_share_a_group() -> None:
    groups = make_groups(1, windows=(5, 8, 5))
    assert [(g.spec.kind, g.spec.window, len(g.layers)) for g in groups] == [
        ("paged", None, 1), ("window", 5, 2), ("window", 8, 1),
    ]  # fmt: skip


def test_G26_blocks_before_the_window_are_given_up_at_commit() -> None:
    kv = make(num_slabs=3, prefix="none", step_tokens=S)  # ceil((5 - 1 + 4) / 4) + 1
    seq = make_seq(0, TEXT)
    begin(kv, seq)
    compute(kv, seq)
    assert seq.tables[0].ids[:9] == [GONE] * 9
    assert seq.tables[0].held == [seq.tables[0].ids[9]]
    updates = [u for u in kv.drain()[0] if GONE in u.ids]
    assert sorted(u.start for u in updates) == list(range(9)), "the rank hears of every block that is gone"
    assert kv.stats().groups[0].free == 2
    kv.release(seq)
    assert kv.stats().groups[0].free == 3


def test_full_groups_keep_what_windows_give_up() -> None:
    kv = KVManager(MIXED, [20, 3], S, prefix_cache="none", step_tokens=S)
    seq = make_seq(0, TEXT)
    begin(kv, seq)
    compute(kv, seq)
    assert len(seq.tables[0].held) == 10
    assert len(seq.tables[1].held) == 1


def test_admission_asks_for_what_is_held_at_one_time() -> None:
    kv = make(num_slabs=3, step_tokens=S)
    seq = make_seq(0, TEXT)
    assert kv.can_admit(seq, kv.match(seq), 40)
    assert not kv.can_admit(seq, kv.match(seq), 44), "the margin for samples comes on top"
    assert not make(num_slabs=2, step_tokens=S).can_admit(seq, kv.match(seq), 40)
    assert not make(num_slabs=9).can_admit(seq, kv.match(seq), 40), "nobody said how small the steps are"


def test_a_sequence_alone_is_admitted_again_whatever_the_cache_holds() -> None:
    """The slabs it is given from the cache count among those it may hold: a pool made for one sequence serves it."""
    kv = make(num_slabs=3, step_tokens=S)
    told(kv, TEXT[:20])
    seq = make_seq(1, TEXT)
    assert begin(kv, seq) == 20
    compute(kv, seq)
    assert pool_of(kv).num_hollowed > 0


def test_freed_blocks_wait_for_steps_that_saw_them() -> None:
    kv = make(num_slabs=3, prefix="none")
    seq = make_seq(0, TEXT[:12])
    begin(kv, seq)
    assert kv.grow(seq, 8)
    kv.submitted(0)
    seq.num_computed = 4  # step 0 was [0, 4)
    assert kv.grow(seq, 12)
    kv.submitted(1)
    kv.retired(0)
    seq.num_computed = 8
    kv.commit(seq)  # step 1 is in flight and shows block 0
    assert kv.stats().groups[0].quarantined == 1
    assert kv.reclaiming
    kv.retired(1)
    assert kv.stats().groups[0].free == 1


@pytest.mark.parametrize("hold", [False, True])
def test_idle_slabs_rest_until_steps_that_saw_them_have_retired(hold: bool) -> None:
    kv = make(num_slabs=3)
    seq = make_seq(0, TEXT[:12])
    begin(kv, seq)
    assert kv.grow(seq, 12)
    kv.submitted(0)
    seq.num_computed = 8
    kv.commit(seq)
    pool = pool_of(kv)
    assert pool.num_idle == 0
    assert kv.reclaiming
    other = make_seq(1, [*TEXT[:4], 7])
    if hold:  # somebody finds it while it rests: then it is not idle afterwards either
        kv.admit(other, kv.match(other))
    assert not kv.grow(seq, 16), "what a step in flight shows cannot be had yet"
    kv.retired(0)
    assert pool.num_idle == (0 if hold else 1)
    assert kv.grow(seq, 16) != hold
    kv.check_invariants([seq, other])


def test_a_handle_lives_until_its_slab_is_needed() -> None:
    kv = make(num_slabs=11)
    told(kv)
    assert [found(kv, n) for n in (4, 20, 40)] == [4, 20, 40]
    pool_of(kv).make_room(5)  # blocks 0 to 4, idle longest
    assert pool_of(kv).num_free == 6
    assert [found(kv, n) for n in (4, 20, 24, 40)] == [0, 0, 24, 40]
    kv.check_invariants([])


@pytest.mark.parametrize("seed", range(20))
def test_what_can_be_used_of_a_prefix_follows_the_definition(seed: int) -> None:
    """Random blocks are alive: a prefix counts if all that its next token sees is, in every group."""
    rng = random.Random(seed)
    windows = (9, 14)
    kv = KVManager(make_groups(0, windows=windows), [40, 40], S)
    path = []
    alive: list[set[int]] = [set(), set()]
    for block in range(12):
        names = []
        for g in (0, 1):
            (handle,) = pool_of(kv, g).new_handles(1)
            if rng.random() < 0.8:
                slab = pool_of(kv, g).alloc_slab()
                assert slab is not None
                pool_of(kv, g).keep(handle, slab)
                alive[g].add(block)
            names.append(handle)
        path.append(tuple(names))

    def usable(n: int) -> bool:
        seen = [{p // S for p in range(max(0, n * S - w + 1), n * S)} for w in windows]
        return all(blocks <= there for blocks, there in zip(seen, alive, strict=True))

    want = [max(m for m in range(n + 1) if usable(m)) for n in range(13)]
    assert kv._windows.longest_visible(path) == want


def test_G26_a_hit_may_be_shorter_than_what_is_known() -> None:
    """Blocks 0, 1, 3 and 4 are hollow: whoever shares five blocks can use three, behind which block 2 is there."""
    kv = make(num_slabs=11)
    told(kv)
    told(kv, [*TEXT[:12], 7], seq_id=1)  # uses block 2, which is idle last from now on
    assert pool_of(kv).num_free == 1
    pool_of(kv).make_room(4)
    assert found(kv, 20) == 12
    seq = make_seq(2, [*TEXT[:20], 8])
    assert begin(kv, seq) == 12
    assert seq.tables[0].ids[:2] == [GONE] * 2
    compute(kv, seq)
    kv.release(seq)
    assert found(kv, 20) == 20, "what was computed again is found again"


def test_checkpoints_and_windows_must_both_be_there() -> None:
    kv = KVManager(make_groups(0, 0, 1, windows=(5,)), [9, 30], S, slot_checkpoint_tokens=8)
    told(kv)
    windows = pool_of(kv, 1)
    assert found(kv, 40) == 40
    windows.make_room(7)  # blocks 7, 8 and 9 stay
    # Behind 40, 36 and 32 tokens there are a checkpoint and all that is seen; behind 24 only a checkpoint.
    assert [found(kv, n) for n in (40, 36, 35, 30)] == [40, 36, 32, 0]


def test_a_match_is_looked_up_again_if_it_was_hollowed() -> None:
    kv = make(num_slabs=11)
    told(kv)
    seq = make_seq(1, [*TEXT, 1])
    match = kv.match(seq)
    assert match.num_tokens == 40
    pool_of(kv).make_room(10)
    assert kv.can_admit(seq, match, 41)
    kv.admit(seq, match)
    assert seq.num_cached == 0
    assert kv.grow(seq, 41)


def test_what_was_matched_is_not_given_up_for_its_own_sequence() -> None:
    """Of three slabs two are idle and one of these is matched: one free, one idle, so two can be had, not three."""
    kv = make(num_slabs=3)
    told(kv, TEXT[:8])
    assert pool_of(kv).num_idle == 2
    seq = make_seq(1, [*TEXT[:8], *range(12)])
    match = kv.match(seq)
    assert match.num_tokens == 8
    assert kv.can_admit(seq, match, 16)
    assert not kv.can_admit(seq, match, 17)


def test_hollow_blocks_come_alive_with_the_slabs_of_whoever_computes_them_again() -> None:
    kv = make(num_slabs=11)
    told(kv)
    pool_of(kv).make_room(10)
    assert found(kv, 40) == 0
    told(kv, seq_id=1)
    assert found(kv, 40) == 40
    assert len(kv.cache.contents()[0]) == 10, "no block is there twice"
    kv.check_invariants([])


def test_two_that_compute_the_same_end_on_the_same_slabs() -> None:
    kv = make()
    a, b = make_seq(0, TEXT[:9]), make_seq(1, TEXT[:9])
    for seq in (a, b):
        assert begin(kv, seq) == 0
    for seq in (a, b):
        compute_alone = seq.num_known
        assert kv.grow(seq, compute_alone)
        run(kv, seq)
    assert a.tables[0].ids[:2] == b.tables[0].ids[:2] == [GONE, a.tables[0].ids[1]]
    kv.check_invariants([a, b])


def test_a_reset_takes_the_handles_and_leaves_the_running() -> None:
    kv = make()
    seq = make_seq(0, TEXT)
    begin(kv, seq)
    compute(kv, seq)
    kv.reset_prefix_cache()
    assert kv.stats().groups[0].used == 1
    assert pool_of(kv).alive() == {}
    seq.token_ids.extend(range(20))
    compute(kv, seq)
    assert found(kv, 40) == 0


def test_windows_are_hollowed_without_evicting_full_blocks() -> None:
    """A window that is short takes nothing from the full groups."""
    kv = KVManager(MIXED, [40, 4], S, step_tokens=S)
    told(kv)
    told(kv, list(range(40)), seq_id=1)
    assert kv.stats().num_evicted_blocks == 0
    assert kv.stats().groups[0].evictable == 20
    assert pool_of(kv, 1).num_hollowed > 10
    assert found(kv, 40) == 0, "its end was hollowed by the second text"


def test_evicting_a_block_frees_its_window_too() -> None:
    kv = KVManager(MIXED, [10, 20], S)
    told(kv)
    assert [g.evictable for g in kv.stats().groups] == [10, 10]
    seq = started(kv, 1, list(range(16)))
    assert [g.evictable for g in kv.stats().groups] == [6, 6]
    kv.check_invariants([seq])


def test_a_fork_shares_what_is_seen() -> None:
    kv = make(num_slabs=6)
    parent, child = make_seq(0, TEXT[:18]), make_seq(1, TEXT[:18])
    begin(kv, parent)
    compute(kv, parent)
    assert kv.fork(parent, child)
    assert child.tables[0].ids == parent.tables[0].ids == [GONE] * 3 + parent.tables[0].held
    child.token_ids.append(5)
    assert kv.grow(child, 19)
    assert child.tables[0].ids[:4] == parent.tables[0].ids[:4]
    assert child.tables[0].ids[4] != parent.tables[0].ids[4], "the tail is copied before it is written"
    run(kv, child)
    kv.check_invariants([parent, child])
    kv.release(parent)
    kv.release(child)
    assert kv.stats().groups[0].used == 0


def test_ragged_tables_take_and_give_up_pages_block_by_block() -> None:
    kv = KVManager(make_groups(0, windows=(5, 5)), [6], S, prefix_cache="none", step_tokens=8)
    seq = make_seq(0, TEXT)
    begin(kv, seq)
    assert kv.grow(seq, 18)
    run(kv, seq, 18)
    assert kv.make_ragged(seq, 0), "two blocks are there, whatever lies before them"
    assert [pages[:3] for pages in seq.tables[0].layers] == [[GONE] * 3] * 2
    compute(kv, seq)
    assert [pages[:9] for pages in seq.tables[0].layers] == [[GONE] * 9] * 2
    child = make_seq(1, TEXT)
    assert kv.fork(seq, child)
    kv.check_invariants([seq, child])
    kv.release(seq)
    kv.release(child)
    assert kv.stats().groups[0].free == 6


@pytest.mark.parametrize("prefix", ["none", "radix"])
def test_G26_a_swap_moves_what_is_seen(prefix: str) -> None:
    kv = KVManager(MIXED, [30, 30], S, prefix_cache=prefix, host_slabs=[12, 2], step_tokens=S)
    seq = make_seq(0, TEXT[:39])
    begin(kv, seq)
    compute(kv, seq)
    kv.drain()
    assert kv.swap_out(seq)
    assert Counter(op.group for op in kv.drain()[1] if isinstance(op, StoreOp)) == {0: 10, 1: 2}
    copied = [g.slab_bytes(S) for g in MIXED]
    assert kv.swaps.num_bytes(39) == 10 * copied[0] + 2 * copied[1]
    if prefix == "radix":  # a hit brings the full blocks back; the window's last one only the host has
        pool_of(kv, 1).make_room(pool_of(kv, 1).num_idle - 2)
    seq.token_ids.extend([1, 2])
    hit = begin(kv, seq)
    assert hit == (0 if prefix == "none" else 36)
    assert seq.num_computed == 39
    assert seq.tables[1].ids[:8] == [GONE] * 8
    ops = Counter(op.group for op in kv.drain()[1] if isinstance(op, LoadOp))
    assert ops == ({0: 10, 1: 2} if prefix == "none" else {0: 1, 1: 1})
    compute(kv, seq)
    kv.check_invariants([seq])


def forget(kv: KVManager, num_blocks: int) -> None:
    """Somebody takes all blocks, and goes before anything is computed: the prefix cache has given up all it had."""
    filler = make_seq(99, [1] * (num_blocks * S))
    assert start(kv, filler, num_blocks * S)
    kv.release(filler)
    assert kv.cache.contents() == ([], [])


def test_after_a_swap_blocks_that_are_gone_enter_the_cache_hollow() -> None:
    """Their full groups are kept, and whoever computes them again fills in the windows."""
    kv = KVManager(MIXED, [30, 30], S, host_slabs=[12, 2])
    seq = make_seq(0, TEXT)
    begin(kv, seq)
    compute(kv, seq)
    assert kv.swap_out(seq)
    forget(kv, 30)
    seq.token_ids.extend([1, 2, 3, 4])
    assert begin(kv, seq) == 0
    compute(kv, seq)
    assert len(kv.cache.contents()[0]) == 11
    assert len(pool_of(kv, 1).alive()) == 2, "what the host brought back, and what was computed behind it"
    assert [found(kv, n) for n in (20, 40)] == [0, 40]
    kv.release(seq)
    told(kv, TEXT[:20], seq_id=1)
    assert found(kv, 20) == 20
    assert len(kv.cache.contents()[0]) == 11


def test_after_a_swap_a_sequence_goes_over_to_blocks_that_others_have() -> None:
    """It has been away while somebody computed the same: of what it sees it takes theirs, of what is gone nothing."""
    kv = KVManager(MIXED, [40, 40], S, host_slabs=[12, 2])
    seq = make_seq(0, TEXT)
    begin(kv, seq)
    compute(kv, seq)
    assert kv.swap_out(seq)
    forget(kv, 40)
    seq.token_ids.extend(range(8))
    assert begin(kv, seq) == 0
    other = computed(kv, 1, seq.token_ids.tolist())
    theirs = set(pool_of(kv, 1).alive().values())
    assert kv.grow(seq, 48)
    assert not set(seq.tables[1].held) & theirs
    run(kv, seq, 48)
    kv.check_invariants([seq, other])
    assert set(seq.tables[1].held) <= theirs
    assert len(kv.cache.contents()[0]) == 12


@pytest.mark.parametrize("make_baseline", [contiguous, virtual])
def test_the_baselines_keep_windows_whole(make_baseline: object) -> None:
    kv = make_baseline(MIXED, [64, 64], S, max_model_len=44, max_num_seqs=2, step_tokens=4)  # type: ignore[operator]
    seq = make_seq(0, TEXT)
    begin(kv, seq)
    compute(kv, seq)
    assert GONE not in seq.tables[1].ids
    assert kv.num_held(seq) >= 10
