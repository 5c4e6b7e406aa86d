"""What a step with drafts must take back: entries of rejected tokens, and recurrent states that have seen them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.core.batch import Verified
from penstock.ops.plan import I32
from penstock.runner.drafted import DraftedRow
from penstock.runner.rows import RowStore
from penstock.runner.storage import Storage
from penstock.runner.verify import VerifyOutput

States = dict[int, list[tuple[npt.NDArray[Any], int, npt.NDArray[Any]]]]
"""Sequence -> (plane, page, what it held)."""


class Undo:
    """Before the step it copies the states of rows that draft, if the model has any; after it, it puts things right.

    The accepted path moves into the slots behind the newest known token (a tree's drafts lie in the order in which
    they were proposed), and every other draft's slot is zeroed: memory beyond what a sequence has computed is clean.
    """

    def __init__(self, storage: Storage, rows: RowStore) -> None:
        self._storage, self._rows = storage, rows
        self._slots = [g for g, group in enumerate(rows.groups) if not group.spec.per_token]
        self._entries = any(p.every is not None for group in rows.groups for p in group.spec.page_planes)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state, or entries of several tokens, that follow one path only.

        Entries need no undoing: nobody sees one before all of its tokens are known, and it is made anew then.
        """
        return bool(self._slots) or self._entries

    def remember(self, drafted_rows: Sequence[DraftedRow]) -> States:
        """The states of the rows whose drafts might be rejected."""
        if not self._slots:
            return {}
        return {drafted.seq_id: self._states(drafted.seq_id) for drafted in drafted_rows if drafted.tree.token_ids}

    def _states(self, seq_id: int) -> list[tuple[npt.NDArray[Any], int, npt.NDArray[Any]]]:
        row = self._rows[seq_id]
        out = []
        for g in self._slots:
            for page in row.tables[g].pages(0, 1).tolist():
                out += [(array, page, array[page].copy()) for array in self._storage.planes[g].values()]
        return out

    def settle(self, drafted_rows: Sequence[DraftedRow], result: VerifyOutput, before: States) -> list[Verified]:
        """Mutates: the storage. Returns the results with `num_kept` as it is now."""
        settled: list[Verified] = []
        for drafted, verified, outcome in zip(drafted_rows, result.verified, result.outcomes, strict=True):
            count, path = len(drafted.tree.token_ids), outcome.path
            if len(path) < count:
                if drafted.seq_id in before:  # the state has seen what was rejected: all of the step is done again
                    for array, page, content in before[drafted.seq_id]:
                        array[page] = content
                    self._clear(drafted, 0, count)
                    verified = msgspec.structs.replace(verified, num_kept=0)
                else:
                    self._keep(drafted, path, count)
            settled.append(verified)
        return settled

    def _keep(self, drafted: DraftedRow, path: list[int], count: int) -> None:
        first = drafted.start + 1
        if path != list(range(len(path))):
            self._storage.move_slots(
                self._tables(drafted, count), [first + i for i in path], list(range(first, first + len(path)))
            )
        self._clear(drafted, len(path), count)

    def _clear(self, drafted: DraftedRow, begin: int, end: int) -> None:
        """Draft slots begin ... end-1."""
        first = drafted.start + 1
        slots = np.arange(first + begin, first + end, dtype=np.int32)
        self._storage.clear_slots(self._tables(drafted, end), slots)

    def _tables(self, drafted: DraftedRow, count: int) -> list[I32]:
        row = self._rows[drafted.seq_id]
        return [row.tables[g].view(self._rows.num_blocks(g, drafted.start + 1 + count)) for g in range(len(row.tables))]
