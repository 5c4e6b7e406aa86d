"""B17: what one rank has of blocks that lie on one of several each: its tables, its pages, its page operations."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest

from penstock.core.cache_spec import CacheGroup, CacheSpec, PlaneSpec
from penstock.core.page_ops import PageOp
from penstock.runner.placed import OwnBlocks, PlacedTable, placed_on
from penstock.runner.storage import Storage
from penstock.runner.tables import RowTable

SPEC = CacheSpec("paged", (PlaneSpec("k", 1, 1, "float32"),), ranks=3, whole=True)
STATE = CacheSpec("slot", (PlaneSpec("s", 1, 1, "float32"),))
GROUPS = (CacheGroup(0, SPEC, (0, 1)), CacheGroup(1, STATE, (2,)))


def test_a_ranks_view_names_its_own_blocks_in_order_and_says_which_they_are() -> None:
    rng = Random(1)
    for size in (2, 3):
        whole = RowTable(2, 300)
        own = [PlacedTable(2, 300, rank, size) for rank in range(size)]
        for _ in range(60):
            start = rng.randint(0, whole.num_blocks)
            ids = [rng.randrange(300) for _ in range(rng.randint(1, 9))]
            for table in (whole, *own):
                table.update(start, ids, -1)
            n = rng.randint(1, whole.num_blocks)
            all_ids = whole.view(n)[0].tolist()
            for rank, table in enumerate(own):
                view, held = table.view(n), table.held
                assert view.shape == (1, n)
                assert view.dtype == held.dtype == np.int32
                assert held.tolist() == [sum(i % size == rank for i in all_ids[:b]) for b in range(n + 1)]
                assert view[0, : held[-1]].tolist() == [i // size for i in all_ids if i % size == rank]
                assert table.pages(0, n).tolist() == whole.pages(0, n).tolist(), "laws are by all ranks' numbers"
                assert table.view(n) is view
                assert table.held is held


def test_a_view_shows_later_updates_as_other_tables_do() -> None:
    table = PlacedTable(1, 100, 0, 2)
    table.update(0, [0, 1, 2, 3], -1)
    view, held = table.view(4), table.held
    table.update(1, [4], -1)
    assert table.view(4) is view
    assert view[0, :3].tolist() == [0, 2, 1]
    assert held.tolist() == [0, 1, 2, 3, 3]


def test_page_operations_of_a_rank_are_those_of_its_own_slabs() -> None:
    """Carried out by all ranks they are what one storage with all slabs would have done."""
    rng = Random(2)
    num = [13, 4]
    alone = Storage(
        (GROUPS[0].__class__(0, msgspec.structs.replace(SPEC, ranks=1, whole=False), (0, 1)), GROUPS[1]), num, 6
    )
    ranks = []
    for rank in range(3):
        placed = placed_on(GROUPS, rank)
        assert placed is not None
        storage = Storage(GROUPS, placed.num_slabs(num), 6)
        storage.placed = placed
        ranks.append(storage)
    assert [storage.num_pages for storage in ranks] == [(10, 4), (8, 4), (8, 4)]
    shape = alone.planes[0]["k"].shape
    alone.planes[0]["k"][:] = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for slab in range(13):
        own = ranks[slab % 3].planes[0]["k"]
        own[slab // 3 * 2 : slab // 3 * 2 + 2] = alone.planes[0]["k"][slab * 2 : slab * 2 + 2]
    for _ in range(80):
        if rng.random() < 0.5:
            first = rng.randrange(13)
            count = rng.randint(1, 13 - first)
            op = PageOp(0, -1, first * 2, count * 2)
        else:
            a, b = rng.sample([slab for slab in range(13) if slab % 3 == 1], 2)
            op = PageOp(0, a * 2, b * 2, 2)
        for storage in (alone, *ranks):
            storage.apply([op, PageOp(1, -1, 0, 1)])
        for slab in range(13):
            own = ranks[slab % 3].planes[0]["k"][slab // 3 * 2 : slab // 3 * 2 + 2]
            assert np.array_equal(own, alone.planes[0]["k"][slab * 2 : slab * 2 + 2])


def test_a_copy_from_rank_to_rank_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="from one rank to another"):
        list(OwnBlocks(GROUPS, 1).ops([PageOp(0, 0, 2, 2)]))
    with pytest.raises(AssertionError, match="no whole slab"):
        list(OwnBlocks(GROUPS, 1).ops([PageOp(0, -1, 1, 2)]))
    assert placed_on(GROUPS[1:], 0) is None
    with pytest.raises(AssertionError, match="whole"):
        PlacedTable(2, 10, 0, 2).update(0, [1], 0)


def test_memory_behind_slabs_is_taken_on_every_rank_at_the_same_pace() -> None:
    for rank in range(3):
        placed = placed_on(GROUPS, rank)
        assert placed is not None
        for n in range(14):
            assert placed.num_slabs([n, 2]) == (len([s for s in range(n) if s % 3 == rank]), 2)
