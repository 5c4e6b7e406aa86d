"""Hidden states of a prompt, folded into one vector (`core.pooler.POOLINGS`), and through the model's head if it asks.

A prompt may come in chunks. What a chunk leaves for the next is a float64 vector per sequence, and a mean adds one
token after the other: neither chunks nor neighbours change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.batch import Pooled, RowError, ScheduledRow
from penstock.core.pooler import HEAD, WHOLE
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

    def __init__(self, rows: RowStore, head: Callable[[F32], F32] | None = None) -> None:
        """`head`: what poolings that end in `core.pooler.HEAD` go through, [P, E] -> [P, N], row by row."""
        self._rows, self._head = rows, head
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
            mode = job.pooling.removesuffix(HEAD)
            if mode == "last":
                low = high - 1 if ends else high
            elif mode == "cls":
                high = 1 if job.start == 0 else 0
            first = int(query_start_loc[b])
            self._parts.append(_Part(job, len(indices), high - low, ends))
            indices += range(first + low, first + high)
        return np.asarray(indices, np.int32)

    def fold(self, hidden: F32) -> tuple[list[Pooled], list[RowError]]:
        """Vectors of the prompts that this step completed. Shapes: hidden [P, E], in the order of `wanted`."""
        done: list[tuple[ScheduledRow, F32]] = []
        errors: list[RowError] = []
        for job, first, num_rows, ends in self._parts:
            mode = job.pooling.removesuffix(HEAD)
            total = _folded(mode, self._sums.pop(job.seq_id, None), hidden[first : first + num_rows], job.start)
            if not ends:
                if total is not None:
                    self._sums[job.seq_id] = total
                continue
            assert total is not None, f"sequence {job.seq_id}: no chunk of its prompt gave a hidden state"
            count = job.start + job.num_tokens
            if mode in _DIVISORS:
                total = total / _DIVISORS[mode](count)
            done.append((job, total.astype(np.float32)))
        self._parts = []
        through = [i for i, (job, _) in enumerate(done) if job.pooling.endswith(HEAD)]
        if through:
            assert self._head is not None, "this model has no head"
            made = self._head(np.stack([done[i][1] for i in through])).copy()
            for i, vector in zip(through, made, strict=True):
                done[i] = done[i][0], vector
        pooled: list[Pooled] = []
        for job, vector in done:
            if np.isfinite(vector).all():
                pooled.append(Pooled(job.seq_id, vector.astype("<f4").tobytes()))
            else:
                errors.append(
                    RowError(job.seq_id, "the model's hidden states hold a NaN or an infinity; check the checkpoint")
                )
        return pooled, errors


_DIVISORS: dict[str, Callable[[int], float]] = {
    "mean": float, "mean_sqrt_len": lambda n: n**0.5, "weightedmean": lambda n: n * (n + 1) / 2
}  # fmt: skip
"""Tokens of a prompt -> what the sum of their hidden states is divided by."""


def _folded(mode: str, total: F64 | None, rows: F32, start: int) -> F64 | None:
    """What is known of a prompt behind the tokens from `start` on, whose hidden states are `rows` [n, E]."""
    if not len(rows):
        return total
    wide: F64 = rows.astype(np.float64)
    if mode == WHOLE:
        return wide if total is None else np.concatenate([total, wide])
    if mode == "weightedmean":
        wide *= np.arange(start + 1, start + 1 + len(wide), dtype=np.float64)[:, None]
    if total is not None:
        wide = np.concatenate([total[None], wide])
    if mode == "max":
        largest: F64 = wide.max(axis=0)
        return largest
    # One row after the other, whatever their number: a reduction along the first axis adds them in order.
    out: F64 = wide[0].copy()
    for row in wide[1:]:
        out += row
    return out
