"""The tokens that a layer's kv heads shall read, by queries that were worked out in the layer before.

Source: InfiniGen, arXiv 2406.19707, section 4.3. Shape letters: T tokens, G kv heads, H query heads, R rehearsed
components, n tokens before the one that chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.selection import TokenReads
from penstock.ops.plan import I32
from penstock.ops.ref.storage import read_kv
from penstock.ops.step import Step


def rehearse(
    q: F32, step: Step, group: int, layer: int, plane: str, scale: float, reads: TokenReads, late: bool
) -> None:
    """Leave the places of the tokens that each token's kv heads read in the step's memo, under ("rehearse", group,
    layer, token); nothing for those that read everything.

    A token whose predecessor runs in the same step has its turn when `late`, behind `write_kv`: whichever it is, it
    chooses among the same keys. Mutates: step.memo.
    """
    rehearse_rows(q, step, group, layer, scale, reads, late, partial(read_kv, step.planes[group], plane, lo=0))


def rehearse_rows(
    q: F32, step: Step, group: int, layer: int, scale: float, reads: TokenReads, late: bool,
    keys_of: Callable[..., F32],
) -> None:  # fmt: skip
    """`keys_of(pages=, hi=)`: the parts of the first `hi` keys [hi, G, R] in these pages. See `rehearse`."""
    plan, where = step.plan, step.plan.groups[group]
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        for t in range(lo + 1, hi) if late else range(lo, min(lo + 1, hi)):
            before = int(plan.positions[t])
            if step.chooses(b, t) and reads.most(before + 1) <= before:
                keys = keys_of(pages=where.pages(b, layer), hi=before)
                step.memo["rehearse", group, layer, t] = choose(q[t], keys, scale, reads)


def choose(q: F32, keys: F32, scale: float, reads: TokenReads) -> list[I32]:
    """Ascending places, of each kv head, that a token with queries [H, R] reads of keys [n, G, R] and its own (n).

    As many for all kv heads as lie within `reach` of a query's largest score in the mean, at most the budget: those
    with the largest sums of the queries' weights, equals in order. A NaN is larger than all.
    """
    n, heads, _ = keys.shape
    own = q.reshape(heads, -1, q.shape[-1])
    s = np.matmul(own, keys.transpose(1, 2, 0)) * np.float32(scale)  # [G, H/G, n]
    s = np.where(np.isnan(s), np.float32(np.inf), s)
    top = s.max(axis=-1, keepdims=True)
    near = (s >= top - np.float32(reads.reach)).any(axis=1)
    with np.errstate(invalid="ignore"):  # an infinite score is as far from itself as from nothing
        weights = np.exp(np.where(s == top, np.float32(0.0), s - top))
    likely = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=1)
    recent = max(0, n + 1 - reads.recent)
    near[:, recent:] = True
    likely[:, recent:] = np.inf
    count = min(reads.most(n + 1) - 1, -(-int(near.sum()) // heads))
    best = np.argsort(-likely, axis=1, kind="stable")[:, :count]
    return [np.append(np.sort(own), n).astype(np.int32) for own in best]


def attend_tokens(
    q: F32, k: F32, v: F32, rule: Any, attend_row: Callable[..., F32], chosen: Sequence[npt.NDArray[Any]]
) -> F32:
    """A token's q [G, H/G, D] over what each kv head reads of k [n, G, D] and v [n, G, W], as if there were no others:
    [G, H/G, W]."""
    out: list[F32] = []
    for g, own in enumerate(chosen):
        sinks = None if rule.sinks is None else rule.sinks[g : g + 1]
        out.append(attend_row(q[g : g + 1], k[own, g : g + 1], v[own, g : g + 1], 0, rule._replace(sinks=sinks)))
    return np.concatenate(out)
