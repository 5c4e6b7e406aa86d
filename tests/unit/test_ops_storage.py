"""Pages: what is written is what is read, rounded once, wherever the pages lie."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.base.bf16 import narrow, widen
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.ref.storage import gather, to_storage, write_kv
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
