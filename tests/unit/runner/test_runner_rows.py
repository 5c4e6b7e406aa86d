"""RowStore: documented order, rollback, forks, tables (shared, ragged), bounds."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.batch import GONE, AddedRow, Appended, Fork, ScheduledRow, SchedulerOutput, TableUpdate
from penstock.core.cache_spec import CacheSpec, PlaneSpec, group_layers
from penstock.core.sampling import TokenRules
from penstock.runner.rows import RowStore

PAGED = CacheSpec("paged", (PlaneSpec("k", 1, 1, "float32"),))
SLOT = CacheSpec("slot", (PlaneSpec("s", 1, 1, "float32"),))
RULES = TokenRules()


def store() -> RowStore:
    """Group 0: two paged layers, 6 slabs; group 1: one slot layer, 3 slabs. Blocks of 4."""
    return RowStore(group_layers([PAGED, SLOT, PAGED]), [6, 3], 4, vocab_size=100)


def added(seq_id: int, tokens: list[int], prompt_len: int = 2) -> AddedRow:
    return AddedRow(seq_id, 0, tokens, prompt_len, RULES)


def test_forks_come_before_removals_and_appends() -> None:
    rows = store()
    rows.apply(SchedulerOutput(0, added=[added(1, [5, 6, 7])]))
    rows.apply(
        SchedulerOutput(
            1,
            forked=[Fork(1, 2, 4), Fork(2, 3, 5)],
            removed=[1],
            added=[added(1, [9, 9])],
            appended=[Appended(2, [20]), Appended(3, [30, 31], rollback=1), Appended(1, [10])],
        )
    )
    assert rows[1].tokens.tolist() == [9, 9, 10]
    assert rows[2].tokens.tolist() == [5, 6, 7, 20]
    assert rows[3].tokens.tolist() == [5, 6, 30, 31]
    assert (rows[2].sample_index, rows[3].sample_index) == (4, 5)
    assert rows[2].prompt_len == 2
    assert rows[2].rules is RULES


def test_fork_copies_and_starts_without_blocks() -> None:
    rows = store()
    rows.apply(SchedulerOutput(0, added=[added(1, [5, 6])], tables=[TableUpdate(1, 0, 0, [3])]))
    rows.apply(SchedulerOutput(1, forked=[Fork(1, 2, 1)], appended=[Appended(1, [7])]))
    assert rows[2].tokens.tolist() == [5, 6]
    assert rows[2].tables[0].num_blocks == 0
    assert rows[1].tables[0].num_blocks == 1


def test_rows_grow_far_beyond_their_first_buffer() -> None:
    rows = store()
    rows.apply(SchedulerOutput(0, added=[added(1, [0, 1])]))
    want = [0, 1]
    rng = np.random.default_rng(0)
    for step in range(200):
        rollback = int(rng.integers(0, min(3, len(want) - 1)))
        new = [int(t) for t in rng.integers(0, 100, int(rng.integers(0, 6)))]
        rows.apply(SchedulerOutput(step, appended=[Appended(1, new, rollback)]))
        want = want[: len(want) - rollback] + new
        assert rows[1].tokens.tolist() == want
        assert rows[1].tokens.dtype == np.int32
    assert len(want) > 130


@pytest.mark.parametrize(
    "output",
    [
        SchedulerOutput(1, removed=[9]),
        SchedulerOutput(1, forked=[Fork(9, 2, 0)]),
        SchedulerOutput(1, forked=[Fork(1, 1, 0)]),
        SchedulerOutput(1, appended=[Appended(9, [1])]),
        SchedulerOutput(1, tables=[TableUpdate(9, 0, 0, [1])]),
        SchedulerOutput(1, added=[added(1, [1, 2])]),
        SchedulerOutput(1, added=[added(2, [1], prompt_len=2)]),
        SchedulerOutput(1, added=[added(2, [1, 100])]),
        SchedulerOutput(1, added=[added(2, [-1, 1])]),
        SchedulerOutput(1, appended=[Appended(1, [100])]),
        SchedulerOutput(1, appended=[Appended(1, [], rollback=2)]),
        SchedulerOutput(1, appended=[Appended(1, [], rollback=-1)]),
        SchedulerOutput(1, tables=[TableUpdate(1, 2, 0, [0])]),
        SchedulerOutput(1, tables=[TableUpdate(1, 0, 0, [6])]),
        SchedulerOutput(1, tables=[TableUpdate(1, 0, 0, [-1])]),
        SchedulerOutput(1, tables=[TableUpdate(1, 1, 0, [3])]),
        SchedulerOutput(1, tables=[TableUpdate(1, 0, 2, [0])]),
        SchedulerOutput(1, tables=[TableUpdate(1, 0, -1, [0])]),
        SchedulerOutput(1, tables=[TableUpdate(1, 0, 0, [0], layer=2)]),
        SchedulerOutput(1, tables=[TableUpdate(1, 0, 0, [12], 0), TableUpdate(1, 0, 0, [0], 1)]),
        SchedulerOutput(1, tables=[TableUpdate(1, 0, 0, [0], layer=0)]),
    ],
)
def test_our_own_bugs_are_caught(output: SchedulerOutput) -> None:
    rows = store()
    rows.apply(SchedulerOutput(0, added=[added(1, [5, 6, 7])], tables=[TableUpdate(1, 0, 0, [1])]))
    with pytest.raises(AssertionError):
        rows.apply(output)
    assert rows[1].tokens.tolist() == [5, 6, 7]


def test_shared_tables_grow_and_change_in_place() -> None:
    rows = store()
    rows.apply(SchedulerOutput(0, added=[added(1, [1, 2])], tables=[TableUpdate(1, 0, 0, [5, 4])]))
    table = rows[1].tables[0]
    view = table.view(2)
    rows.apply(SchedulerOutput(1, tables=[TableUpdate(1, 0, 1, [3])]))
    assert view.tolist() == [[5, 3]], "the view is not a view"
    rows.apply(SchedulerOutput(2, tables=[TableUpdate(1, 0, 2, [0, 1, 2] * 7)]))
    assert table.view(23).tolist() == [[5, 3] + [0, 1, 2] * 7]
    assert view.dtype == np.int32
    with pytest.raises(AssertionError):
        table.view(24)
    assert table.pages(0, 2).tolist() == [10, 6, 11, 7]


def test_shared_table_turns_ragged() -> None:
    rows = store()
    rows.apply(SchedulerOutput(0, added=[added(1, [1, 2])], tables=[TableUpdate(1, 0, 0, [5, 4, 3])]))
    rows.apply(SchedulerOutput(1, tables=[TableUpdate(1, 0, 1, [0, 2], 0), TableUpdate(1, 0, 1, [7], 1)]))
    table = rows[1].tables[0]
    # Block 0 of slab 5 lives in pages 10 and 11; from block 1 on each layer has its own, and slab 3 is forgotten.
    assert table.view(2).tolist() == [[10, 0], [11, 7]]
    assert table.num_blocks == 2
    rows.apply(SchedulerOutput(2, tables=[TableUpdate(1, 0, 2, [8], 1)]))
    assert table.view(3).tolist() == [[10, 0, 2], [11, 7, 8]]
    assert table.pages(1, 3).tolist() == [0, 2, 7, 8]
    with pytest.raises(AssertionError):
        rows.apply(SchedulerOutput(3, tables=[TableUpdate(1, 0, 0, [1])]))


def test_one_layer_groups_know_no_difference() -> None:
    rows = store()
    rows.apply(SchedulerOutput(0, added=[added(1, [1, 2])], tables=[TableUpdate(1, 1, 0, [2], layer=0)]))
    assert rows[1].tables[1].view(1).tolist() == [[2]]
    rows.apply(SchedulerOutput(1, tables=[TableUpdate(1, 1, 0, [1])]))
    assert rows[1].tables[1].view(1).tolist() == [[1]]


def two_rows(second: list[int], slot: int = 1) -> RowStore:
    rows = store()
    rows.apply(
        SchedulerOutput(
            0,
            added=[added(1, [1] * 7), added(2, [1] * 7)],
            tables=[
                TableUpdate(1, 0, 0, [0, 1]),
                TableUpdate(2, 0, 0, second),
                TableUpdate(1, 1, 0, [0]),
                TableUpdate(2, 1, 0, [slot]),
            ],
        )
    )
    return rows


def test_writes_into_another_row_are_seen() -> None:
    both = [ScheduledRow(1, 4, 3), ScheduledRow(2, 4, 3)]
    two_rows([0, 2]).check_writes(both)  # a shared full block that nobody writes is fine
    with pytest.raises(AssertionError, match="both write"):
        two_rows([0, 1]).check_writes(both)
    with pytest.raises(AssertionError, match="of sequence 2"):
        two_rows([0, 2]).check_writes([ScheduledRow(1, 3, 4)])
    with pytest.raises(AssertionError, match="of sequence 2"):
        two_rows([0, 1]).check_writes(both[:1])
    with pytest.raises(AssertionError, match="group 1"):
        two_rows([0, 2], slot=0).check_writes(both[:1])


def window_rows(*updates: TableUpdate) -> RowStore:
    """One group of two layers that see 5 tokens; sequence 1 knows 20."""
    window = CacheSpec("window", PAGED.planes, 5)
    rows = RowStore(group_layers([window, window]), [6], 4, vocab_size=100)
    rows.apply(SchedulerOutput(0, added=[added(1, [1] * 20)], tables=list(updates)))
    return rows


def test_G26_blocks_that_left_a_window_may_be_gone_and_no_others() -> None:
    shared = TableUpdate(1, 0, 0, [GONE, GONE, 2, 3])
    table = window_rows(shared)[1].tables[0]
    assert table.view(4).tolist() == [[GONE, GONE, 2, 3]]
    assert (table.pages(0, 2) < 0).all()
    window_rows(shared).check_writes([ScheduledRow(1, 12, 4)])  # sees 8 to 15
    with pytest.raises(AssertionError, match="sequence 1 would look at blocks that are gone"):
        window_rows(shared).check_writes([ScheduledRow(1, 11, 4)])  # sees 7
    ragged = [TableUpdate(1, 0, 0, [GONE, GONE, 4, 7], 0), TableUpdate(1, 0, 0, [GONE, GONE, 5, 6], 1)]
    window_rows(shared, *ragged).check_writes([ScheduledRow(1, 12, 4)])
    with pytest.raises(AssertionError, match="would look at"):
        window_rows(shared, *ragged).check_writes([ScheduledRow(1, 8, 4)])
    with pytest.raises(AssertionError):
        window_rows(TableUpdate(1, 0, 0, [GONE - 1]))
