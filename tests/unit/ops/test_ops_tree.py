"""Trees of drafts: what a mask must be, and where its tokens are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.step import Step
from penstock.ops.tree import MAX_NODES, path, slots, tree_mask


def plan_of(masks: list[int], depths: list[int], *, start: int = 7, before: int = 2) -> StepPlan:
    """A sequence of `before` ordinary tokens from position 3 on, then one with these."""
    positions = [*range(3, 3 + before), *(start + d for d in depths)]
    bounds = np.array([0, before, len(positions)], np.int32)
    lens = np.array([3 + before, start + len(depths)], np.int32)
    tables = tuple(np.arange(i, i + 20, dtype=np.int32)[None] for i in (0, 20))
    none = np.zeros(0, np.int32)
    return StepPlan(
        np.zeros(len(positions), np.int32), np.array(positions, np.int32), bounds, lens, none,
        (GroupPlan(1, 4, tables),), mask=np.array([*[0] * before, *masks], np.uint64),
    )  # fmt: skip


def test_masks_of_a_tree() -> None:
    masks, depths = tree_mask([-1, 0, 0, 1, 3, 2])
    assert masks.tolist() == [0b1, 0b11, 0b101, 0b1011, 0b11011, 0b100101]
    assert depths.tolist() == [0, 1, 1, 2, 3, 2]
    assert path(0b11011, 4) == [0, 1, 3, 4]
    assert path(0, 2) == [0, 1, 2]
    masks, depths = tree_mask([*range(-1, 63)])
    assert int(masks[-1]) == 2**64 - 1
    assert depths[-1] == 63
    plan_of(masks.tolist(), depths.tolist())


@pytest.mark.parametrize("parents", [[], [0], [-1, -1], [-1, 1], [-1, 0, -2], [*range(-1, 64)]], ids=str)
def test_what_is_no_tree(parents: list[int]) -> None:
    with pytest.raises(ValueError, match=r"a tree has 1 to 64 nodes|cannot hang on node"):
        tree_mask(parents)


def test_slots_are_places_in_the_step() -> None:
    plan = plan_of([0, 0b11, 0b101, 0b1101, 0b10011], [0, 1, 1, 2, 2])
    assert slots(plan.positions, plan.query_start_loc).tolist() == [3, 4, 7, 8, 9, 10, 11]
    step = Step(plan, [{}])
    pages, offsets = step.token_pages(0)
    assert pages.tolist() == [[0, 1, 21, 22, 22, 22, 22]]
    assert offsets.tolist() == [3, 0, 3, 0, 1, 2, 3]
    assert step.trees(0) is None
    assert step.trees(1) == [[2], [2, 3], [2, 4], [2, 4, 5], [2, 3, 6]]


@pytest.mark.parametrize(
    ("masks", "depths", "message"),
    [
        ([1, 0b11, 0b001], [0, 1, 0], "sequence 1: the last token that token 2 sees must be itself, not 0"),
        ([1, 0b111, 0b101], [0, 1, 1], "the last token that token 1 sees must be itself, not 2"),
        ([1, 0b11, 0b100], [0, 1, 0], r"token 2 sees \[2\], which is no path"),
        ([1, 0b11, 0b110], [0, 1, 1], r"token 2 sees \[1, 2\], which is no path"),
        ([1, 0b11, 0b101, 0b1111], [0, 1, 1, 3], r"token 3 sees \[0, 1, 2, 3\], which is no path"),
        ([1, 0b11, 0b101, 0], [0, 1, 1, 3], r"token 3 sees \[0, 1, 2, 3\], which is no path"),
        ([1, 0b11, 0b101], [0, 1, 2], "token 2 sees 1 before it but is 2 behind the first"),
        ([1, 0b11, 0b101], [0, 0, 1], "token 1 sees 1 before it but is 0 behind the first"),
        ([1, *[0] * MAX_NODES], [*range(MAX_NODES + 1)], "sequence 1 has a tree and 65 tokens in this step"),
    ],
)
def test_masks_that_are_refused(masks: list[int], depths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(masks, depths)


@pytest.mark.parametrize("mask", [np.zeros(3, np.int64), np.zeros(2, np.uint64), np.zeros(6, np.uint64)[::2]], ids=str)
def test_arrays_that_are_no_masks(mask: Any) -> None:
    bounds = np.array([0, 3], np.int32)
    with pytest.raises(ValueError, match=r"a mask is uint64 \[3\]"):
        StepPlan(bounds, np.arange(3, dtype=np.int32), bounds, bounds, bounds, (), mask=mask)
