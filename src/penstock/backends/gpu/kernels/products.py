"""Products with weights: codes of 8 and 4 bits that are decoded on the way, and floats in one fixed order.

Outputs are the rows of a tile and tokens its columns. Inputs are walked in order, in tiles that depend on the weight
alone; where outputs are too few to fill a device, inputs are cut where the weight's shape says, and a second kernel
adds the cuts in order. So with one width of the tile (`columns`) a token's bits do not depend on the batch.

Source: Frantar et al., MARLIN, arXiv 2408.11743 (codes decoded into tensor-core operands).
Shape letters: T tokens, K inputs, M outputs, G groups along a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import (
    LAUNCH,
    dot,
    load,
    load_number,
    narrowed,
    operands_of,
    overlap,
    store,
    wait_for_others,
)

_FILL = 256
"""Programs that a device should have at least."""


@triton.jit
def code_value(code, CODE: tl.constexpr):
    """What a code of 4 bits stands for: itself, or a number of e2m1 (1, 2 and 1 bits, bias 1)."""
    if CODE == "e2m1":
        exponent, half = (code >> 1) & 3, code & 1
        normal = ((exponent.to(tl.int32) + 126) << 23) | (half.to(tl.int32) << 22)
        size = tl.where(exponent == 0, half.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True))
        return tl.where(code > 7, -size, size)
    return code.to(tl.float32)


@triton.jit
def _total(x, OPERANDS: tl.constexpr):
    """The sum of a tile's inputs, for each token, as products see them."""
    return tl.sum(narrowed(x, OPERANDS).to(tl.float32), 0)


