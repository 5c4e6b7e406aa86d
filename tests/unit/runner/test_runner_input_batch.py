"""InputBatch: token-major, exact tables, the right logits rows."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.batch import AddedRow, Appended, ScheduledRow, SchedulerOutput, TableUpdate
from penstock.core.cache_spec import CacheSpec, PlaneSpec, group_layers
from penstock.core.sampling import TokenRules
from penstock.runner.input_batch import InputBatch
from penstock.runner.rows import RowStore

PAGED = CacheSpec("paged", (PlaneSpec("k", 1, 1, "float32"),))
SLOT = CacheSpec("slot", (PlaneSpec("s", 1, 1, "float32"),))


def rows() -> RowStore:
    store = RowStore(group_layers([PAGED, SLOT, PAGED]), [20, 4], 4, vocab_size=1000)
    store.apply(
        SchedulerOutput(
            0,
            added=[
                AddedRow(7, 0, list(range(100, 109)), 6, TokenRules(seed=1)),
                AddedRow(8, 2, list(range(200, 210)), 10, TokenRules(seed=2)),
                AddedRow(9, 0, [300, 301], 2, TokenRules(seed=3)),
            ],
            tables=[
                TableUpdate(7, 0, 0, [3, 4, 5, 6]),
                TableUpdate(8, 0, 0, [8, 9, 10]),
                TableUpdate(9, 0, 0, [12]),
                TableUpdate(7, 1, 0, [1]),
                TableUpdate(8, 1, 0, [2]),
                TableUpdate(9, 1, 0, [3]),
            ],
        )
    )
    return store


def test_layout() -> None:
    jobs = [ScheduledRow(7, 8, 1, num_samples=1), ScheduledRow(8, 2, 5), ScheduledRow(9, 0, 2, num_candidates=4)]
    plan, picks, _ = InputBatch(rows()).build(jobs)
    assert plan.token_ids.tolist() == [108, 202, 203, 204, 205, 206, 300, 301]
    assert plan.positions.tolist() == [8, 2, 3, 4, 5, 6, 0, 1]
    assert plan.query_start_loc.tolist() == [0, 1, 6, 8]
    assert plan.seq_lens.tolist() == [9, 7, 2]
    assert plan.logits_indices.tolist() == [0, 7]
    for array in (plan.token_ids, plan.positions, plan.query_start_loc, plan.seq_lens, plan.logits_indices):
        assert array.dtype == np.int32
    paged, slot = plan.groups
    assert [t.tolist() for t in paged.tables] == [[[3, 4, 5]], [[8, 9]], [[12]]]
    assert (paged.num_layers, slot.num_layers, paged.block_size) == (2, 1, 4)
    assert paged.pages(1, 1).tolist() == [17, 19]
    assert [t.tolist() for t in slot.tables] == [[[1]], [[2]], [[3]]]
    assert [(p.seq_id, p.row, p.position, p.num_samples, p.num_candidates) for p in picks] == [
        (7, 0, 9, 1, 0),
        (9, 1, 2, 0, 4),
    ]
    assert picks[0].rules.seed == 1


def test_tables_are_views() -> None:
    store = rows()
    plan, _, _ = InputBatch(store).build([ScheduledRow(7, 0, 4)])
    (table,) = plan.groups[0].tables
    assert table.shape == (1, 1)
    store.apply(SchedulerOutput(1, tables=[TableUpdate(7, 0, 0, [19])]))
    assert table.tolist() == [[19]]


@pytest.mark.parametrize(
    ("job", "indices", "prompt_start", "prompt_ids", "sample_row"),
    [
        # Positions 2..5 run, 4 and 5 want a logprob: tokens 5 and 6.
        (ScheduledRow(8, 2, 4, prompt_logprobs_from=4), [3, 4], 5, [205, 206], -1),
        # The last prompt position has no prompt token after it: it samples.
        (ScheduledRow(8, 0, 10, 1, 0, 0), list(range(1, 11)), 1, list(range(201, 210)), 9),
        (ScheduledRow(8, 9, 1, 1, 0, 9), [1], 0, [], 0),
        # Decoding past the prompt (6 tokens of 9) wants no prompt logprob any more.
        (ScheduledRow(7, 4, 5, 1, 0, 4), [1, 5], 5, [105], 1),
        (ScheduledRow(7, 7, 2, 1, 0, 7), [2], 0, [], 0),
    ],
)
def test_prompt_logprob_positions(
    job: ScheduledRow, indices: list[int], prompt_start: int, prompt_ids: list[int], sample_row: int
) -> None:
    # Row 9 in front: one token, no logits.
    plan, picks, _ = InputBatch(rows()).build([ScheduledRow(9, 0, 1), job])
    assert plan.logits_indices.tolist() == indices
    (pick,) = picks
    assert pick.prompt_ids.tolist() == prompt_ids
    assert pick.row == sample_row
    if prompt_ids:
        assert (pick.prompt_row, pick.prompt_start) == (0, prompt_start)


def test_buffers_are_reused_and_grow() -> None:
    store = rows()
    batch = InputBatch(store)
    first, _, _ = batch.build([ScheduledRow(8, 0, 10), ScheduledRow(7, 0, 3)])
    second, _, _ = batch.build([ScheduledRow(7, 3, 2)])
    assert np.shares_memory(first.token_ids, second.token_ids)
    assert second.query_start_loc.tolist() == [0, 2]
    third, _, _ = batch.build([ScheduledRow(7, 0, 9), ScheduledRow(8, 0, 9), ScheduledRow(9, 0, 2)])
    assert third.token_ids.tolist() == [*range(100, 109), *range(200, 209), 300, 301]
    assert third.query_start_loc.tolist() == [0, 9, 18, 20]


@pytest.mark.parametrize(
    "jobs",
    [
        [ScheduledRow(7, 8, 2)],
        [ScheduledRow(7, 8, 0)],
        [ScheduledRow(7, -1, 2)],
        [ScheduledRow(7, 7, 1, num_samples=1)],
        [ScheduledRow(7, 8, 1, num_samples=1, num_candidates=1)],
        [ScheduledRow(8, 4, 2, prompt_logprobs_from=3)],
        [ScheduledRow(7, 0, 1), ScheduledRow(7, 1, 1)],
        [ScheduledRow(1, 0, 1)],
    ],
)
def test_our_own_bugs_are_caught(jobs: list[ScheduledRow]) -> None:
    with pytest.raises(AssertionError):
        InputBatch(rows()).build(jobs)


def test_missing_blocks_are_caught() -> None:
    store = rows()
    store.apply(SchedulerOutput(1, appended=[Appended(9, [1, 2, 3])]))
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 in the table"):
        InputBatch(store).build([ScheduledRow(9, 0, 5)])
