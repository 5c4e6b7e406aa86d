"""Attention over blocks of tokens that an indexer chooses, a token at a time.

What a token gets depends on the tokens that it sees and on nothing else: its keys are laid into blocks anew, each of
one size, whose products have one shape. Shape letters: H heads, G kv heads, D head dim, n tokens that are seen, N
blocks of S of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.ref.indexer import contexts
from penstock.ops.step import Step


def attend_blocks(
    q: F32, index_q: F32, step: Step, group: int, layer: int, block: int, top_k: int, local: int, scale: float
) -> F32:
    """q [T, H, D], index_q [T, G, I] -> [T, H, D]. Source: transformers' MiniMaxM3VLIndexer."""
    out = np.zeros_like(q)
    groups = index_q.shape[1]
    for own in contexts(step, group, layer, ("k", "v", "index")):
        k, v, index = own.held
        for t, seen in own.seen.items():
            chosen = chosen_blocks(index_q[t], index[seen, 0], block, top_k, local)
            for g, heads in enumerate(np.split(np.arange(q.shape[1]), groups)):
                at = seen[chosen[g]]
                scores = np.matmul(q[t, heads], k[at, g].T) * np.float32(scale)
                weights = np.exp(scores - np.maximum.reduce(scores, axis=-1, keepdims=True))
                total = np.add.reduce(weights, axis=-1, keepdims=True)
                out[t, heads] = np.matmul(weights, np.ascontiguousarray(v[at, g])) / total
    return out


def chosen_blocks(q: F32, keys: F32, block: int, top_k: int, local: int) -> list[npt.NDArray[np.int64]]:
    """q [G, I], keys [n, I] -> for each kv head the places of the tokens it reads among the n seen, ascending."""
    n = len(keys)
    count = -(-n // block)
    if count <= top_k:
        return [np.arange(n)] * len(q)
    padded = np.zeros((count, block, keys.shape[1]), np.float32)
    padded.reshape(-1, keys.shape[1])[:n] = keys
    scores = np.matmul(q, padded.transpose(0, 2, 1)).transpose(1, 0, 2).reshape(len(q), -1)
    scores[:, n:] = -np.inf
    worth = np.maximum.reduce(scores.reshape(len(q), count, block), axis=-1)
    worth[:, count - local :] = np.inf
    # A stable sort of the negated: the best first, ties by the earlier block.
    best = np.sort(np.argsort(-worth, axis=-1, kind="stable")[:, :top_k], axis=-1)
    places = best[:, :, None] * block + np.arange(block)
    return [own[own < n] for own in places.reshape(len(q), -1)]
