"""Storage: shapes, bytes, order of page operations, bounds."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.base.bf16 import widen
from penstock.core.cache_spec import CacheSpec, PlaneSpec, group_layers, vector_planes
from penstock.core.page_ops import HOST, LoadOp, PageOp, StoreOp
from penstock.runner.storage import Storage

PAGED = CacheSpec("paged", (PlaneSpec("k", 2, 4, "bfloat16"), PlaneSpec("v", 2, 4, "float32")))
SLOT = CacheSpec("slot", (PlaneSpec("state", 3, 5, "float16"),))
GROUPS = group_layers([PAGED, SLOT, PAGED])


def make(*, poison: bool = False) -> Storage:
    return Storage(GROUPS, [4, 3], 8, poison=poison)


def test_shapes_and_bytes() -> None:
    storage = make()
    assert storage.planes[0]["k"].shape == (8, 8, 2, 4)
    assert storage.planes[0]["k"].dtype == np.uint16
    assert storage.planes[0]["v"].dtype == np.float32
    assert storage.planes[1]["state"].shape == (3, 3, 5)
    expected = 4 * GROUPS[0].slab_bytes(8) + 3 * GROUPS[1].slab_bytes(8)
    assert storage.num_bytes == expected == 8 * 8 * 8 * (2 + 4) + 3 * 15 * 2


def test_scales_are_poisoned_zeroed_and_moved_with_their_numbers() -> None:
    groups = group_layers([CacheSpec("paged", vector_planes({"k": (2, 4), "v": (2, 6)}, "int8"))])
    storage = Storage(groups, [6], 8, host_slabs=[3], poison=True)
    planes, host = storage.planes[0], storage.tiers[HOST].planes[0]
    assert {name: (p.shape, p.dtype) for name, p in planes.items()} == {
        "k": ((6, 8, 2, 4), np.int8), "v": ((6, 8, 2, 6), np.int8), "k_scale": ((6, 8, 2, 1), np.float32),
        "v_scale": ((6, 8, 2, 1), np.float32),
    }  # fmt: skip
    assert storage.num_bytes == 6 * groups[0].slab_bytes(8) == 6 * 8 * 2 * (4 + 6 + 8)
    assert np.isnan(planes["k_scale"]).all()
    for plane in planes.values():
        plane[1] = 3
    storage.apply([PageOp(0, 1, 4, 1), StoreOp(0, 1, 2, 1), PageOp(0, -1, 1, 1), LoadOp(0, 2, 5, 1, 7)])
    for name, plane in planes.items():
        assert (plane[4] == 3).all(), f"a copy forgot {name}"
        assert (host[name][2] == 3).all(), f"a swap forgot {name}"
        assert (plane[5] == 3).all(), f"coming back forgot {name}"
        assert not plane[1].any()


def test_fresh_memory_is_zero_or_poison() -> None:
    assert all(not array.any() for planes in make().planes for array in planes.values())
    poisoned = make(poison=True)
    assert np.isnan(widen(poisoned.planes[0]["k"])).all()
    assert np.isnan(poisoned.planes[0]["v"]).all()
    assert np.isnan(poisoned.planes[1]["state"]).all()


def test_ops_run_in_list_order() -> None:
    storage = make(poison=True)
    v, k = storage.planes[0]["v"], storage.planes[0]["k"]
    v[0], v[1], k[0], k[1] = 1, 2, 3, 4
    # Page 0 goes to 2, is then zeroed, and page 2 goes on to 4: only the list order gives these values.
    storage.apply([PageOp(0, 0, 2, 2), PageOp(0, -1, 0, 1), PageOp(0, 2, 4, 2), PageOp(0, -1, 2, 1)])
    assert [float(v[p, 0, 0, 0]) for p in (0, 1, 2, 3, 4, 5)] == [0, 2, 0, 2, 1, 2]
    assert [int(k[p, 0, 0, 0]) for p in (0, 1, 2, 3, 4, 5)] == [0, 4, 0, 4, 3, 4]
    assert np.isnan(v[6:]).all()
    assert np.isnan(storage.planes[1]["state"]).all(), "an op of one group touched another"


@pytest.mark.parametrize(
    "op",
    [
        PageOp(0, -1, 8, 1),
        PageOp(0, -1, 7, 2),
        PageOp(0, -1, -1, 1),
        PageOp(0, 8, 0, 1),
        PageOp(0, 7, 0, 2),
        PageOp(0, 0, 1, 2),
        PageOp(0, 3, 3, 1),
        PageOp(0, 0, 4, 0),
        PageOp(1, -1, 3, 1),
        PageOp(2, -1, 0, 1),
        PageOp(-1, -1, 0, 1),
    ],
)
def test_ops_outside_the_pool_are_refused(op: PageOp) -> None:
    storage = make()
    before = [array.copy() for planes in storage.planes for array in planes.values()]
    with pytest.raises(AssertionError):
        storage.apply([op])
    after = [array for planes in storage.planes for array in planes.values()]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("ragged", [False, True])
def test_slots_move_in_all_planes_and_layers(ragged: bool) -> None:
    """A tree's accepted path: slots 5, 7, 8, 11 become 5, 6, 7, 8, read before they are written."""
    spec = CacheSpec("paged", vector_planes({"k": (2, 4), "v": (2, 3)}, "int8"))
    other = CacheSpec("window", (PlaneSpec("k", 1, 2, "bfloat16"),), window=20)
    groups = group_layers([spec, other, spec])
    storage = Storage(groups, [6, 5], 4)
    rng = np.random.default_rng(2)
    for planes in storage.planes:
        for array in planes.values():
            array[:] = rng.integers(1, 99, array.shape)
    before = [{name: array.copy() for name, array in planes.items()} for planes in storage.planes]
    shared = np.array([[4, 0, 3]], np.int32)
    lines = np.array([[8, 0, 5], [3, 11, 6]], np.int32) if ragged else shared
    storage.move_slots([lines, np.array([[-1, 2, 4]], np.int32)], [5, 7, 8, 11], [5, 6, 7, 8])
    for g, pages in enumerate((lines if ragged else np.stack([shared[0] * 2, shared[0] * 2 + 1]), [[-1, 2, 4]])):
        for name, array in storage.planes[g].items():
            want = before[g][name].copy()
            for line in pages:
                for source, target in [(5, 5), (7, 6), (8, 7), (11, 8)]:
                    old = before[g][name][line[source // 4], source % 4]
                    want[line[target // 4], target % 4] = old
            np.testing.assert_array_equal(array, want, name)
            assert not np.array_equal(array, before[g][name])


@pytest.mark.parametrize(
    ("source", "target"), [([3], [1]), ([8], [4]), ([-1], [4]), ([4], [12]), ([4, 5], [6, 6]), ([4, 5], [6])]
)
def test_slots_without_a_page_are_refused(source: list[int], target: list[int]) -> None:
    """Blocks: one that is gone, one of the pool, one that is not in it."""
    groups = group_layers([PAGED])
    storage = Storage(groups, [4], 4)
    with pytest.raises(AssertionError):
        storage.move_slots([np.array([[-1, 3, 4]], np.int32)], source, target)


def test_a_recurrent_state_has_no_slots() -> None:
    with pytest.raises(AssertionError, match="keeps no tokens"):
        make().move_slots([np.zeros((1, 2), np.int32)] * 2, [1], [2])
