"""Backend "ref": the softmax as the textbook writes it."""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.attention.rows import RowBackend, scores


def attend_row(q: F32, k: F32, v: F32, first: int, scale: float, soft_cap: float | None) -> F32:
    """One token with all its scores at once, their maximum subtracted. See `rows.AttendRow`."""
    s = scores(q, k, scale, soft_cap)
    weights = np.exp(s - np.maximum.reduce(s, axis=-1, keepdims=True))
    total = np.add.reduce(weights, axis=-1, keepdims=True)
    out: F32 = np.matmul(weights, v.transpose(1, 0, 2)) / total
    return out


FULL = RowBackend("ref", False, attend_row)
"""Two passes over the scores: maximum, then sum."""
