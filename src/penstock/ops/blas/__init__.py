"""The reference ops with whole-batch matrix products: one pass over the weights serves all rows of a step.

What batching is worth can only be measured where a step reads its weights once; row by row, ten sequences cost ten
passes. BLAS chooses the order of its sums by the number of rows, so the last bits of a token's logits depend on its
company: this table is *not* batch-invariant, its greedy tokens may differ from the reference where two logits nearly
tie, and it is off by default (`--ops blas`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.ref import REF
from penstock.ops.ref.product import as_float32

_CHUNK_ELEMENTS = 1 << 20
"""16-bit weights are widened at most this many elements at a time (4 MB of float32)."""


def linear(x: F32, weight: npt.NDArray[Any], bias: F32 | None = None) -> F32:
    """x [T, N] times weight [M, N] transposed, plus bias [M] -> [T, M], as one product."""
    if weight.dtype == np.float32:
        out: F32 = x @ weight.T
    else:
        m, n = weight.shape
        out = np.empty((x.shape[0], m), np.float32)
        step = max(1, _CHUNK_ELEMENTS // max(1, n))
        for lo in range(0, m, step):
            out[:, lo : lo + step] = x @ as_float32(weight[lo : lo + step]).T
    return out if bias is None else out + bias


BLAS = REF.replaced("blas", {"linear": linear}, batch_invariant=False)
