"""Hidden states of a prompt, folded into one vector: "last" token, "cls" (the first one), or the "mean" of all.

A prompt may come in chunks. What a chunk leaves for the next is a float64 vector per sequence, and a mean adds one
token after the other: neither chunks nor neighbours change the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.batch import Pooled, RowError, ScheduledRow
from penstock.ops.plan import I32
from penstock.runner.rows import RowStore

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


_NOTHING: I32 = np.zeros(0, np.int32)


class _Part(NamedTuple):
    """Hidden rows [first, first + num_rows) belong to `job`; `ends` if the prompt is complete with them."""

    job: ScheduledRow
    first: int
    num_rows: int
    ends: bool


class Pooler:
    """What is left of earlier chunks, by sequence. `forget` must hear of every row that leaves the rank."""

    def __init__(self, rows: RowStore) -> None:
        self._rows = rows
        self._sums: dict[int, F64] = {}
        self._parts: list[_Part] = []

    def __len__(self) -> int:
        return len(self._sums)

    def forget(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._sums.pop(seq_id, None)

    def wanted(self, scheduled: Sequence[ScheduledRow], query_start_loc: I32) -> I32:
        """Rows of the batch [P] whose hidden states `fold` will be given, in this order. Mutates: the step's parts."""
        self._parts = []
        pooling = [b for b, job in enumerate(scheduled) if job.pooling]
        if not pooling:
            return _NOTHING
        indices: list[int] = []
        for b in pooling:
            job = scheduled[b]
            ends = job.start + job.num_tokens == self._rows[job.seq_id].num_tokens
            low, high = 0, job.num_tokens
            if job.pooling == "last":
                low = high - 1 if ends else high
            elif job.pooling == "cls":
                high = 1 if job.start == 0 else 0
            first = int(query_start_loc[b])
            self._parts.append(_Part(job, len(indices), high - low, ends))
            indices += range(first + low, first + high)
        return np.asarray(indices, np.int32)

    def fold(self, hidden: F32) -> tuple[list[Pooled], list[RowError]]:
        """Vectors of the prompts that this step completed. Shapes: hidden [P, E], in the order of `wanted`."""
        done: list[Pooled] = []
        errors: list[RowError] = []
        for job, first, num_rows, ends in self._parts:
            total = self._sums.pop(job.seq_id, None)
            for row in hidden[first : first + num_rows].astype(np.float64):
                total = row if total is None else total + row
            if not ends:
                if total is not None:
                    self._sums[job.seq_id] = total
                continue
            assert total is not None, f"sequence {job.seq_id}: no chunk of its prompt gave a hidden state"
            if job.pooling == "mean":
                total = total / (job.start + job.num_tokens)
            if np.isfinite(total).all():
                done.append(Pooled(job.seq_id, total.astype("<f4").tobytes()))
            else:
                errors.append(
                    RowError(job.seq_id, "the model's hidden states hold a NaN or an infinity; check the checkpoint")
                )
        self._parts = []
        return done, errors
