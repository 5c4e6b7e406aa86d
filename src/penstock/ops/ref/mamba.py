"""Mamba and Mamba-2: a causal convolution and a selective scan, both from a sequence's slot, token by token.

A parallel scan or Mamba-2's chunked products would sum in an order that depends on where a chunk begins. Here a token
does the same arithmetic whether it came in a prompt or alone.
"""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.pointwise import softplus
from penstock.ops.step import Step


def causal_conv(x: F32, step: Step, group: int, layer: int, taps: F32, bias: F32 | None, plane: str = "conv") -> F32:
    """x [T, C] -> [T, C]: bias + sum over k of taps[k] * x of K - 1 - k tokens ago; zeros before the first token.

    taps [K, C], the oldest first; bias [C]. Mutates: plane `plane` [num_pages, K-1, C] of the group, the last inputs.
    """
    kept = step.planes[group][plane]
    out = np.empty_like(x)
    for page, lo, hi, fresh in step.states(group, layer):
        past = np.zeros((len(taps) - 1, x.shape[1]), np.float32) if fresh else kept[page]
        window = np.concatenate([past, x[lo:hi]])
        own = np.zeros((hi - lo, x.shape[1]), np.float32) if bias is None else np.tile(bias, (hi - lo, 1))
        for k, tap in enumerate(taps):
            own += window[k : k + hi - lo] * tap
        out[lo:hi] = own
        kept[page] = window[hi - lo :]
    return out


def mamba_scan(x: F32, dt: F32, b: F32, c: F32, step: Step, group: int, layer: int, a: F32, d: F32) -> F32:
    """x, dt [T, I], b, c [T, N], a [I, N], d [I] -> [T, I]: c . state + d x, after state = state e^(dt a) + dt x b.

    dt comes as it is before softplus. Mutates: plane `state` [num_pages, N, I] of the group.
    Source: Gu & Dao, arXiv 2312.00752, algorithm 2, with b discretised as dt b as in the authors' code.
    """
    plane = step.planes[group]["state"]
    dt = softplus(dt)
    dx = dt * x
    out = np.empty_like(x)
    for page, lo, hi, fresh in step.states(group, layer):
        state = np.zeros(a.shape, np.float32) if fresh else plane[page].T.copy()
        for t in range(lo, hi):
            state = state * np.exp(dt[t, :, None] * a) + dx[t, :, None] * b[t]
            out[t] = np.matmul(state, c[t])
        plane[page] = state.T
    return out + x * d


def mamba2_scan(
    x: F32, dt: F32, b: F32, c: F32, step: Step, group: int, layer: int, a: F32, d: F32, dt_bias: F32, dt_min: float,
    dt_max: float,
) -> F32:  # fmt: skip
    """x [T, H, P], dt [T, H], b, c [T, G, N], a, d, dt_bias [H] -> [T, H, P]; H/G heads share a row of b and of c.

    dt becomes softplus(dt + dt_bias), cut to [dt_min, dt_max]; then as `mamba_scan` with one a per head.
    Mutates: plane `state` [num_pages, H, N*P] of the group. Source: Dao & Gu, arXiv 2405.21060, section 7.
    """
    plane = step.planes[group]["state"]
    t, heads, width = x.shape
    groups, n = b.shape[1:]
    dt = np.clip(softplus(dt + dt_bias), np.float32(dt_min), np.float32(dt_max))
    # Within a group, heads and their channels are one axis from here on.
    keep = np.repeat(np.exp(dt * a), width, axis=1).reshape(t, groups, heads // groups * width, 1)
    dx = (dt[:, :, None] * x).reshape(keep.shape)
    out = np.empty(keep.shape[:3], np.float32)
    for page, lo, hi, fresh in step.states(group, layer):
        shape = (*keep.shape[1:3], n)
        state = np.zeros(shape, np.float32) if fresh else turned(plane[page].reshape(heads, n, width)).reshape(shape)
        for i in range(lo, hi):
            state = state * keep[i] + dx[i] * b[i, :, None, :]
            out[i] = np.matmul(state, c[i, :, :, None])[..., 0]
        plane[page] = turned(state.reshape(heads, width, n)).reshape(plane.shape[1:])
    y: F32 = out.reshape(x.shape) + x * d[:, None]
    return y


def turned(state: F32) -> F32:
    """[H, A, B] -> [H, B, A], in order of memory: in a plane, what is advanced together lies together."""
    return np.ascontiguousarray(state.swapaxes(1, 2))
