"""Products of one row with weights: each weight is read once, and nothing but that takes time.

A program has a few outputs and walks all inputs, in vectors and without tensor cores, whose tiles one row would leave
empty. Shape letters: K inputs, M outputs, G groups along a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import LAUNCH, load, load_number, padded, store

_MAGIC = 128
"""128 + a code of 4 bits is a float whose upper bits are constant: two instructions make it."""


@triton.jit
def _floats(
    x, weight, bias, out, m_count, weight_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = m < m_count
    k = tl.arange(0, BLOCK_K)
    at = weight + m.to(tl.int64)[:, None] * weight_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for base in range(0, K // BLOCK_K * BLOCK_K, BLOCK_K):
        acc += load(at + base, mask=here[:, None]) * load(x + base + k)[None, :]
    if K % BLOCK_K > 0:
        near = K // BLOCK_K * BLOCK_K + k < K
        w = load(at + K // BLOCK_K * BLOCK_K, mask=here[:, None] & near[None, :])
        acc += w * load(x + K // BLOCK_K * BLOCK_K + k, mask=near)[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += load(bias + m, mask=here)
    store(out + m, y, mask=here)


@triton.jit
def _halves(pair, CODE: tl.constexpr):
    """The low and the high half of bytes as floats: `_MAGIC` more than codes, or numbers of e2m1."""
    low, high = (pair & 15).to(tl.int32), (pair >> 4).to(tl.int32)
    if CODE == "e2m1":
        return _small(low), _small(high)
    return _above(low), _above(high)


@triton.jit
def _above(code):
    return ((code << 16) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _small(code):
    exponent, half = (code >> 1) & 3, code & 1
    normal = (((exponent + 126) << 23) | (half << 22)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, half.to(tl.float32) * 0.5, normal)
    return tl.where(code > 7, -size, size)


@triton.jit
def _codes(
    x, codes, scales, zeros, bias, out, m_count, codes_stride, scales_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    ZEROS: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = m < m_count
    row, g = m.to(tl.int64), tl.arange(0, GROUPS)
    wide: tl.constexpr = GROUP * BITS // 8
    at = codes + row[:, None, None] * codes_stride + (g[:, None] * wide + tl.arange(0, wide)[None, :])[None, :, :]
    scale_at = row[:, None] * scales_stride + g[None, :]
    acc = tl.zeros([BLOCK_M, GROUPS], tl.float32)
    inputs = tl.arange(0, GROUPS * GROUP)
    for base in range(0, K, GROUPS * GROUP):
        near = base + g * GROUP < K
        own = here[:, None] & near[None, :]
        a = load(x + base + inputs, mask=base + inputs < K)
        whole = tl.sum(tl.reshape(a, [GROUPS, GROUP]), 1)
        if BITS == 4:
            even, odd = tl.split(tl.reshape(a, [GROUPS, GROUP // 2, 2]))
            pair = load_number(at + base // 2, mask=own[:, :, None])
            low, high = _halves(pair, CODE)
            part = tl.sum(low * even[None, :, :] + high * odd[None, :, :], 2)
        else:
            w = load(at + base, mask=own[:, :, None], e4m3=CODE == "e4m3")
            part = tl.sum(w * tl.reshape(a, [GROUPS, GROUP])[None, :, :], 2)
        if ZEROS == "codes":
            part -= (load(zeros + scale_at + base // GROUP, mask=own) + OFFSET) * whole[None, :]
        else:
            part -= OFFSET * whole[None, :]
        acc += part * load(scales + scale_at + base // GROUP, mask=own)
        if ZEROS == "values":
            acc -= load(zeros + scale_at + base // GROUP, mask=own) * whole[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += load(bias + m, mask=here)
    store(out + m, y, mask=here)


def product_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, into: torch.dtype | None = None,
    shape: tuple[int, int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + bias of one row: [1, M] of the type `into`, by default x's, added in float32.

    Shapes: x [1, K] and weight [M, K] of floats, rows of which lie side by side; bias [M]. `shape`: outputs and inputs
    of a tile, and warps, for those who look for the best.
    """
    (_, k), m = x.shape, weight.shape[0]
    out = torch.empty((1, m), dtype=into or x.dtype, device=x.device)
    rows, columns, warps = shape or (8, 512, 4)
    columns = min(columns, padded(k))
    _floats[triton.cdiv(m, rows),](
        x, weight, bias, out, m, weight.stride(0), K=k, BLOCK_M=rows, BLOCK_K=columns, BIAS=bias is not None,
        num_warps=warps, **LAUNCH,
    )  # fmt: skip
    return out


def coded_row(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *, bits: int, zeros_are: str = "codes", offset: int = 0, code: str = "int",
    into: torch.dtype | None = None, shape: tuple[int, int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """`products.product_int8` or, with 4 `bits`, `product_int4` of one row x [1, K], which is not narrowed.

    `shape`: outputs of a tile, inputs of it, and warps. Raises: ValueError for groups that `fits` refuses.
    """
    (_, k), m, groups = x.shape, codes.shape[0], scales.shape[1]
    group = k // groups
    if not fits(k, groups, bits):
        raise ValueError(f"groups of {group} inputs: a row takes powers of two from {_least(bits)} on")
    out = torch.empty((1, m), dtype=into or x.dtype, device=x.device)
    rows, columns, warps = shape or (8, 1024, 4)
    shift = _MAGIC if bits == 4 and code != "e2m1" else 0
    _codes[triton.cdiv(m, rows),](
        x, codes, scales, zeros, bias, out, m, codes.stride(0), scales.stride(0),
        K=k, GROUP=group, BLOCK_M=rows, GROUPS=min(padded(groups, 1), max(1, columns // group)), BITS=bits,
        ZEROS="none" if zeros is None else zeros_are,
        OFFSET=float(shift + (0 if zeros is not None else offset)), BIAS=bias is not None, CODE=code,
        num_warps=warps, **LAUNCH,
    )  # fmt: skip
    return out


def _least(bits: int) -> int:
    return 32 if bits == 4 else 16


def fits(inputs: int, groups: int, bits: int) -> bool:
    """Whether `coded_row` takes rows of so many inputs in so many groups."""
    group = inputs // groups
    return _least(bits) <= group <= 2048 and not group & (group - 1)
