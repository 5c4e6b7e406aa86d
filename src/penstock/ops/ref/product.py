"""Embedding and matrix products, one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, widen
from penstock.ops.plan import I32
from penstock.ops.stored import StoredMatrix, Weight

_CHUNK_ELEMENTS = 1 << 20
"""16-bit weights are widened, and codes decoded, at most this many elements at a time (4 MB of float32)."""


def as_float32(x: npt.NDArray[Any]) -> F32:
    """float32 of a float32, float16 or bfloat16-bits array; the array itself if it is float32. Shapes: any."""
    if x.dtype == np.uint16:
        return widen(x)
    return x.astype(np.float32, copy=False)


def rows_as_float32(weight: Weight, first: int, last: int) -> F32:
    """Rows first ... last - 1 of a matrix [M, N], as far as it has them."""
    return weight.values(first, last) if isinstance(weight, StoredMatrix) else as_float32(weight[first:last])


def embed(token_ids: I32, weight: Weight, part: str = "", vocab_size: int = 0) -> F32:
    """Rows `token_ids` [T] of `weight` [V, E] -> [T, E]. Ids beyond the table read row 0.

    `part`: ids are type * `vocab_size` + word, and one of the two is looked up.
    """
    if part:
        token_ids = token_ids % vocab_size if part == "word" else token_ids // vocab_size
    return take_rows(weight, np.where(token_ids < weight.shape[0], token_ids, 0))


def take_rows(weight: Weight, rows: npt.NDArray[np.integer[Any]]) -> F32:
    """Rows of a matrix [M, N], in this order -> [len(rows), N]."""
    return weight.take(rows) if isinstance(weight, StoredMatrix) else as_float32(weight[rows])


def select(x: F32, rows: I32) -> F32:
    """Rows `rows` [R] of `x` [T, E] -> [R, E]."""
    return x[rows]


def linear(x: F32, weight: Weight, bias: F32 | None = None) -> F32:
    """x [T, N] times weight [M, N] transposed, plus bias [M] -> [T, M].

    A single `x @ weight.T` would be quicker, but BLAS picks its blocking, and with it the order of the sums, by the
    number of rows. Stacking T products of one row each makes numpy call the same matrix-vector routine with the same
    shape for each row, so a row's result does not depend on its company.
    """
    rows = x[:, None, :]
    out = product(rows, weight)[:, 0]
    return out if bias is None else out + bias


def product(x: F32, weight: Weight) -> F32:
    """x [..., N] times weight [M, N] transposed -> [..., M], as numpy does it for the shape of x.

    16-bit weights are widened, and codes decoded, a part at a time; the cuts depend on the weight's shape alone, never
    on the batch.
    """
    if weight.dtype == np.float32 and not isinstance(weight, StoredMatrix):
        whole: F32 = np.matmul(x, weight.T)
        return whole
    m, n = weight.shape
    out = np.empty((*x.shape[:-1], m), np.float32)
    step = max(1, _CHUNK_ELEMENTS // max(1, n))
    for lo in range(0, m, step):
        out[..., lo : lo + step] = np.matmul(x, rows_as_float32(weight, lo, lo + step).T)
    return out
