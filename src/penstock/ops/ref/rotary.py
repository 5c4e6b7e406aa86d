"""Rotary positions. Source: Su et al., RoFormer, arXiv 2104.09864; scaling as `core.model_spec.Rope` says."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.model_spec import Rope
from penstock.ops.plan import I32


def rope_frequencies(rope: Rope) -> npt.NDArray[np.float64]:
    """Radians per position of each rotated pair [dim/2]."""
    base = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    # llama3: count the turns a pair makes over the original context. Many turns: leave it alone; few: stretch it by
    # the whole factor, as `linear` does; in between: mix the two in proportion.
    turns = rope.original_max_position * base / (2 * math.pi)
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return keep * base + (1.0 - keep) * base / rope.factor


def rope_table(rope: Rope, num_positions: int) -> F32:
    """Cosines and sines of positions 0 ... num_positions-1: [2, num_positions, dim/2]. Angles are taken in float64."""
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * rope_frequencies(rope)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)


def rope_angles(positions: I32, table: F32) -> F32:
    """Entries [2, T, dim/2] of the table for `positions` [T]."""
    return table[:, positions]


def rope(x: F32, angles: F32, interleaved: bool, first: int = 0) -> F32:
    """Rotate components first ... first+dim of every head of x [T, H, D] by angles [2, T, dim/2] -> [T, H, D]."""
    cos, sin = angles[:, :, None, :]
    half = angles.shape[-1]
    if interleaved:
        a, b = slice(first, first + 2 * half, 2), slice(first + 1, first + 2 * half, 2)
    else:
        a, b = slice(first, first + half), slice(first + half, first + 2 * half)
    xa, xb = x[..., a], x[..., b]
    out = np.empty_like(x) if 2 * half == x.shape[-1] else x.copy()
    out[..., a] = xa * cos - xb * sin
    out[..., b] = xb * cos + xa * sin
    return out
