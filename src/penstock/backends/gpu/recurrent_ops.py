"""RG-LRU, complex diagonals and xLSTM's matrix memory: see `ops.ref.diagonal` and `ops.ref.mlstm`, whose formulas and
sources these are. Token by token, as in `backends.gpu.state_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from penstock.backends.gpu.step import TorchStep
from penstock.backends.gpu.token_by_token import each


def rg_lru(
    x: Tensor, gate: Tensor, fade: Tensor, step: TorchStep, group: int, layer: int, a: Tensor, gate_bias: Tensor,
    fade_bias: Tensor,
) -> Tensor:  # fmt: skip
    plane = step.tensor(group, "state")
    slow = a * each(torch.sigmoid, fade + fade_bias)
    given, keep = x * each(torch.sigmoid, gate + gate_bias), each(torch.exp, slow)
    root = each(lambda row: torch.sqrt(-torch.expm1(row + row)), slow)
    out = torch.empty_like(x)
    for page, lo, hi, fresh in step.states(group, layer):
        state = x.new_zeros(x.shape[1]) if fresh else plane[page, 0]
        for t in range(lo, hi):
            state = keep[t] * state + (given[t] if fresh and t == lo else given[t] * root[t])
            out[t] = state
        plane[page, 0] = state
    return out


def diagonal_scan(x: Tensor, step: TorchStep, group: int, layer: int, a: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
    planes = [step.tensor(group, name) for name in ("re", "im")]
    (a_re, a_im), (c_re, c_im) = (w.transpose(1, 2).contiguous() for w in (a, c))
    inner = a.shape[1]
    x_re, x_im = (x, torch.zeros_like(x)) if d is not None else (x[:, :inner], x[:, inner:])
    out = torch.empty_like(x)
    for page, lo, hi, fresh in step.states(group, layer):
        re, im = (torch.zeros_like(a_re) if fresh else plane[page] for plane in planes)
        for t in range(lo, hi):
            re, im = a_re * re - a_im * im + x_re[t], a_re * im + a_im * re + x_im[t]
            out[t, :inner] = (c_re * re - c_im * im).sum(0)
            if d is None:
                out[t, inner:] = (c_re * im + c_im * re).sum(0)
        for plane, state in zip(planes, (re, im), strict=True):
            plane[page] = state
    return out if d is None else out + x * d


def mlstm_gates(
    i: Tensor, f: Tensor, q: Tensor, k: Tensor, step: TorchStep, group: int, layer: int, eps: float
) -> Tensor:
    norms, tops = (step.tensor(group, name) for name in ("norm", "max"))
    slow, scale = -each(softplus, -f), k.shape[2] ** -0.5
    out = i.new_empty((len(i), 3, i.shape[1]))
    for page, lo, hi, fresh in step.states(group, layer):
        n = torch.zeros_like(k[0]) if fresh else norms[page]
        m = torch.zeros_like(i[0]) if fresh else tops[page, :, 0]
        for t in range(lo, hi):
            most = torch.maximum(slow[t] + m, i[t])
            by, new = torch.exp(slow[t] + m - most), torch.exp(i[t] - most)
            n, m = by[:, None] * n + new[:, None] * k[t], most
            found = (torch.matmul(q[t, :, None, :], n[:, :, None])[:, 0, 0] * scale).abs()
            out[t, 0], out[t, 1], out[t, 2] = by, new, scale / (torch.maximum(found, torch.exp(-m)) + eps)
        norms[page], tops[page, :, 0] = n, m
    return out.reshape(len(i), -1)


def mlstm(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, step: TorchStep, group: int, layer: int) -> Tensor:
    plane = step.tensor(group, "state")
    by, new, scale = (part[..., None] for part in gates.reshape(len(v), 3, -1).unbind(1))
    given, shape = new * v, (q.shape[1], q.shape[2], v.shape[2])
    out = torch.empty_like(v)
    for page, lo, hi, fresh in step.states(group, layer):
        state = plane.new_zeros(shape) if fresh else plane[page].reshape(shape)
        for t in range(lo, hi):
            state = state * by[t, :, :, None] + k[t, :, :, None] * given[t, :, None, :]
            out[t] = torch.matmul(q[t, :, None, :], state)[:, 0]
        plane[page] = state.reshape(plane.shape[1:])
    return out * scale
