"""The recurrent mixer of `core.model_spec.Recurrent`: a fixed state per sequence, advanced token by token."""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.pointwise import sigmoid
from penstock.ops.step import Step


def recurrent(q: F32, k: F32, v: F32, decay: F32, step: Step, group: int, layer: int) -> F32:
    """q, k [T, H, K], v [T, H, W], decay [T, H] -> [T, H, W]; the state is [H, K, W].

    A sequence at position 0 starts from a zero state whatever its page holds.
    Mutates: plane `state` [num_pages, H, K*W] of the group.
    """
    return _advance(q, k, v, sigmoid(decay), step, group, layer)


def retention(q: F32, k: F32, v: F32, step: Step, group: int, layer: int, decay: F32) -> F32:
    """As `recurrent`, with what a state is multiplied by fixed: decay [H].

    Source: Sun et al., RetNet, arXiv 2307.08621, equation 6.
    """
    return _advance(q, k, v, np.broadcast_to(decay, (len(q), len(decay))), step, group, layer)


def _advance(q: F32, k: F32, v: F32, keep: F32, step: Step, group: int, layer: int) -> F32:
    plane = step.planes[group]["state"]
    keep = keep[:, :, None, None]
    out = np.empty_like(v)
    shape = (q.shape[1], q.shape[2], v.shape[2])
    for page, lo, hi, fresh in step.states(group, layer):
        state = np.zeros(shape, np.float32) if fresh else plane[page].reshape(shape)
        for t in range(lo, hi):
            state = state * keep[t] + k[t, :, :, None] * v[t, :, None, :]
            out[t] = np.matmul(q[t, :, None, :], state)[:, 0]
        plane[page] = state.reshape(plane.shape[1:])
    return out
