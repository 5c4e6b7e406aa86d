"""Residual sums with the norm that follows them: one pass over memory instead of three.

A program has one row, so that a row's bits do not depend on its company.

Source: Zhang and Sennrich, arXiv 1910.07467 (RMSNorm); Ba et al., arXiv 1607.06450 (LayerNorm).
Shape letters: T tokens, E hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import LAUNCH, load, overlap, padded, store, wait_for_others


@triton.jit
def _norm(
    x, residual, weight, bias, total, out, eps, x_stride, residual_stride,
    E: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    own = e < E
    if WEIGHT:
        w = load(weight + e, mask=own)
    if BIAS:
        b = load(bias + e, mask=own)
    wait_for_others(EARLY)
    h = load(x + t * x_stride + e, mask=own)
    if RESIDUAL:
        h = h + load(residual + t * residual_stride + e, mask=own)
        store(total + t * E + e, h, mask=own)
    if CENTRED:
        h = tl.where(own, h - tl.sum(h, 0) / E, 0.0)
    y = h / tl.sqrt_rn(tl.sum(h * h, 0) / E + eps)
    if WEIGHT:
        y = y * w
    if BIAS:
        y = y + b
    store(out + t * E + e, y, mask=own)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None, *,
    into: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(h, h / sqrt(mean(h^2) + eps) * weight) with h = x + residual, both [T, E], computed in float32.

    Shapes: x, residual [T, E] float32, float16 or bfloat16, rows of which lie side by side; weight [E]. Without a
    residual h is x itself. A sum has the wider of the two types; `into`: the norm's type, None: the sum's.
    """
    return _launch(x, residual, weight, None, eps, into, centred=False)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
    residual: torch.Tensor | None = None, *, into: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(h, (h - mean(h)) / sqrt(var(h) + eps) * weight + bias) with h = x + residual. Shapes: as in `rms_norm`."""
    return _launch(x, residual, weight, bias, eps, into, centred=True)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
    into: torch.dtype | None, centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    t, e = x.shape
    kind = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out = torch.empty((t, e), dtype=into or kind, device=x.device)
    total = x if residual is None else torch.empty((t, e), dtype=kind, device=x.device)
    if not t:
        return total, out
    block = padded(e)
    _norm[t,](
        x, residual, weight, bias, total, out, eps, x.stride(0), 0 if residual is None else residual.stride(0),
        E=e, BLOCK=block, RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
        CENTRED=centred, num_warps=min(16, max(4, block // 512)), **overlap(), **LAUNCH,
    )  # fmt: skip
    return total, out
