"""Pages: what is written is what is read, rounded once, wherever the pages lie."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.base.bf16 import narrow, widen
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.ref.codecs.int8 import quantise
from penstock.ops.ref.codecs.number import to_storage
from penstock.ops.ref.storage import gather, read_kv, write_kv
from penstock.ops.step import Step

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return widen(narrow(x)) if dtype == "bfloat16" else x.astype(dtype).astype(np.float32)


def plan_of(group: GroupPlan, starts: list[int], counts: list[int]) -> StepPlan:
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).astype(np.int32)
    ends = np.array(starts, np.int32) + np.array(counts, np.int32)
    bounds = np.array([0, *np.cumsum(counts)], np.int32)
    return StepPlan(np.zeros_like(positions), positions, bounds, ends, np.zeros(0, np.int32), (group,))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_write_then_gather_through_shared_and_ragged_tables(dtype: str) -> None:
    rng = np.random.default_rng(4)
    # Three layers, blocks of 4. Sequence 0 is shared (slabs 5, 2), 1 is ragged, 2 is shared and starts at position 6.
    ragged = np.array([[0, 11], [13, 3], [25, 24]], np.int32)
    group = GroupPlan(3, 4, (np.array([[5, 2]], np.int32), ragged, np.array([[6, 7, 9]], np.int32)))
    plan = plan_of(group, [0, 0, 6], [7, 5, 3])
    planes = {name: np.zeros((30, 4, 2, 3), DTYPES[dtype]) for name in ("k", "v")}
    step = Step(plan, [planes])
    data = rng.standard_normal((3, 2, 15, 2, 3)).astype(np.float32)
    for layer in range(3):
        write_kv(step, data[layer, 0], data[layer, 1], 0, layer, ("k", "v"))
    for layer in range(3):
        for i, name in enumerate(("k", "v")):
            want = rounded(data[layer, i], dtype)
            for b, (lo, hi) in enumerate([(0, 7), (0, 5), (6, 9)]):
                rows = slice(step.bounds[b], step.bounds[b + 1])
                got = gather(planes[name], group.pages(b, layer), lo, hi)
                np.testing.assert_array_equal(got, want[rows])
    np.testing.assert_array_equal(group.pages(0, 2), [17, 8])
    # 15 tokens x 3 layers x 6 numbers were written, and not one more.
    assert np.count_nonzero(planes["k"]) == 15 * 3 * 6


def test_gather_is_exact_at_every_cut() -> None:
    plane = np.arange(10 * 4).reshape(10, 4, 1, 1).astype(np.float32)
    pages = np.array([7, 0, 9, 4], np.int32)
    line = plane[pages].reshape(-1)
    for lo in range(16):
        for hi in range(lo + 1, 17):
            np.testing.assert_array_equal(gather(plane, pages, lo, hi)[:, 0, 0], line[lo:hi])


def test_rounding_of_large_numbers_does_not_warn() -> None:
    big = np.array([1e6, -1e6], np.float32)
    np.testing.assert_array_equal(to_storage(big, np.dtype(np.float16)), np.array([np.inf, -np.inf], np.float16))
    assert to_storage(big, np.dtype(np.uint16)).dtype == np.uint16
    assert to_storage(big, np.dtype(np.float32)) is big


def test_8_bits_are_the_nearest_and_ties_go_to_even() -> None:
    x = np.array([[127.0, 0.5, 1.5, -2.5, 126.5, -127.0, 0.49]], np.float32)
    whole, scale = quantise(x)
    np.testing.assert_array_equal(whole, [[127, 0, 2, -2, 126, -127, 0]])
    np.testing.assert_array_equal(scale, [[1.0]])
    x = np.random.default_rng(0).standard_normal((5, 3, 40)).astype(np.float32)
    whole, scale = quantise(x)
    assert scale.shape == (5, 3, 1)
    assert (np.abs(whole).max(axis=-1) == 127).all()
    assert (np.abs(whole * scale - x) <= scale * 0.5001).all()
    # A vector's own numbers decide alone.
    np.testing.assert_array_equal(quantise(x[2:3, 1])[0], whole[2:3, 1])


def test_8_bits_of_nothing_of_the_smallest_and_of_what_is_no_number() -> None:
    tiny = np.float32(2.0**-149)
    rows = [[0.0, -0.0, 0.0], [1.0, np.nan, 2.0], [1.0, np.inf, 2.0], [-np.inf, 0.0, 0.0], [tiny, 0, -tiny],
            [190 * tiny, tiny, 0], [3e38, -3e38, 1.0]]  # fmt: skip
    whole, scale = quantise(np.array(rows, np.float32))
    back = whole * scale
    np.testing.assert_array_equal(back[0], 0)
    assert np.isnan(back[1:4]).all()
    np.testing.assert_array_equal(back[4], 0)  # the scale is below the smallest number
    assert back[5, 0] == 127 * tiny, "cut, not wrapped around"
    np.testing.assert_allclose(back[6], rows[6], rtol=1e-2, atol=3e36)


def test_8_bits_go_through_pages_with_their_scales() -> None:
    rng = np.random.default_rng(4)
    group = GroupPlan(1, 4, (np.array([[5, 2]], np.int32), np.array([[1, 0, 3]], np.int32)))
    plan = plan_of(group, [0, 6], [7, 3])
    planes = {name: np.zeros((8, 4, 2, 3), np.int8) for name in ("k", "v")}
    planes |= {f"{name}_scale": np.full((8, 4, 2, 1), np.nan, np.float32) for name in ("k", "v")}
    a, b = rng.standard_normal((2, 10, 2, 3)).astype(np.float32)
    write_kv(Step(plan, [planes]), a, b, 0, 0, ("k", "v"))
    for name, x in (("k", a), ("v", b)):
        whole, scale = quantise(x)
        np.testing.assert_array_equal(read_kv(planes, name, group.pages(0, 0), 0, 7), (whole * scale)[:7])
        np.testing.assert_array_equal(read_kv(planes, name, group.pages(1, 0), 6, 9), (whole * scale)[7:])
        assert np.isnan(read_kv(planes, name, group.pages(1, 0), 5, 9)[0]).all(), "nobody wrote that"
