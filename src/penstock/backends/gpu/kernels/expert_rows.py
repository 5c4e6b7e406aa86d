"""Experts of float weights for a few tokens: each weight that is chosen is read once, and nothing is sorted.

As `row_products`: a program has a few outputs and walks all inputs, in vectors. One launch for gates and inner products
of all pairs of a token and its expert, one for what comes out, in which a program adds a token's experts in id order.
Shape letters are those of `experts`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.activation import _ALPHA, _activated, _sigmoid
from penstock.backends.gpu.kernels.loads import LAUNCH, load, load_number, overlap, padded, store, wait_for_others


@triton.jit
def _inner(
    x, up, up_bias, gate, gate_bias, ids, shares, out, m_count, x_stride, weight_stride, limit,
    CHOICES: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, WEIGHED: tl.constexpr, NAME: tl.constexpr, CLAMPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    m, k = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    here = m < m_count
    wait_for_others(EARLY)
    row = load_number(ids + pair).to(tl.int64) * m_count + m
    at = row[:, None] * weight_stride + k[None, :]
    x_at = x + (pair // CHOICES).to(tl.int64) * x_stride + k
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    other = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for base in range(0, K, BLOCK_K):
        near = base + k < K
        own = here[:, None] & near[None, :]
        w = load(up + at + base, mask=own)
        if GATED:
            v = load(gate + at + base, mask=own)
        a = load(x_at + base, mask=near)
        if WEIGHED:
            a = a * load_number(shares + pair)
        acc += w * a[None, :]
        if GATED:
            other += v * a[None, :]
    y, z = tl.sum(acc, 1), tl.sum(other, 1)
    if BIAS:
        y += load(up_bias + row, mask=here)
        if GATED:
            z += load(gate_bias + row, mask=here)
    if NAME == "swiglu_clamped":
        if CLAMPED:
            z = tl.minimum(z, limit)
            y = tl.minimum(tl.maximum(y, -limit), limit)
        y = z * _sigmoid(z * _ALPHA) * (y + 1.0)
    elif GATED:
        y = _activated(z, NAME) * y
    else:
        y = _activated(y, NAME)
    store(out + pair.to(tl.int64) * m_count + m, y, mask=here)


@triton.jit
def _outer(
    inner, down, bias, ids, shares, out, m_count, weight_stride, CHOICES: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, WEIGHED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1)
    m, k = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    here = m < m_count
    wait_for_others(EARLY)
    total = tl.zeros([BLOCK_M], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = t * CHOICES + choice
        row = load_number(ids + pair).to(tl.int64) * m_count + m
        acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for base in tl.static_range(0, K, BLOCK_K):
            near = base + k < K
            w = load(down + row[:, None] * weight_stride + base + k[None, :], mask=here[:, None] & near[None, :])
            acc += w * load(inner + pair.to(tl.int64) * K + base + k, mask=near)[None, :]
        y = tl.sum(acc, 1)
        if BIAS:
            y += load(bias + row, mask=here)
        if WEIGHED:
            y *= load_number(shares + pair)
        total += y
    store(out + t.to(tl.int64) * m_count + m, total, mask=here)


def run_few(
    x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, gate: Any, up: Any, down: Any, num_experts: int,
    activation: str, limit: float | None, scale_input: bool,
) -> torch.Tensor:  # fmt: skip
    """`experts.run_experts` of stacks that hold floats, for as few pairs as one likes to read weights for."""
    (t, e), choices = x.shape, ids.shape[1]
    f, early = up.codes.shape[0] // num_experts, overlap()
    inner = torch.empty((t * choices, f), dtype=down.codes.dtype, device=x.device)  # as tiles narrow it, too
    out = torch.empty((t, e), dtype=x.dtype, device=x.device)
    (rows, columns, warps), (down_rows, down_columns, down_warps) = _shapes(e, f)
    _inner[triton.cdiv(f, rows), t * choices](
        x, up.codes, up.bias, None if gate is None else gate.codes, None if gate is None else gate.bias, ids, shares,
        inner, f, x.stride(0), up.codes.stride(0), 0.0 if limit is None else float(limit), CHOICES=choices, K=e,
        BLOCK_M=rows, BLOCK_K=columns, GATED=gate is not None, BIAS=up.bias is not None, WEIGHED=scale_input,
        NAME=activation, CLAMPED=limit is not None, num_warps=warps, **early, **LAUNCH,
    )  # fmt: skip
    _outer[triton.cdiv(e, down_rows), t](
        inner, down.codes, down.bias, ids, shares, out, e, down.codes.stride(0), CHOICES=choices, K=f,
        BLOCK_M=down_rows, BLOCK_K=down_columns, BIAS=down.bias is not None, WEIGHED=not scale_input,
        num_warps=down_warps, **early, **LAUNCH,
    )  # fmt: skip
    return out


def _shapes(e: int, f: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Outputs and inputs of a tile, and warps, of both launches."""
    return (2, min(2048, padded(e)), 8), (1, min(1024, padded(f)), 4)
