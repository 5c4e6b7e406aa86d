"""xLSTM's matrix memory, token by token from a sequence's slot, in two steps.

What all columns of a head's matrix share, its exponents and the sum of its keys, comes first; the matrix is linear in
it.
"""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.pointwise import softplus
from penstock.ops.step import Step


def mlstm_gates(i: F32, f: F32, q: F32, k: F32, step: Step, group: int, layer: int, eps: float) -> F32:
    """i, f [T, H], q, k [T, H, K] -> [T, 3 H]: what the heads' states fade by; what the new is multiplied by; what is
    found is multiplied by.

    With l = log(sigmoid(f)): m' = max(l + m, i), by = exp(l + m - m'), n = by n + exp(i - m') k, and what is found is
    multiplied by K^-0.5 / (max(|K^-0.5 q n|, exp(-m')) + eps). m begins at 0.
    Mutates: planes `norm` [num_pages, H, K] and `max` [num_pages, H, 1] of the group.
    Source: Beck et al., arXiv 2405.04517, equations 21 to 27, stabilised as in appendix A.
    """
    norms, tops = (step.planes[group][name] for name in ("norm", "max"))
    slow, scale = -softplus(-f), np.float32(k.shape[2] ** -0.5)
    out = np.empty((len(i), 3, i.shape[1]), np.float32)
    for page, lo, hi, fresh in step.states(group, layer):
        n = np.zeros(k.shape[1:], np.float32) if fresh else norms[page]
        m = np.zeros(i.shape[1], np.float32) if fresh else tops[page, :, 0]
        for t in range(lo, hi):
            most = np.maximum(slow[t] + m, i[t])
            by, new = np.exp(slow[t] + m - most), np.exp(i[t] - most)
            n, m = by[:, None] * n + new[:, None] * k[t], most
            found = np.abs(np.matmul(q[t, :, None, :], n[:, :, None])[:, 0, 0] * scale)
            out[t] = by, new, scale / (np.maximum(found, np.exp(-m)) + np.float32(eps))
        norms[page], tops[page, :, 0] = n, m
    return out.reshape(len(i), -1)


def mlstm(q: F32, k: F32, v: F32, gates: F32, step: Step, group: int, layer: int) -> F32:
    """q, k [T, H, K], v [T, H, W], gates [T, 3 H] of `mlstm_gates` -> [T, H, W]; the state is [H, K, W].

    state = by state + k^T (new v); out = q state times the third. Mutates: plane `state` [num_pages, H, K*W].
    """
    plane = step.planes[group]["state"]
    by, new, scale = (part[..., None] for part in gates.reshape(len(v), 3, -1).swapaxes(0, 1))
    given, shape = new * v, (q.shape[1], q.shape[2], v.shape[2])
    out = np.empty_like(v)
    for page, lo, hi, fresh in step.states(group, layer):
        state = np.zeros(shape, np.float32) if fresh else plane[page].reshape(shape)
        for t in range(lo, hi):
            state = state * by[t, :, :, None] + k[t, :, :, None] * given[t, :, None, :]
            out[t] = np.matmul(q[t, :, None, :], state)[:, 0]
        plane[page] = state.reshape(plane.shape[1:])
    return out * scale
