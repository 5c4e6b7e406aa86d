"""SpecTr: k-sequential selection among k drafts drawn from one distribution. Exact in distribution; greedy requests:
exact in tokens.

Each of the k is let pass with probability min(1, p(x) / (g q(x))), the first that passes is taken, else what is left of
p is drawn. With b(g) = sum_x min(q(x), p(x)/g), one of k passes with probability a = 1 - (1 - b)^k, and a token x by
way of a draft with probability min(q(x), p(x)/g) a/b: at most p(x) if a/b <= g. The least such g in [1, k] lets most
pass: g b(g) = sum_x min(g q(x), p(x)), never less than the sum_x min(q(x), p(x)) of one draft.
Drafts of different distributions (drawn without replacement, by several drafters, or chosen) are taken one by one, as
in `multi_step`. Drafts that are the same so far are drafts of one path: they must stay apart in the tree.

Source: Sun et al., SpecTr, arXiv 2310.15141 (k-SEQ, k-sequential selection).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.config import SpeculativeConfig
from penstock.runner.sampler import Sampler
from penstock.runner.verifiers.draws import Drawn, DrawRule, Uniform, inverse, one_by_one
from penstock.runner.verifiers.walk import F64, RuleVerifier

_HALVINGS = 40


def k_sequential(p: F64, drafted_rows: Sequence[Drawn], judge: Uniform, rest: float) -> tuple[int | None, int]:
    """See `draws.Select`."""
    q = drafted_rows[0].q if drafted_rows else None
    if (
        q is None
        or len(drafted_rows) == 1
        or not all(g.q is not None and np.array_equal(g.q, q) for g in drafted_rows[1:])
    ):
        return one_by_one(p, drafted_rows, judge, rest)
    g, times = division(p, q, len(drafted_rows))
    for j, (token, _) in enumerate(drafted_rows):
        if judge(j) * g * q[token] < p[token]:
            return j, token
    left = np.maximum(p - np.minimum(q, p / g) * times, 0.0)
    return None, inverse(left if left.any() else p, rest)


def division(p: F64, q: F64, k: int) -> tuple[float, float]:
    """The factor g and a/b: how often each draft is looked at on average. 1 <= a/b <= g <= k.

    a/b = 1 + (1-b) + ... + (1-b)^(k-1) grows with g, from no more than k; so g - a/b has a zero, found by halving.
    """

    drawable = q > 0.0
    ratio = p[drawable] / q[drawable]
    order = np.argsort(ratio)
    ratio = ratio[order]
    below = np.concatenate([[0.0], np.cumsum(p[drawable][order])])  # of p, where q has enough of a token
    above = 1.0 - np.concatenate([[0.0], np.cumsum(q[drawable][order])])

    def looked_at(g: float) -> float:
        i = int(np.searchsorted(ratio, g))
        missed = 1.0 - min(1.0, max(0.0, float(below[i]) / g + float(above[i])))
        return sum(missed**j for j in range(k))

    low, high = 1.0, float(k)
    if looked_at(low) <= low:
        return low, looked_at(low)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if looked_at(middle) <= middle else (middle, high)
    return high, looked_at(high)


def make(sampler: Sampler, config: SpeculativeConfig) -> RuleVerifier:
    return RuleVerifier(sampler, DrawRule(k_sequential))