@triton.jit
def _product(
    x, codes, scales, zeros, bias, out, t_count, m_count, num_cuts, per_cut, x_stride, codes_stride, scales_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, ZEROS: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, OPERANDS: tl.constexpr,
    CODE: tl.constexpr, CUT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_others(EARLY)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    cut = tl.program_id(2)
    here, there = m < m_count, t < t_count
    row = m.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
    column, tokens = x + t.to(tl.int64)[None, :] * x_stride, x + t.to(tl.int64)[:, None] * x_stride
    for base in range(cut * per_cut, tl.minimum((cut + 1) * per_cut, K), BLOCK_K):
        if BITS == 4:
            j = base // 2 + tl.arange(0, BLOCK_K // 2)
            near = 2 * j < K
            pair = load_number(codes + row[:, None] * codes_stride + j[None, :], mask=here[:, None] & near[None, :])
            at_group = row * scales_stride + base // GROUP
            # Loaded side by side, so that the next ones can be on their way, and split here.
            k = base + tl.arange(0, BLOCK_K)
            a = load(tokens + k[None, :], mask=there[:, None] & (k < K)[None, :])
            even, odd = tl.split(tl.reshape(a, [BLOCK_T, BLOCK_K // 2, 2]))
            even, odd = tl.trans(even), tl.trans(odd)
            part = dot(code_value(pair & 15, CODE) - OFFSET, even, tl.zeros([BLOCK_M, BLOCK_T], tl.float32), OPERANDS)
            part = dot(code_value(pair >> 4, CODE) - OFFSET, odd, part, OPERANDS)
            if ZEROS != "none":
                whole = _total(even, OPERANDS) + _total(odd, OPERANDS)
            if ZEROS == "codes":
                part -= load(zeros + at_group, mask=here)[:, None] * whole[None, :]
            acc += part * load(scales + at_group, mask=here)[:, None]
            if ZEROS == "values":
                acc -= load(zeros + at_group, mask=here)[:, None] * whole[None, :]
        else:
            k = base + tl.arange(0, BLOCK_K)
            w = load(
                codes + row[:, None] * codes_stride + k[None, :], mask=here[:, None] & (k < K)[None, :],
                e4m3=CODE == "e4m3",
            )  # fmt: skip
            a = load(column + k[:, None], mask=there[None, :] & (k < K)[:, None])
            if BITS == 8:
                w = w - OFFSET
            if GROUP > 0:
                at_group = row * scales_stride + base // GROUP
                part = dot(w, a, tl.zeros([BLOCK_M, BLOCK_T], tl.float32), OPERANDS)
                if ZEROS == "codes":
                    part -= load(zeros + at_group, mask=here)[:, None] * _total(a, OPERANDS)[None, :]
                acc += part * load(scales + at_group, mask=here)[:, None]
                if ZEROS == "values":
                    acc -= load(zeros + at_group, mask=here)[:, None] * _total(a, OPERANDS)[None, :]
            else:
                acc = dot(w, a, acc, OPERANDS)
    if BITS == 8:
        if GROUP == 0:
            acc = acc * load(scales + row * scales_stride, mask=here)[:, None]
    at = t.to(tl.int64)[None, :] * m_count + m[:, None]
    if CUT:
        at += cut.to(tl.int64) * t_count * m_count
    elif BIAS:
        acc += load(bias + m, mask=here)[:, None]
    store(out + at, acc, mask=here[:, None] & there[None, :])


@triton.jit
def _add_cuts(
    parts, bias, out, count, m_count, num_cuts, BLOCK: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_others(EARLY)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = i < count
    total = load(parts + i, mask=own)
    at = parts + i
    for _ in range(1, num_cuts):
        at += count
        total += load(at, mask=own)
    if BIAS:
        total += load(bias + i % m_count, mask=own)
    store(out + i, total, mask=own)


def product_int8(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None, *,
    zeros: torch.Tensor | None = None, zeros_are: str = "codes", offset: int = 0, code: str = "int",
    operands: torch.dtype | None = None, columns: int | None = None, into: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + bias with W[m, k] = (codes[m, k] - zeros[m, k // group]) * scales[m, k // group]: [T, M] of the type
    `into`, by default x's.

    Shapes: x [T, K] float32, float16 or bfloat16; codes int8 or uint8 [M, K]; scales, zeros float32 [M, G] (G divides
    K; 1: one for an output); bias [M]. Without zeros `offset` is taken; zeros that are "values" are subtracted behind
    the scale. `code`: "e4m3" for bytes of that type. `operands`: what products multiply, in which codes are exact;
    None: x's type, bfloat16 if that is float32. `columns`: tokens of a tile, 16 or 64; None: 16 for at most 16 tokens.
    Raises: ValueError for groups that are no multiple of 16; whole rows are none where there are no zeros.
    """
    groups = scales.shape[1]
    group = 0 if groups == 1 and zeros is None else x.shape[1] // groups
    how = _Codes(8, group, "none" if zeros is None else zeros_are, offset, code)
    return _launch(x, codes, scales, zeros, bias, how, operands or _narrow(x), columns, into)


def product_int4(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *, zeros_are: str = "codes", offset: int = 8, code: str = "int",
    operands: torch.dtype | None = None, columns: int | None = None, into: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """`product_int8` with codes uint8 [M, K/2], input 2 j in the low half of byte j and 2 j + 1 in the high one.

    Groups are of 32 to K inputs. `code`: "e2m1" for halves of bytes of that type, whose offset is 0.
    Raises: ValueError for groups that are no multiple of 32.
    """
    how = _Codes(4, x.shape[1] // scales.shape[1], "none" if zeros is None else zeros_are, offset, code)
    return _launch(x, codes, scales, zeros, bias, how, operands or _narrow(x), columns, into)


def product_fixed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, operands: torch.dtype | None = None,
    into: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + bias, [T, M] of the type `into`, by default x's, each row of which has the same bits in every batch.

    Shapes: x [T, K] float32, float16 or bfloat16; weight [M, K] likewise; bias [M]. `operands`: None: weight's type.
    """
    return _launch(x, weight, None, None, bias, _Codes(16), operands or weight.dtype, 64, into)


class _Codes(NamedTuple):
    """How a weight is held: `group` 0 for one scale behind all inputs; `zeros_are` "none" where there are none."""

    bits: int
    group: int = 0
    zeros_are: str = "none"
    offset: int = 0
    code: str = "int"


def _narrow(x: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == torch.float32 else x.dtype


def _shape(bits: int, width: int) -> tuple[int, int, int, int]:
    """Outputs of a tile, its inputs at most, warps, and tiles on their way, for tiles of so many tokens."""
    tile = 128 if width == 16 and bits != 4 else 64
    return (64, tile, 4, 3) if width == 16 else (128, tile, 8, 3)


def _launch(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None,
    bias: torch.Tensor | None, how: _Codes, operands: torch.dtype, columns: int | None,
    into: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    (t, k), m = x.shape, codes.shape[0]
    bits, group = how.bits, how.group
    least = 32 if bits == 4 else 16
    if group % least:
        raise ValueError(
            f"groups of {group} inputs: this product takes multiples of {least}; decode the weight instead"
        )
    out = torch.empty((t, m), dtype=into or x.dtype, device=x.device)
    if not t or not m:
        return out
    width = columns or (16 if t <= 16 else 64)
    rows, tile, warps, stages = _shape(bits, width)
    while group % tile:
        tile //= 2
    tiles = triton.cdiv(k, tile)
    cuts = max(1, min(_FILL // triton.cdiv(m, rows), tiles // 4))
    per_cut = triton.cdiv(tiles, cuts) * tile
    cuts = triton.cdiv(k, per_cut)
    target = out if cuts == 1 else torch.empty((cuts, t, m), dtype=torch.float32, device=x.device)
    name = operands_of(operands)
    _product[triton.cdiv(m, rows), triton.cdiv(t, width), cuts](
        x, codes, scales, zeros, bias, target, t, m, cuts, per_cut, x.stride(0), codes.stride(0),
        0 if scales is None else scales.stride(0),
        K=k, GROUP=group, BLOCK_M=rows, BLOCK_T=width, BLOCK_K=tile, BITS=bits, ZEROS=how.zeros_are,
        OFFSET=float(0 if how.zeros_are != "none" else how.offset), BIAS=bias is not None, OPERANDS=name,
        CODE=how.code, CUT=cuts > 1, num_warps=warps, num_stages=stages, **overlap(), **LAUNCH,
    )  # fmt: skip
    if cuts > 1:
        _add_cuts[triton.cdiv(t * m, 1024),](target, bias, out, t * m, m, cuts, BLOCK=1024, BIAS=bias is not None,
                                             num_warps=4, **overlap(), **LAUNCH)  # fmt: skip
    return out
