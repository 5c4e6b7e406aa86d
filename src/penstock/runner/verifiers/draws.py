"""Verifiers that are exact in distribution: drafts are let pass with a probability, and what is left is drawn.

The law they share: with p the model's distribution behind a token, and drafts x_1, x_2, ... that the drafter has drawn
from q_1, q_2, ... (each known when it was drawn, as after the ones before), the token that results is distributed as p,
whatever the q are. A draft that was chosen, not drawn, is one that q gives probability 1; so is one whose q cannot be
right. It is exact too, and passes less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.draft import ROOT
from penstock.runner.verifiers.walk import F64, OWN_DRAW, Walk, probabilities

Uniform = Callable[[int], float]
"""The j-th of independent numbers in [0, 1) for one token."""


class Drawn(NamedTuple):
    """A draft and the distribution [V] that it was drawn from; None: it was chosen."""

    token: int
    q: F64 | None


class Select(Protocol):
    """Which of the drafts behind a token passes, if any, and the token that follows (the draft, or another)."""

    def __call__(
        self, p: F64, drafted_rows: Sequence[Drawn], judge: Uniform, rest: float
    ) -> tuple[int | None, int]: ...


def one_by_one(p: F64, drafted_rows: Sequence[Drawn], judge: Uniform, rest: float) -> tuple[int | None, int]:
    """Draft j passes with probability min(1, p(x)/q(x)); else p becomes what q has not covered, and the next is asked.

    Of one draft this is rejection sampling. Siblings may be drawn with or without replacement: q is each one's own.
    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2; Miao et al.,
    SpecInfer, arXiv 2305.09781, algorithm 2; Chen et al., Sequoia, arXiv 2402.12374, section 3.
    """
    for j, (token, q) in enumerate(drafted_rows):
        if q is None:
            if judge(j) < p[token]:
                return j, token
            left = p.copy()
            left[token] = 0.0
        else:
            if judge(j) * q[token] < p[token]:
                return j, token
            left = np.maximum(p - q, 0.0)
        total = float(left.sum())
        if total > 0.0:  # else p is q but for rounding, and it is drawn from as it is
            p = left / total
    return None, inverse(p, rest)


def inverse(p: F64, u: float) -> int:
    """The token at `u` of the running sum, by ascending id; never one of probability zero."""
    sums = np.cumsum(p)
    slot = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return slot if slot < len(sums) else int(np.flatnonzero(p)[-1])


class DrawRule:
    """Walks as long as a draft passes.

    `here` are all drafts that stand for the same tokens: a drafter that draws with replacement may have drawn a token
    twice, and what it drew behind either is a draft for what follows.
    """

    matches_greedy = True

    def __init__(self, select: Select, *, most: int | None = None) -> None:
        """`most`: how many drafts behind a token are looked at."""
        self._select, self._most = select, most

    def go(self, walk: Walk) -> None:
        tree = walk.drafted.tree
        here = [ROOT]
        while (final := walk.final()) is not None:
            p = probabilities(final, walk.drafted.rules)
            nodes = [child for node in here for child in walk.children[node + 1]][: self._most]
            drafted_rows = [Drawn(tree.token_ids[i], drawn_from(tree.drawn_from, i, tree.token_ids[i])) for i in nodes]
            passed, token = self._select(
                p, drafted_rows, lambda j: walk.uniform(OWN_DRAW + 1 + j), walk.uniform(OWN_DRAW)
            )
            if passed is None:
                walk.end(token)
                return
            here = [i for i in nodes if tree.token_ids[i] == token]
            walk.enter(nodes[passed])


def drawn_from(rows: npt.NDArray[np.float32] | None, i: int, token: int) -> F64 | None:
    """Distribution of draft i as float64, adding up to 1; None for what cannot have been drawn from."""
    if rows is None or not rows[i, token] > 0.0:
        return None
    q = rows[i].astype(np.float64)
    total = float(q.sum())
    return q / total if np.isfinite(total) and float(q.min()) >= 0.0 else None
