"""Hadamard rotation of heads: one large component becomes many small ones before they are rounded.

Source: QuaRot, arXiv 2404.00456, section 4 (keys and queries after the rotary embedding, values and their output).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from penstock.base.bf16 import F32


@cache
def hadamard_matrix(dim: int) -> F32:
    """[dim, dim], symmetric and its own inverse: Sylvester's matrix of the largest power of two that divides `dim`, as
    often along the diagonal as it fits, scaled to length 1."""
    size = dim & -dim
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(dim // size), block / np.sqrt(size)).astype(np.float32)


def hadamard(x: F32) -> F32:
    """x [T, H, D] times the Hadamard matrix, head by head; twice gives x again, to about 1e-6."""
    return np.stack([row @ hadamard_matrix(x.shape[-1]) for row in x]) if len(x) else x
