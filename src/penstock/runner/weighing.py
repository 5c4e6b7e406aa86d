"""Attention weights worked out beside the forward pass, for those who choose by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.plan import I32


class Score(NamedTuple):
    """How a layer scores: see `core.mixers.attention.Attention`."""

    num_kv_heads: int
    scale: float
    soft_cap: float | None


def attention_weights(q: F32, keys: F32, positions: I32, end: int, score: Score) -> F32:
    """Softmax weights [t, h, n] of queries [t, h, D], tokens at positions end-t ... end-1, over keys [n, D] of tokens
    at `positions` [n]; 0 for tokens that come behind the query's own, and all 0 if everything up to it is gone.

    Token by token, over what it sees and no more: its weights must not depend on what else its step ran.
    """
    t, h, _ = q.shape
    out = np.zeros((t, h, len(keys)), np.float32)
    reach = np.searchsorted(positions, np.arange(end - t, end), side="right").tolist()
    for i, n in enumerate(reach):
        if n == 0:
            continue
        s: F32 = np.matmul(q[i], keys[:n].T) * np.float32(score.scale)
        if score.soft_cap is not None:
            s = np.tanh(s / score.soft_cap) * score.soft_cap
        weights = np.exp(s - s.max(axis=-1, keepdims=True))
        out[i, :, :n] = weights / weights.sum(axis=-1, keepdims=True)
    return out
