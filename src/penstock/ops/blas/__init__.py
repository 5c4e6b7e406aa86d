"""The reference ops with whole-batch matrix products: one pass over the weights serves all rows of a step.

What batching is worth shows in full only where a step reads its weights once; row by row, ten sequences pass ten
times over each matrix. BLAS chooses the order of its sums by the number of rows, so the last bits of a token's logits
depend on its company: this table is *not* batch-invariant, its greedy tokens may differ from the reference where two
logits nearly tie, and it is off by default (`--ops blas`).
"""

from __future__ import annotations

from penstock.base.bf16 import F32
from penstock.ops.ref import REF
from penstock.ops.ref.product import product
from penstock.ops.stored import Weight


def linear(x: F32, weight: Weight, bias: F32 | None = None) -> F32:
    """x [T, N] times weight [M, N] transposed, plus bias [M] -> [T, M], as one product."""
    out = product(x, weight)
    return out if bias is None else out + bias


BLAS = REF.replaced("blas", {"linear": linear}, batch_invariant=False)
