"""Sparse latent attention: an indexer scores every token that a query may see, attention reads the best of them.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1 (the lightning indexer and fine-grained token selection). Shape
letters: T tokens, H heads, D head dim, n tokens in a token's reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.ref.attention.full import attend_row
from penstock.ops.ref.attention.rows import Rule
from penstock.ops.ref.storage import read_kv
from penstock.ops.step import Step

Chosen = list[npt.NDArray[np.int64]]
"""For every token of a step the places of the tokens it reads among those it may see, ascending."""


def choose_tokens(
    q: F32, weights: F32, step: Step, group: int, layer: int, plane: str, top_k: int, scale: float
) -> Chosen:
    """The `top_k` tokens with the best sums over heads of weight * relu(scale q.k); ties go to the lower position.

    Shapes: q [T, H, D], weights [T, H]; keys [n, 1, D] in plane `plane`.
    """
    return [
        best_of(index_scores(q[t], weights[t], keys[:, 0], scale), top_k)
        for t, (keys,) in contexts(step, group, layer, (plane,))
    ]


def index_scores(q: F32, weights: F32, keys: F32, scale: float) -> F32:
    """q [H, D], weights [H], keys [n, D] -> [n]."""
    shares = np.maximum(np.matmul(q, keys.T) * np.float32(scale), np.float32(0.0))
    out: F32 = np.matmul(weights, shares)
    return out


def best_of(scores: F32, top_k: int) -> npt.NDArray[np.int64]:
    """Places of the `top_k` best scores, ascending; of equal ones the first."""
    return np.sort(np.argsort(-scores, kind="stable")[:top_k])


def attend_chosen(
    q: F32, chosen: Sequence[npt.NDArray[np.int64]], step: Step, group: int, layer: int, *, keys: tuple[str, ...],
    value: str, scale: float,
) -> F32:  # fmt: skip
    """Softmax attention of every token over those it has chosen: q [T, H, D] -> [T, H, W]."""
    width = step.planes[group][value].shape[-1]
    out = np.zeros((*q.shape[:2], width), np.float32)
    rule = Rule(scale, None, None, None)
    for t, (*parts, v) in contexts(step, group, layer, (*keys, value)):
        k, own = np.concatenate(parts, axis=-1), chosen[t]
        out[t] = attend_row(q[t][None], k[own], v[own], 0, rule)[0]
    return out


def contexts(step: Step, group: int, layer: int, names: Sequence[str]) -> Iterator[tuple[int, list[F32]]]:
    """Every token of the step with what the planes hold of the tokens it may see, in their order, [n, 1, W] each."""
    plan, where = step.plan, step.plan.groups[group]
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo == hi:
            continue
        start = int(plan.positions[lo]) - where.num_dropped(b, layer, 0)
        pages, paths = where.pages(b, layer, 0), step.trees(b)
        held = [read_kv(step.planes[group], name, pages, 0, start + hi - lo) for name in names]
        for t in range(lo, hi):
            if paths is None:
                n = int(plan.positions[t]) - where.num_dropped(b, layer, 0) + 1
                yield t, [x[:n] for x in held]
            else:
                seen = np.concatenate([np.arange(start), np.array(paths[t - lo], np.int64) + (start - lo)])
                yield t, [x[seen] for x in held]
