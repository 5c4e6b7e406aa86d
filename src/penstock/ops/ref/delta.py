"""The gated delta rule, token by token from a sequence's slot.

The form of chunks would solve a triangular system per chunk, so that a token's bits would say where its chunk began.
"""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.pointwise import sigmoid, softplus
from penstock.ops.step import Step


def gated_delta(
    q: F32, k: F32, v: F32, dt: F32, beta: F32, step: Step, group: int, layer: int, a: F32, norm_eps: float,
    beta_scale: float, in_turn: bool = False, floor: float = 0.0,
) -> F32:  # fmt: skip
    """q, k [T, G, K], v [T, H, W], dt [T, H] or [T, H*K], beta [T, H], a [H] -> [T, H, W]; H/G heads share q and k,
    those in a row or, `in_turn`, every G-th.

    Of each head, with unit vectors of q and k and q times K^-0.5: state = state * exp(a softplus(dt));
    state += k^T (beta_scale * sigmoid(beta) * (v - k state)); out = q state. dt has its bias already; with H*K numbers
    every component of the key fades by itself. With a `floor` below zero the state fades by exp(floor sigmoid(a dt)).
    Mutates: plane `state` [num_pages, H, K*W] of the group.
    Source: Yang et al., arXiv 2412.06464, equation 10; arXiv 2510.26692, equation 1 (decay per channel).
    """
    plane = step.planes[group]["state"]
    t, heads, width = v.shape
    dim = q.shape[2]
    turn = np.arange(heads) % q.shape[1] if in_turn else np.arange(heads) * q.shape[1] // heads
    q, k = (unit(x, norm_eps)[:, turn] for x in (q, k))
    q = q * np.float32(dim**-0.5)
    by = dt.reshape(t, heads, -1)
    decay = sigmoid(by * a[:, None]) * np.float32(floor) if floor else softplus(by) * a[:, None]
    keep = np.exp(decay)[..., None]
    share = (sigmoid(beta) * np.float32(beta_scale))[:, :, None, None]
    out = np.empty_like(v)
    for page, lo, hi, fresh in step.states(group, layer):
        state = np.zeros((heads, dim, width), np.float32) if fresh else plane[page].reshape(heads, dim, width)
        for i in range(lo, hi):
            state = state * keep[i]
            wrong: F32 = (v[i, :, None, :] - np.matmul(k[i, :, None, :], state)) * share[i]
            state = state + k[i, :, :, None] * wrong
            out[i] = np.matmul(q[i, :, None, :], state)[:, 0]
        plane[page] = state.reshape(plane.shape[1:])
    return out


def unit(x: F32, eps: float) -> F32:
    """x [..., N] / sqrt(sum of x^2 + eps)."""
    norm: F32 = np.sqrt(np.add.reduce(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / norm
