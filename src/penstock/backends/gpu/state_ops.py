"""The operations that keep a state per sequence: token by token, so that a token does the same arithmetic wherever its
chunk began. See `ops.ref.recurrence`, `ops.ref.mamba` and `ops.ref.rwkv`, whose formulas and sources these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from penstock.backends.gpu.recurrent_ops import diagonal_scan, mlstm, mlstm_gates, rg_lru
from penstock.backends.gpu.step import TorchStep
from penstock.backends.gpu.token_by_token import each


def _turned(state: Tensor) -> Tensor:
    """See `ops.ref.mamba.turned`."""
    return state.transpose(1, 2).contiguous()


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: TorchStep, group: int, layer: int) -> Tensor:
    return _advance(q, k, v, each(torch.sigmoid, decay), step, group, layer)


def retention(q: Tensor, k: Tensor, v: Tensor, step: TorchStep, group: int, layer: int, decay: Tensor) -> Tensor:
    return _advance(q, k, v, decay.expand(len(q), -1), step, group, layer)


def _advance(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, step: TorchStep, group: int, layer: int) -> Tensor:
    plane, keep = step.tensor(group, "state"), keep[:, :, None, None]
    out = torch.empty_like(v)
    shape = (q.shape[1], q.shape[2], v.shape[2])
    for page, lo, hi, fresh in step.states(group, layer):
        state = plane.new_zeros(shape) if fresh else plane[page].reshape(shape)
        for t in range(lo, hi):
            state = state * keep[t] + k[t, :, :, None] * v[t, :, None, :]
            out[t] = torch.matmul(q[t, :, None, :], state)[:, 0]
        plane[page] = state.reshape(plane.shape[1:])
    return out


def causal_conv(
    x: Tensor, step: TorchStep, group: int, layer: int, taps: Tensor, bias: Tensor | None, plane: str = "conv"
) -> Tensor:
    kept = step.tensor(group, plane)
    out = torch.empty_like(x)
    for page, lo, hi, fresh in step.states(group, layer):
        past = x.new_zeros((len(taps) - 1, x.shape[1])) if fresh else kept[page]
        window = torch.cat([past, x[lo:hi]])
        own = x.new_zeros((hi - lo, x.shape[1])) if bias is None else bias.repeat(hi - lo, 1)
        for k, tap in enumerate(taps):
            own = own + window[k : k + hi - lo] * tap
        out[lo:hi] = own
        kept[page] = window[hi - lo :]
    return out


def mamba_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, step: TorchStep, group: int, layer: int, a: Tensor, d: Tensor
) -> Tensor:
    plane = step.tensor(group, "state")
    dt = each(softplus, dt)
    dx = dt * x
    out = torch.empty_like(x)
    for page, lo, hi, fresh in step.states(group, layer):
        state = torch.zeros_like(a) if fresh else plane[page].t().contiguous()
        for t in range(lo, hi):
            state = state * torch.exp(dt[t, :, None] * a) + dx[t, :, None] * b[t]
            out[t] = torch.mv(state, c[t].clone())
        plane[page] = state.t()
    return out + x * d


def mamba2_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, step: TorchStep, group: int, layer: int, a: Tensor, d: Tensor,
    dt_bias: Tensor, dt_min: float, dt_max: float,
) -> Tensor:  # fmt: skip
    plane = step.tensor(group, "state")
    t, heads, width = x.shape
    groups, n = b.shape[1:]
    dt = each(softplus, dt + dt_bias).clamp(dt_min, dt_max)
    keep = each(torch.exp, dt * a).repeat_interleave(width, dim=1).reshape(t, groups, heads // groups * width, 1)
    dx = (dt[:, :, None] * x).reshape(keep.shape)
    out = x.new_empty(keep.shape[:3])
    for page, lo, hi, fresh in step.states(group, layer):
        shape = (*keep.shape[1:3], n)
        state = x.new_zeros(shape) if fresh else _turned(plane[page].reshape(heads, n, width)).reshape(shape)
        for i in range(lo, hi):
            state = state * keep[i] + dx[i] * b[i, :, None, :]
            out[i] = torch.matmul(state, c[i, :, :, None])[..., 0]
        plane[page] = _turned(state.reshape(heads, width, n)).reshape(plane.shape[1:])
    return out.reshape(x.shape) + x * d[:, None]


def token_shift(x: Tensor, step: TorchStep, group: int, layer: int, plane: str) -> Tensor:
    kept = step.tensor(group, plane)
    out = torch.empty_like(x)
    for page, start, stop, fresh in step.states(group, layer):
        if fresh:
            out[start] = 0.0
        else:
            out[start] = kept[page, 0]
        out[start + 1 : stop] = x[start : stop - 1]
        kept[page, 0] = x[stop - 1]
    return out


def wkv4(k: Tensor, v: Tensor, step: TorchStep, decay: Tensor, first: Tensor, group: int, layer: int) -> Tensor:
    planes = [step.tensor(group, name) for name in ("num", "den", "exponent")]
    out = torch.empty_like(v)
    for page, start, stop, fresh in step.states(group, layer):
        num, den, top = (plane[page, 0].clone() for plane in planes)
        if fresh:
            num, den, top = torch.zeros_like(num), torch.zeros_like(den), torch.full_like(top, -math.inf)
        for t in range(start, stop):
            bonus = k[t] + first
            most = torch.maximum(top, bonus)
            old, new = torch.exp(top - most), torch.exp(bonus - most)
            out[t] = (num * old + v[t] * new) / (den * old + new)
            faded = top + decay
            top = torch.maximum(faded, k[t])
            old, new = torch.exp(faded - top), torch.exp(k[t] - top)
            num, den = num * old + v[t] * new, den * old + new
        for plane, state in zip(planes, (num, den, top), strict=True):
            plane[page, 0] = state
    return out


def wkv5(
    r: Tensor, k: Tensor, v: Tensor, step: TorchStep, group: int, layer: int, first: Tensor, decay: Tensor
) -> Tensor:
    return _fading(r, k, v, decay.expand(k.shape), step, group, layer, first)


def wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, step: TorchStep, group: int, layer: int, first: Tensor) -> Tensor:
    return _fading(r, k, v, each(lambda row: torch.exp(-torch.exp(row)), w), step, group, layer, first)


def shared_wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, step: TorchStep, group: int, layer: int) -> Tensor:
    plane = step.tensor(group, "state")
    _, h, n = r.shape
    decay = each(lambda row: torch.exp(-torch.exp(row)), w)
    k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    k, r = k - k * decay, r * n**-0.5
    out = torch.empty_like(v)
    shape = (h, n, v.shape[2])
    for page, start, stop, fresh in step.states(group, layer):
        state = _turned(v.new_zeros(shape) if fresh else plane[page].reshape(shape))
        for t in range(start, stop):
            state = state * decay[t, :, None, :] + v[t, :, :, None] * k[t, :, None, :]
            out[t] = torch.matmul(state, r[t, :, :, None])[:, :, 0]
        plane[page] = _turned(state).reshape(plane.shape[1:])
    return out


def _fading(
    r: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: TorchStep, group: int, layer: int, first: Tensor
) -> Tensor:
    plane = step.tensor(group, "state")
    _, h, d = v.shape
    out = torch.empty_like(v)
    for page, start, stop, fresh in step.states(group, layer):
        state = v.new_zeros((h, d, d)) if fresh else _turned(plane[page].reshape(h, d, d))
        for t in range(start, stop):
            own = (r[t] * k[t] * first).sum(-1, keepdim=True) * v[t]
            out[t] = torch.matmul(state, r[t, :, :, None])[:, :, 0] + own
            state = state * decay[t, :, None, :] + v[t, :, :, None] * k[t, :, None, :]
        plane[page] = _turned(state).reshape(h, d * d)
    return out


def wkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, removal: Tensor, rate: Tensor, step: TorchStep, group: int, layer: int
) -> Tensor:
    plane = step.tensor(group, "state")
    decay = each(lambda row: torch.exp(torch.sigmoid(row) * -math.exp(-0.5)), w)
    written = removal * rate
    _, h, d = v.shape
    out = torch.empty_like(v)
    for page, start, stop, fresh in step.states(group, layer):
        state = v.new_zeros((h, d, d)) if fresh else _turned(plane[page].reshape(h, d, d))
        for t in range(start, stop):
            removed = torch.matmul(state, removal[t, :, :, None])
            kept = state * decay[t, :, None, :] - removed * written[t, :, None, :]
            state = kept + v[t, :, :, None] * k[t, :, None, :]
            out[t] = torch.matmul(state, r[t, :, :, None])[:, :, 0]
        plane[page] = _turned(state).reshape(h, d * d)
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, beta: Tensor, step: TorchStep, group: int, layer: int, a: Tensor,
    norm_eps: float, beta_scale: float, in_turn: bool = False, floor: float = 0.0,
) -> Tensor:  # fmt: skip
    plane = step.tensor(group, "state")
    t, heads, width = v.shape
    dim = q.shape[2]

    def unit(x: Tensor) -> Tensor:
        norm = each(lambda row: torch.sqrt((row * row).sum(-1, keepdim=True) + norm_eps), x)
        share = heads // x.shape[1]
        return (x / norm).repeat(1, share, 1) if in_turn else (x / norm).repeat_interleave(share, dim=1)

    q, k = unit(q) * dim**-0.5, unit(k)
    by = dt.reshape(t, heads, -1)
    if floor:
        decay = each(torch.sigmoid, by * a[:, None]) * floor
    else:
        decay = each(softplus, dt).reshape(t, heads, -1) * a[:, None]
    keep = each(torch.exp, decay)[..., None]
    share = (each(torch.sigmoid, beta) * beta_scale)[:, :, None, None]
    out = torch.empty_like(v)
    for page, lo, hi, fresh in step.states(group, layer):
        state = v.new_zeros((heads, dim, width)) if fresh else plane[page].reshape(heads, dim, width)
        for i in range(lo, hi):
            state = state * keep[i]
            wrong = v[i, :, None, :] - torch.matmul(k[i, :, None, :], state)
            state = state + k[i, :, :, None] * (wrong * share[i])
            out[i] = torch.matmul(q[i, :, None, :], state)[:, 0]
        plane[page] = state.reshape(plane.shape[1:])
    return out


STATE_OPS: dict[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (
        recurrent,
        retention,
        causal_conv,
        mamba_scan,
        mamba2_scan,
        token_shift,
        wkv4,
        wkv5,
        wkv6,
        shared_wkv6,
        wkv7,
        gated_delta,
        rg_lru,
        diagonal_scan,
        mlstm_gates,
        mlstm,
    )
}
