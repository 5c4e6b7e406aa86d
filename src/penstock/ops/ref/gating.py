"""How many tokens an expert takes: what the mixtures that a checkpoint describes are compared with, for study.

Models here are routed dynamically: an expert takes whoever chose it, nobody is dropped and nothing is padded
(`ops.ref.experts`). Training systems fix the number per expert beforehand (`capped`: GShard, arXiv 2006.16668, section
3.2; Switch, arXiv 2101.03961, section 2.2), or let experts choose their tokens (`expert_choice`: Zhou et al., arXiv
2202.09368, section 3.2). In both what a token gets depends on the others of its batch, so no engine may do so and keep
its promise of equal answers; expert choice looks at tokens that come later, so it is not causal when decoding.

Shape letters: T tokens, X experts, K experts of a token.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.plan import I32
from penstock.ops.ref.experts import Routes, softmax


class Gating(NamedTuple):
    """Who passes through which expert, and what that costs.

    Attributes:
        weights: [T, X] of each token's experts; 0 where it does not pass.
        rows: rows that the experts' products have, padded ones among them.
        dropped: (token, choice) pairs that found no room.
        padded: rows of nobody.
    """

    weights: F32
    rows: int
    dropped: int
    padded: int

    @property
    def waste(self) -> float:
        """Share of the rows that is nobody's."""
        return self.padded / self.rows if self.rows else 0.0


def dynamic(routes: Routes, num_experts: int) -> Gating:
    """As many rows per expert as chose it. Source: Huang et al., arXiv 2303.06182, section 4."""
    return Gating(_dense(routes, num_experts, np.ones(routes.ids.shape, bool)), routes.ids.size, 0, 0)


def capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Rows of every expert: `factor` times what it had if all chose evenly, at least 1."""
    return max(1, ceil(factor * num_tokens * top_k / num_experts))


def capped(routes: Routes, num_experts: int, factor: float) -> Gating:
    """Every expert takes the first `capacity` tokens that chose it, and is padded up to that; others are dropped from
    it, and keep the weights of their other experts as they are. With one choice Switch's, with two GShard's."""
    num_tokens, top_k = routes.ids.shape
    most = capacity(num_tokens, num_experts, top_k, factor)
    taken = np.zeros(routes.ids.shape, bool)
    held = 0
    for expert in range(num_experts):
        tokens, choices = np.nonzero(routes.ids == expert)
        taken[tokens[:most], choices[:most]] = True
        held += min(most, tokens.size)
    rows = most * num_experts
    return Gating(_dense(routes, num_experts, taken), rows, routes.ids.size - held, rows - held)


def expert_choice(logits: F32, top_k: int, factor: float = 1.0) -> Gating:
    """logits [T, X] of a router: every expert takes the `capacity` tokens that score it highest, lower tokens first
    among equals, so all have equally many; a token may pass through none, or through all."""
    num_tokens, num_experts = logits.shape
    most = min(num_tokens, capacity(num_tokens, num_experts, top_k, factor))
    scores = softmax(logits)
    best: I32 = np.argsort(-scores, axis=0, kind="stable")[:most].astype(np.int32)
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, best, np.take_along_axis(scores, best, axis=0), axis=0)
    missed = int(np.count_nonzero(~weights.any(axis=1)))
    return Gating(weights, most * num_experts, missed, 0)


def _dense(routes: Routes, num_experts: int, taken: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> F32:
    out: F32 = np.zeros((len(routes), num_experts), np.float32)
    np.put_along_axis(out, routes.ids, np.where(taken, routes.weights, np.float32(0)), axis=1)
    return out
