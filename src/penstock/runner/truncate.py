"""Temperature, min-p, top-k and top-p: from logits to the tokens that may be drawn and their weights.

The order is fixed: temperature, then min-p, then top-k, then top-p, each on what the one before left (top-p's share is
of the remaining mass). Tokens are ranked by (logit descending, id ascending), so equal logits at a boundary keep the
lowest ids, and exactly k tokens survive top-k. Everything is float64 on one contiguous row, hence independent of the
batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.sampling import TokenRules

F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_HEAD = 256
"""How many of the likeliest tokens top-p looks at first. Most nuclei are smaller, and a full sort of a large vocabulary
costs more than the rest of sampling together."""


def best_ids(values: npt.NDArray[Any], k: int) -> Ids:
    """Indices of the k largest values, largest first, ties to the lowest index. Shapes: values [N]; result [min(k, N)].

    `values` must not hold a NaN.
    """
    n = values.shape[0]
    if k >= n:
        return np.argsort(-values, kind="stable").astype(np.int64, copy=False)
    if k <= 0:
        return np.zeros(0, np.int64)
    bound = np.partition(values, n - k)[n - k]
    above = np.flatnonzero(values > bound)
    above = above[np.argsort(-values[above], kind="stable")]
    return np.concatenate([above, np.flatnonzero(values == bound)[: k - len(above)]])


def truncate(logits: npt.NDArray[np.float32], rules: TokenRules) -> tuple[Ids | None, F64]:
    """Tokens that may be drawn, ascending (None: all), and their unnormalised weights; the likeliest weighs 1.

    Shapes: logits [V], at least one finite, no NaN, no +inf; results [K], K >= 1 (or weights [V]).
    """
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= rules.temperature
    weights: F64 = np.exp(scaled)
    ids: Ids | None = None
    if rules.min_p > 0.0:
        # The likeliest weighs exactly 1, so "at least min_p times the largest probability" is this.
        ids = np.flatnonzero(weights >= min(rules.min_p, 1.0))
        scaled, weights = scaled[ids], weights[ids]
    if 0 < rules.top_k < scaled.shape[0]:
        kept = best_ids(scaled, rules.top_k)
        if rules.top_p < 1.0:
            ranked = weights[kept]
            kept = kept[: _nucleus(ranked, rules.top_p * float(ranked.sum()))]
    elif rules.top_p < 1.0:
        kept = _nucleus_ids(scaled, weights, rules.top_p)
    else:
        return ids, weights
    kept = np.sort(kept)
    return (kept if ids is None else ids[kept]), weights[kept]


def _nucleus_ids(scaled: F64, weights: F64, top_p: float) -> Ids:
    """The smallest set, taken from the likeliest on, whose mass reaches `top_p` of the whole."""
    target = top_p * float(weights.sum())
    size = _HEAD
    while True:
        head = best_ids(scaled, size)
        ranked = weights[head]
        count = _nucleus(ranked, target)
        if count < len(head) or size >= scaled.shape[0]:
            return head[:count]
        size *= 8


def _nucleus(ranked: F64, target: float) -> int:
    """Length of the shortest prefix whose sum is at least `target`; all if rounding leaves every sum below it.

    `cumsum` adds from left to right, so a longer `ranked` gives the same sums at the front.
    """
    return min(int(np.searchsorted(np.cumsum(ranked), target, side="left")) + 1, len(ranked))
