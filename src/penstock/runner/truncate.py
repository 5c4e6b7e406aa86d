"""Temperature, min-p, top-k and top-p: from logits to the tokens that may be drawn and their weights.

The order is fixed: temperature, then min-p, then top-k, then top-p, each on what the one before left (top-p's share is
of the remaining mass). Tokens are ranked by (logit descending, id ascending), so equal logits at a boundary keep the
lowest ids, and exactly k tokens survive top-k. Weights are whole numbers (`ops.draw_weights`), so their sums are exact,
whoever adds them up in whatever order: `csrc/src/sample.cpp` does the same without sorting.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.sampling import TokenRules
from penstock.ops.draw_weights import I64, UNIT, scale_of, weigh

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


def truncate(logits: npt.NDArray[np.float32], rules: TokenRules) -> tuple[Ids | None, I64]:
    """Tokens that may be drawn, ascending (None: all), and their weights in units; the likeliest weighs UNIT.

    Shapes: logits [V], at least one finite, no NaN, no +inf; results [K], K >= 1 (or weights [V]).
    """
    weights = weigh(logits, scale_of(rules.temperature))
    ids: Ids | None = None
    if rules.min_p > 0.0:
        # The likeliest weighs exactly UNIT, so "at least min_p times the largest probability" is this.
        ids = np.flatnonzero(weights >= min(rules.min_p, 1.0) * UNIT)
        logits, weights = logits[ids], weights[ids]
    if 0 < rules.top_k < logits.shape[0]:
        kept = best_ids(logits, rules.top_k)
        if rules.top_p < 1.0:
            ranked = weights[kept]
            kept = kept[: _nucleus(ranked, _target(rules.top_p, ranked))]
    elif rules.top_p < 1.0:
        kept = _nucleus_ids(logits, weights, rules.top_p)
    else:
        return ids, weights
    kept = np.sort(kept)
    return (kept if ids is None else ids[kept]), weights[kept]


def _target(top_p: float, weights: I64) -> int:
    """The share `top_p` of the whole, in units."""
    return math.ceil(top_p * float(int(weights.sum())))


def _nucleus_ids(logits: npt.NDArray[np.float32], weights: I64, top_p: float) -> Ids:
    """The smallest set, taken from the likeliest on, whose mass reaches `top_p` of the whole."""
    target = _target(top_p, weights)
    size = _HEAD
    while True:
        head = best_ids(logits, size)
        ranked = weights[head]
        count = _nucleus(ranked, target)
        if count < len(head) or size >= logits.shape[0]:
            return head[:count]
        size *= 8


def _nucleus(ranked: I64, target: int) -> int:
    """Length of the shortest prefix whose sum is at least `target`; all if rounding leaves every sum below it."""
    return min(int(np.searchsorted(np.cumsum(ranked), target, side="left")) + 1, len(ranked))
