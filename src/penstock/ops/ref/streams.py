"""Rows of several streams side by side (`core.model_spec.AltUp`), and gates of which a share works.

Shape letters: T tokens, n streams, E their width, F feed-forward width.
"""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32

LEAST_SQUARE = 1e-5
"""The mean square of what is made as large as something else, at least."""


def cut_off(gate: F32, factor: float) -> F32:
    """max(gate - (mean + factor * standard deviation of its row), 0) [T, F]."""
    n = np.float32(gate.shape[-1])
    centred = gate - gate.sum(axis=-1, keepdims=True) / n
    deviation = np.sqrt((centred * centred).sum(axis=-1, keepdims=True) / n)
    out: F32 = np.maximum(centred - deviation * np.float32(factor), np.float32(0.0))
    return out


def match_magnitude(x: F32, like: F32) -> F32:
    """x [T, E] times a number for each row, so that its root mean square is that of `like` [T, E]."""
    n = np.float32(x.shape[-1])
    wanted = np.sqrt((like * like).sum(axis=-1, keepdims=True) / n)
    found = np.maximum((x * x).sum(axis=-1, keepdims=True) / n, np.float32(LEAST_SQUARE))
    out: F32 = x * (wanted / np.sqrt(found))
    return out


def scale_columns(x: F32, weight: F32) -> F32:
    """x [T, E] * weight [E]."""
    return x * weight


def stack_streams(*streams: F32) -> F32:
    """n arrays [T, E] -> [T, n, E]."""
    return np.stack(streams, axis=1)


def mix_streams(x: F32, weights: F32) -> F32:
    """x_i + sum over j of weights[n i + j] x_j, for x [T, n, E] and weights [T, n * n]."""
    n = x.shape[1]
    out = x.copy()
    for i in range(n):
        for j in range(n):
            out[:, i] += weights[:, n * i + j, None] * x[:, j]
    return out


def correct_streams(x: F32, found: F32, weights: F32, active: int) -> F32:
    """x_i + (found - x_active) (1 + weights_i), for x [T, n, E], found [T, E] and weights [T, n]."""
    out: F32 = x + (found - x[:, active])[:, None] * (np.float32(1.0) + weights)[:, :, None]
    return out


def add_streams(x: F32, y: F32) -> F32:
    """x [T, n, E] plus y [T, E] in all streams but the first."""
    out = x.copy()
    out[:, 1:] += y[:, None]
    return out
