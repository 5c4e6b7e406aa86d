"""The part of the naive loop (`tests.oracle`) that attention over chosen blocks has: every token from the beginning of
the text, blocks ordered in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.mixers.blocks import BlockAttention
from penstock.ops.ref.norm import rms_norm

if TYPE_CHECKING:
    from tests.oracle import NaiveModel


def block_attention(model: NaiveModel, h: F32, p: str, m: BlockAttention) -> F32:
    t, groups = len(h), m.num_kv_heads

    def made(name: str, heads: int) -> F32:
        x = model._linear(h, p + name).reshape(t, heads, -1)
        return model._rope(
            rms_norm(x, model._vector(f"{p}{name}_norm") + np.float32(m.norm.offset), m.norm.eps), m.rope
        )

    q, index_q = made("q", m.num_heads), made("index_q", groups)
    k, index = model._rounded(made("k", groups)), model._rounded(made("index_k", 1))[:, 0]
    v = model._rounded(model._linear(h, p + "v").reshape(t, groups, -1))
    out, share = np.zeros_like(q), m.num_heads // groups
    for i in range(t):
        blocks = [list(range(at, min(at + m.block, i + 1))) for at in range(0, i + 1, m.block)]
        for g in range(groups):
            worth = [max(_products(index_q[i], index[b], m.block)[g]) for b in blocks]
            order = sorted(range(len(blocks)), key=lambda n, w=worth: (n < len(blocks) - m.local, -w[n], n))
            at = [j for n in sorted(order[: m.top_k]) for j in blocks[n]]
            scores = (q[i, g * share : (g + 1) * share] @ k[at, g].T) * np.float32(m.head_dim**-0.5)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            values = np.ascontiguousarray(v[at, g])
            out[i, g * share : (g + 1) * share] = (weights @ values) / np.add.reduce(weights, axis=-1, keepdims=True)
    return model._linear(out.reshape(t, -1), p + "o")


def _products(q: F32, keys: F32, size: int) -> F32:
    """[G, n], as of a whole block: a product's bits depend on its shape."""
    whole = np.zeros((size, keys.shape[1]), np.float32)
    whole[: len(keys)] = keys
    return (q @ whole.T)[:, : len(keys)]
