"""Recurrences of channels that know nothing of each other: RG-LRU and complex diagonals, token by token from a slot.

A parallel scan would sum in an order that depends on where a chunk begins; see `ops.ref.mamba`.
"""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.pointwise import sigmoid
from penstock.ops.step import Step


def rg_lru(
    x: F32, gate: F32, fade: F32, step: Step, group: int, layer: int, a: F32, gate_bias: F32, fade_bias: F32
) -> F32:
    """x, gate, fade [T, W], a, gate_bias, fade_bias [W] -> [T, W]: state = f state + sqrt(1 - f^2) i x.

    i = sigmoid(gate + gate_bias), f = exp(a sigmoid(fade + fade_bias)); at position 0 the root is left out.
    Mutates: plane `state` [num_pages, 1, W] of the group. Source: De et al., arXiv 2402.19427, equations 1 to 4.
    """
    plane = step.planes[group]["state"]
    slow = a * sigmoid(fade + fade_bias)
    given, keep, root = x * sigmoid(gate + gate_bias), np.exp(slow), np.sqrt(-np.expm1(slow + slow))
    out = np.empty_like(x)
    for page, lo, hi, fresh in step.states(group, layer):
        state = np.zeros(x.shape[1], np.float32) if fresh else plane[page, 0]
        for t in range(lo, hi):
            state = keep[t] * state + (given[t] if fresh and t == lo else given[t] * root[t])
            out[t] = state
        plane[page, 0] = state
    return out


def diagonal_scan(x: F32, step: Step, group: int, layer: int, a: F32, c: F32, d: F32 | None) -> F32:
    """x [T, I], complex a, c [2, I, N], d [I] -> [T, I]: the real part of sum over N of c state, + d x.

    state = a state + x. Without d, x and the result are complex, [T, 2 I], real parts first (as are a and c).
    Mutates: planes `re` and `im` [num_pages, N, I] of the group. Source: Gu et al., arXiv 2206.11893, section 3.
    """
    planes = [step.planes[group][name] for name in ("re", "im")]
    (a_re, a_im), (c_re, c_im) = a.transpose(0, 2, 1), c.transpose(0, 2, 1)
    inner = a.shape[1]
    x_re, x_im = (x, np.zeros_like(x)) if d is not None else (x[:, :inner], x[:, inner:])
    out = np.empty_like(x)
    for page, lo, hi, fresh in step.states(group, layer):
        re, im = (np.zeros(a_re.shape, np.float32) if fresh else plane[page] for plane in planes)
        for t in range(lo, hi):
            re, im = a_re * re - a_im * im + x_re[t], a_re * im + a_im * re + x_im[t]
            out[t, :inner] = np.add.reduce(c_re * re - c_im * im, axis=0)
            if d is None:
                out[t, inner:] = np.add.reduce(c_re * im + c_im * re, axis=0)
        for plane, state in zip(planes, (re, im), strict=True):
            plane[page] = state
    return out if d is None else out + x * d
