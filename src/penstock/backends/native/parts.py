"""A step in parts that run one after the other: micro-batches of a pipeline.

Parts are runs of the step's tokens. A text may be cut anywhere: what its later tokens look at, the earlier part has
cached. Rows do not depend on each other, and so all bits are those of the whole step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.ops.plan import I32, GroupPlan, StepPlan


class StepPart(NamedTuple):
    """`rows`: of the part's own tokens; in the whole step they are rows `places`."""

    plan: StepPlan
    rows: I32
    places: I32


def parts_of(plan: StepPlan, rows: I32, most: int, least: int) -> list[StepPart]:
    """`plan` with rows [R] in up to `most` parts of about as many tokens, `least` at least; trees stay whole. Nothing:
    it runs as it is."""
    total = len(plan.token_ids)
    count = min(most, total // least)
    if count < 2 or not _falls_apart(plan):
        return []
    starts = plan.query_start_loc.tolist()
    ends = [0]
    for i in range(1, count + 1):
        end = _end_of(plan, starts, total * i // count)
        if end > ends[-1]:
            ends.append(end)
    found = [_part(plan, rows, starts, first, last) for first, last in pairwise(ends)]
    return found if len(found) > 1 else []


def _falls_apart(plan: StepPlan) -> bool:
    """Sequences that have forgotten something, or choose what they read, are not cut."""
    plain = plan.choose_from is None and plan.taken is None
    return plain and all(group.dropped is None and group.low is None for group in plan.groups)


def _end_of(plan: StepPlan, starts: list[int], end: int) -> int:
    """The place itself, or the end of the tree that it lies in."""
    if plan.mask is None:
        return end
    b = int(np.searchsorted(plan.query_start_loc, end, "right")) - 1
    first = starts[min(b, len(starts) - 2)]
    last = starts[min(b, len(starts) - 2) + 1]
    return last if first < end < last and plan.mask[first:last].any() else end


def _part(plan: StepPlan, rows: I32, starts: list[int], first: int, last: int) -> StepPart:
    """Tokens first ... last - 1."""
    b = int(np.searchsorted(plan.query_start_loc, first, "right")) - 1
    end = int(np.searchsorted(plan.query_start_loc, last, "left"))
    own = plan.query_start_loc[b : end + 1]
    lens = plan.seq_lens[b:end].copy()
    lens[-1] -= max(0, starts[end] - last)  # tokens that a later part has
    places = np.flatnonzero((rows >= first) & (rows < last)).astype(np.int32)
    begin = np.int32(first)
    adapters = None if plan.adapters is None else plan.adapters[b:end]
    made = replace(
        plan, token_ids=plan.token_ids[first:last], positions=plan.positions[first:last],
        query_start_loc=np.clip(own, first, last) - begin, seq_lens=lens, logits_indices=rows[places] - begin,
        groups=tuple(_tables(group, b, end) for group in plan.groups), hidden_indices=places[:0],
        mask=None if plan.mask is None else plan.mask[first:last], adapters=adapters,
    )  # fmt: skip
    return StepPart(made, made.logits_indices, places)


def _tables(group: GroupPlan, b: int, end: int) -> GroupPlan:
    return replace(group, tables=group.tables[b:end])
