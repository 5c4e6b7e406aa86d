"""Mixtures of experts: who takes part in a token, and what they add.

Source: Shazeer et al., arXiv 1701.06538, section 2; group-limited choice: DeepSeek-V2, arXiv 2405.04434, section 2.2.2;
choice by corrected scores: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; SparseMixer: arXiv 2409.12136, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import Experts, Router
from penstock.ops.plan import I32
from penstock.ops.ref.pointwise import activate, activate_gated, sigmoid, softplus
from penstock.ops.stored import Weight


class Routes(NamedTuple):
    """The experts of every token, in ascending order, and what they weigh: ids int32 [T, K], weights [T, K]."""

    ids: I32
    weights: F32

    def __len__(self) -> int:
        return len(self.ids)


class ExpertWeights(NamedTuple):
    """One expert: `gate` is None if it has none; each bias may be None. Matrices as `linear` takes them. `name`: what
    stands in front of the names of its weights."""

    gate: Weight | None
    up: Weight
    down: Weight
    gate_bias: F32 | None = None
    up_bias: F32 | None = None
    down_bias: F32 | None = None
    name: str = ""


def route(
    logits: F32, top_k: int, router: Router, correction: F32 | None = None, expert_scale: F32 | None = None
) -> Routes:
    """The router's product logits [T, X] -> the `top_k` experts of each token, as `core.model_spec.Router` says."""
    if router.score == "sparse_mixer":
        return _sparse_mixer(logits, top_k, router)
    scores = _scores(logits, router)
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        choice = _best_groups(choice, router)
    # A stable sort of the negated scores: the best first, ties by the lower id.
    best = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    ids = np.sort(best, axis=-1)
    weights: F32
    if router.chosen_only:
        weights = softmax(np.take_along_axis(logits, ids, axis=-1))
    else:
        weights = np.take_along_axis(scores, ids, axis=-1)
    if router.renormalize:
        total = np.add.reduce(weights, axis=-1, keepdims=True)
        weights /= total if router.score == "softmax" else total + np.float32(1e-20)
    scaled: F32 = weights * np.float32(router.scale)
    if expert_scale is not None:
        scaled = scaled * expert_scale[ids]
    return Routes(ids.astype(np.int32), scaled)


def _scores(logits: F32, router: Router) -> F32:
    if router.score == "sqrtsoftplus":
        out: F32 = np.sqrt(softplus(logits))
        return out
    return sigmoid(logits) if router.score == "sigmoid" else softmax(logits)


def route_listed(
    logits: F32, token_ids: I32, top_k: int, router: Router, table: I32, expert_scale: F32 | None = None
) -> Routes:
    """The router's product logits [T, X] and the experts [V, K] of every token of the vocabulary, ascending; [1, K]: of
    them all. With even scores only the rows of the logits are counted.

    Source: DeepSeek-V4 (2026), section 2.1; Roller et al., Hash Layers, arXiv 2106.04426.
    """
    ids = table[token_ids if len(table) > 1 else np.zeros_like(token_ids)]
    weights: F32
    if router.score == "even":
        weights = np.ones(ids.shape, np.float32)
    else:
        weights = np.take_along_axis(_scores(logits, router), ids, axis=-1)
    if router.renormalize:
        weights /= np.add.reduce(weights, axis=-1, keepdims=True) + np.float32(1e-20)
    scaled: F32 = weights * np.float32(router.scale)
    return Routes(ids, scaled if expert_scale is None else scaled * expert_scale[ids])


def of_task(f: Experts, logits: F32, correction: F32 | None, scale: F32 | None = None) -> tuple[I32, F32]:
    """The experts [1, K] of the router's task, ascending, and what every expert weighs then [X]: nothing if it is not
    one of them. `logits` [tasks, X]; `correction` and `scale` [X]. Source: Kudugunta et al., arXiv 2110.03742."""
    own = msgspec.structs.replace(f.router, tasks=0, task=0)
    found = route(logits[f.router.task][None].copy(), f.top_k, own, correction, scale)
    weighs = np.zeros(f.num_experts, np.float32)
    weighs[found.ids[0]] = found.weights[0]
    return found.ids, weighs


def _sparse_mixer(logits: F32, top_k: int, router: Router) -> Routes:
    left, size = logits.copy(), np.abs(logits)
    ids, weights = [], []
    for _ in range(top_k):
        best = np.argmax(left, axis=-1)[:, None]  # ties go to the lower id
        z = np.take_along_axis(left, best, axis=-1)
        far = (z - logits) / np.maximum(size, z) > np.float32(2 * router.jitter)
        share = softmax(np.where(far, np.float32(-np.inf), left))
        ids.append(best)
        weights.append(np.take_along_axis(share, best, axis=-1))
        np.put_along_axis(left, best, np.float32(-np.inf), axis=-1)
    chosen, shares = np.concatenate(ids, axis=-1), np.concatenate(weights, axis=-1)
    order = np.argsort(chosen, axis=-1)
    scaled: F32 = np.take_along_axis(shares, order, axis=-1) * np.float32(router.scale)
    return Routes(np.take_along_axis(chosen, order, axis=-1).astype(np.int32), scaled)


def _best_groups(choice: F32, router: Router) -> F32:
    """`choice` [T, X] with minus infinity for the experts outside the best groups."""
    t, num_experts = choice.shape
    grouped = choice.reshape(t, router.groups, num_experts // router.groups)
    if router.group_score == "max":
        worth = grouped.max(axis=-1)
    else:
        worth = np.add.reduce(np.sort(grouped, axis=-1)[:, :, -2:], axis=-1)
    best = np.argsort(-worth, axis=-1, kind="stable")[:, : router.top_groups]
    keep = np.zeros(worth.shape, bool)
    np.put_along_axis(keep, best, True, axis=-1)
    out: F32 = np.where(keep[:, :, None], grouped, np.float32(-np.inf)).reshape(t, num_experts)
    return out


def experts(
    x: F32, routes: Routes, weights: Sequence[ExpertWeights], activation: str, limit: float | None, scale_input: bool,
    linear: Callable[..., F32],
) -> F32:  # fmt: skip
    """x [T, E] through each token's experts, weighed and added in id order -> [T, E].

    Only the rows that chose an expert pass through it, so the work grows with K, not with X.
    """
    out: F32 = np.zeros_like(x)
    for i, w in enumerate(weights):
        rows, column = np.nonzero(routes.ids == i)
        if not rows.size:
            continue
        share = routes.weights[rows, column][:, None]
        h = x[rows] * share if scale_input else x[rows]
        up = linear(h, w.up, w.up_bias)
        if w.gate is None:
            inner = activate(up, activation)
        else:
            inner = activate_gated(linear(h, w.gate, w.gate_bias), up, activation, limit)
        y = linear(inner, w.down, w.down_bias)
        out[rows] += y if scale_input else y * share
    return out


def softmax(x: F32) -> F32:
    """Over the last axis."""
    e: F32 = np.exp(x - np.maximum.reduce(x, axis=-1, keepdims=True))
    total: F32 = np.add.reduce(e, axis=-1, keepdims=True)
    return e / total
