"""Gated activations: f(gate) * up in one pass.

Source: Shazeer, GLU variants, arXiv 2002.05202; gpt-oss (the clamped SwiGLU). Shape letters: T tokens, F inner.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import LAUNCH, load, overlap, padded, store, wait_for_others
from penstock.ops.ref.pointwise import SWIGLU_ALPHA

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "swiglu_clamped")
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_TANH_SCALE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_ALPHA = tl.constexpr(SWIGLU_ALPHA)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activated(x, NAME: tl.constexpr):
    if NAME == "silu":
        y = x * _sigmoid(x)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    elif NAME == "gelu_tanh":
        y = x * _sigmoid((x + 0.044715 * x * x * x) * _TANH_SCALE)  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    elif NAME == "relu":
        y = tl.maximum(x, 0.0)
    elif NAME == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif NAME == "sigmoid":
        y = _sigmoid(x)
    else:
        y = 2.0 * _sigmoid(2.0 * x) - 1.0
    return y


@triton.jit
def _gated(
    gate, up, out, gate_stride, up_stride, limit, F: tl.constexpr, BLOCK: tl.constexpr, NAME: tl.constexpr,
    CLAMPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = f < F
    wait_for_others(EARLY)
    x = load(gate + t * gate_stride + f, mask=own)
    y = load(up + t * up_stride + f, mask=own)
    if NAME == "swiglu_clamped":
        if CLAMPED:
            x = tl.minimum(x, limit)
            y = tl.minimum(tl.maximum(y, -limit), limit)
        y = x * _sigmoid(x * _ALPHA) * (y + 1.0)
    else:
        x = _activated(x, NAME)
        if CLAMPED:
            x = tl.minimum(x, limit)
            y = tl.minimum(tl.maximum(y, -limit), limit)
        y = x * y
    store(out + t * F + f, y, mask=own)


def activate_gated(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None = None) -> torch.Tensor:
    """f(gate) * up, [T, F] of gate's type, computed in float32.

    Shapes: gate, up [T, F] float32, float16 or bfloat16, rows of which lie side by side (halves of one matrix will do).
    `limit`: min(gate, limit), of others than "swiglu_clamped" min(f(gate), limit), and up within it.
    Raises: ValueError for another name.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"no kernel knows the activation {activation!r}: it is one of {', '.join(ACTIVATIONS)}")
    t, f = gate.shape
    out = torch.empty((t, f), dtype=gate.dtype, device=gate.device)
    if t:
        block = min(1024, padded(f))
        _gated[t, triton.cdiv(f, block)](
            gate, up, out, gate.stride(0), up.stride(0), 0.0 if limit is None else float(limit),
            F=f, BLOCK=block, NAME=activation, CLAMPED=limit is not None, num_warps=4, **overlap(),
            **LAUNCH,
        )  # fmt: skip
    return out
