"""Tables whose lines have dropped tokens: what a selection leaves, what it frees, and how such a table grows."""

from __future__ import annotations

import random

import pytest

from penstock.core.page_ops import PackOp
from penstock.kv.block_pool import BROKEN, BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.lines import apply_lines, cut_lines, num_missing, own_pages, plan_lines
from penstock.kv.outbox import Outbox

S = 4


def table_of(pool: BlockPool, num_blocks: int) -> BlockTable:
    return BlockTable(list(pool.alloc_slabs(num_blocks) or ()))


def cut(table: BlockTable, pool: BlockPool, counts: list[int], num_tokens: int) -> Outbox:
    outbox = Outbox([pool])
    cut_lines(table, pool, counts, num_tokens, S, 7, 0, outbox)
    pool.check_invariants()
    return outbox


def test_a_split_slab_is_pages_of_one_holder() -> None:
    pool = BlockPool(3, 4)
    slab = pool.alloc_slab()
    assert slab is not None
    pool.split(slab)
    pool.check_invariants()
    assert pool.refs[slab] == BROKEN
    pages = [slab * 4 + i for i in range(4)]
    assert [pool.page_refs[p] for p in pages] == [1] * 4
    pool.unref_pages(pages[:3])
    assert pool.num_free == 2
    pool.unref_pages(pages[3:])
    assert pool.num_free == 3
    pool.check_invariants()


def test_a_split_needs_a_slab_of_ones_own() -> None:
    pool = BlockPool(2, 2)
    slab = pool.alloc_slab()
    assert slab is not None
    pool.ref(slab)
    with pytest.raises(AssertionError, match="2 holders"):
        pool.split(slab)


def test_ones_own_pages_are_used_again_and_the_rest_is_free() -> None:
    pool = BlockPool(8, 2)
    table = table_of(pool, 6)
    before = list(table.ids)
    assert num_missing(table, pool, [9, 2], S) == 0
    outbox = cut(table, pool, [9, 2], 23)
    assert table.layers is not None
    assert [len(line) for line in table.layers] == [3, 1]
    assert table.dropped == [14, 21]
    mine = {slab * 2 + i for slab in before for i in range(2)}
    assert {p for line in table.layers for p in line} <= mine
    assert pool.num_free_pages == 8 * 2 - 4
    updates, ops = outbox.drain()
    assert [(u.layer, u.start, u.ids, u.dropped) for u in updates] == [
        (0, 0, table.layers[0], 14), (1, 0, table.layers[1], 21)
    ]  # fmt: skip
    assert ops == [PackOp(0, 7, tuple(map(tuple, table.layers)), (tuple(before),))]


def test_shared_blocks_stay_as_they_are_and_copies_come_from_the_pool() -> None:
    pool = BlockPool(8, 2)
    table = table_of(pool, 4)
    for slab in table.ids:
        pool.ref(slab)
    shared = list(table.ids)
    assert own_pages(table, pool) == [[], []]
    assert num_missing(table, pool, [5, 4], S) == 3
    cut(table, pool, [5, 4], 16)
    assert [pool.refs[slab] for slab in shared] == [1] * 4
    assert table.layers is not None
    assert not {p // 2 for line in table.layers for p in line} & set(shared)


def test_a_cut_table_is_cut_again_in_place() -> None:
    pool = BlockPool(6, 2)
    table = table_of(pool, 6)
    cut(table, pool, [20, 20], 24)
    assert pool.num_free_pages == 2
    held = {p for line in table.layers or () for p in line}
    cut(table, pool, [8, 3], 24)
    assert {p for line in table.layers or () for p in line} <= held
    assert table.dropped == [16, 21]
    assert pool.num_free_pages == 12 - 3


def test_a_forks_pages_are_left_alone_when_one_of_two_is_cut() -> None:
    pool = BlockPool(6, 2)
    table = table_of(pool, 3)
    cut(table, pool, [8, 8], 12)
    other = BlockTable(layers=[list(line) for line in table.layers or ()])
    other.dropped = list(table.dropped)
    for line in other.layers or ():
        pool.ref_pages(line)
    cut(table, pool, [4, 4], 12)
    assert all(pool.page_refs[p] == 1 for line in other.layers or () for p in line)
    assert not {p for line in table.layers or () for p in line} & {p for line in other.layers or () for p in line}


def test_lines_grow_by_their_own_slots() -> None:
    pool = BlockPool(8, 2)
    table = table_of(pool, 4)
    cut(table, pool, [7, 4], 16)
    # The next token, position 16: slot 7 of line 0, which has room, and slot 4 of line 1, which has not.
    growth = plan_lines(table, pool, 16, 17, S)
    assert growth.new == [0, 1]
    assert growth.copies == []
    outbox = Outbox([pool])
    apply_lines(table, pool, growth, 7, 0, outbox)
    updates, _ = outbox.drain()
    assert [(u.layer, u.start, u.dropped) for u in updates] == [(1, 1, -1)]
    assert plan_lines(table, pool, 17, 18, S).new == [1, 0]
    pool.check_invariants()


def test_a_shared_tail_is_copied_before_it_is_written() -> None:
    pool = BlockPool(8, 2)
    table = table_of(pool, 4)
    cut(table, pool, [6, 5], 16)
    tails = [line[-1] for line in table.layers or ()]
    for line in table.layers or ():
        pool.ref_pages(line)
    growth = plan_lines(table, pool, 16, 17, S)
    assert growth.copies == [(0, 1), (1, 1)]
    outbox = Outbox([pool])
    apply_lines(table, pool, growth, 7, 0, outbox)
    _, ops = outbox.drain()
    assert sorted(op.src for op in ops) == sorted(tails)
    assert all(pool.page_refs[p] == 1 for p in tails)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_lost_whatever_is_cut_and_grown(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.choice([1, 2, 6])
    pool = BlockPool(40, width)
    tokens = rng.randint(5, 60)
    table = table_of(pool, -(-tokens // S))
    cached = [slab for slab in table.ids if rng.random() < 0.5]
    for slab in cached:
        pool.ref(slab)
    for _ in range(6):
        gone = table.dropped or [0] * width
        counts = [rng.randint(1, tokens - d) for d in gone]
        missing = num_missing(table, pool, counts, S)
        assert missing <= pool.num_free_pages
        cut(table, pool, counts, tokens)
        end = tokens + rng.randint(1, 9)
        growth = plan_lines(table, pool, tokens, end, S)
        assert growth.num_pages <= pool.num_free_pages
        apply_lines(table, pool, growth, 7, 0, Outbox([pool]))
        tokens = end
        for line, d in zip(table.layers or (), table.dropped, strict=True):
            assert len(line) == -(-(tokens - d) // S)
        pool.check_invariants()
    for line in table.layers or ():
        pool.unref_pages(line)
    for slab in cached:
        pool.unref(slab)
    assert pool.num_free == 40
