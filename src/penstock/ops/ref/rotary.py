"""Rotary positions. Source: Su et al., RoFormer, arXiv 2104.09864; scaling as `core.mixers.rope.Rope` says."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.mixers.rope import Rope
from penstock.ops.plan import I32

F64 = npt.NDArray[np.float64]


def rope_frequencies(rope: Rope, max_model_len: int) -> F64:
    """Radians per position of each rotated pair [dim/2], for contexts of up to `max_model_len` tokens."""
    base = _powers(rope.theta, rope.dim)
    match rope.kind:
        case "default":
            return base
        case "linear":
            return base / rope.factor
        case "ntk":
            return _ntk(rope, rope.factor)
        case "dynamic":
            return _dynamic(rope, max_model_len)
        case "llama3":
            return _llama3(rope, base)
        case "yarn":
            return _yarn(rope, base)
        case "proportional":
            return np.where(np.arange(len(base)) < int(rope.part * rope.dim // 2), base / rope.factor, 0.0)
        case "longrope":
            factors: F64 = np.array(rope.long_factor if _is_long(rope, max_model_len) else rope.short_factor)
            return base / factors


def _powers(theta: float, dim: int) -> F64:
    out: F64 = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    return out


def _is_long(rope: Rope, max_model_len: int) -> bool:
    return max_model_len > rope.original_max_position


def _ntk(rope: Rope, stretch: float) -> F64:
    """A larger theta, so that the slowest pair is stretched by `stretch` and the fastest not at all."""
    return _powers(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _dynamic(rope: Rope, max_model_len: int) -> F64:
    """NTK-aware, by the length. Up to the original one nothing is stretched."""
    length = max(max_model_len, rope.original_max_position)
    return _ntk(rope, rope.factor * length / rope.original_max_position - (rope.factor - 1.0))


def _llama3(rope: Rope, base: F64) -> F64:
    """Count the turns a pair makes over the original context. Many turns: leave it alone; few: stretch it by the whole
    factor, as `linear` does; in between: mix the two in proportion."""
    turns = rope.original_max_position * base / (2 * math.pi)
    width = rope.high_freq_factor - rope.low_freq_factor
    if width == 0.0:  # Llama 4: a step, nothing in between
        keep = (turns >= rope.low_freq_factor).astype(np.float64)
    else:
        keep = np.clip((turns - rope.low_freq_factor) / width, 0.0, 1.0)
    out: F64 = keep * base + (1.0 - keep) * base / rope.factor
    return out


def _yarn(rope: Rope, base: F64) -> F64:
    """As llama3, but the mixture goes linearly by the pair's number, between the pairs that make beta_fast and
    beta_slow turns over the original context. Source: Peng et al., arXiv 2309.00071, section 3.2."""

    def pair_with(turns: float) -> float:
        return rope.dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001  # as the reference code: no division by zero
    stretch = np.clip((np.arange(rope.dim // 2) - low) / width, 0.0, 1.0)
    out: F64 = stretch * base / rope.factor + (1.0 - stretch) * base
    return out


def rope_table(rope: Rope, max_model_len: int) -> F32:
    """Cosines and sines of positions 0 ... max_model_len-1 times the attention factor: [2, max_model_len, dim/2].

    With factors for G kv heads each has its own: [2, max_model_len, G, dim/2]. Angles are taken in float64.
    """
    positions = np.arange(max_model_len, dtype=np.float64)[:, None]
    frequencies = rope_frequencies(rope, max_model_len)
    angles = positions * frequencies
    first = rope.start_tokens
    if first and _is_long(rope, max_model_len):
        angles[:first] = positions[:first] * _powers(rope.theta, rope.dim)
    if rope.head_factors:
        angles = angles[:, None, :] / np.array(rope.head_factors)[:, None]
    if rope.backwards:
        angles = -angles
    return (np.stack([np.cos(angles), np.sin(angles)]) * rope.attention_factor).astype(np.float32)


def rope_angles(positions: I32, table: F32) -> F32:
    """Entries [2, T, dim/2], or [2, T, G, dim/2], of the table for `positions` [T]."""
    return table[:, positions]


def rope(x: F32, angles: F32, interleaved: bool, first: int = 0) -> F32:
    """Rotate components first ... first+dim of every head of x [T, H, D] by angles [2, T, dim/2] -> [T, H, D].

    Angles [2, T, G, dim/2] are those of G equal runs of heads, one after another.
    """
    if angles.ndim == 3:
        cos, sin = angles[:, :, None, :]
    else:
        cos, sin = np.repeat(angles, x.shape[1] // angles.shape[2], axis=2)
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
