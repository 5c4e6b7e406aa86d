"""Products of one row with weights: each weight is read once, and nothing but that takes time.

A program has a few outputs and walks all inputs, in vectors and without tensor cores, whose tiles one row would leave
empty. Shape letters: K inputs, M outputs, G groups along a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import (
    LAUNCH,
    has_ptx,
    load,
    load_number,
    overlap,
    padded,
    rounded,
    store,
    wait_for_others,
)
from penstock.backends.gpu.kernels.products import code_value

_MOST = 16384
"""Inputs of one launch of `_words`: a program holds all of them."""


@triton.jit
def _floats(
    x, weight, bias, out, m_count, weight_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = m < m_count
    k = tl.arange(0, BLOCK_K)
    at = weight + m.to(tl.int64)[:, None] * weight_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    if K >= BLOCK_K:
        ahead = load(at, mask=here[:, None])
        wait_for_others(EARLY)
        acc += ahead * load(x + k)[None, :]
    else:
        wait_for_others(EARLY)
    for base in range(BLOCK_K, K // BLOCK_K * BLOCK_K, BLOCK_K):
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
def _codes(
    x, codes, scales, zeros, bias, out, m_count, codes_stride, scales_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    ZEROS: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, CODE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_others(EARLY)
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
            low, high = code_value(pair & 15, CODE), code_value(pair >> 4, CODE)
            part = tl.sum(low * even[None, :, :] + high * odd[None, :, :], 2)
        else:
            w = load(at + base, mask=own[:, :, None], e4m3=CODE == "e4m3")
            part = tl.sum(w * tl.reshape(a, [GROUPS, GROUP])[None, :, :], 2)
        if ZEROS == "codes":
            part -= load(zeros + scale_at + base // GROUP, mask=own) * whole[None, :]
        else:
            part -= OFFSET * whole[None, :]
        acc += part * load(scales + scale_at + base // GROUP, mask=own)
        if ZEROS == "values":
            acc -= load(zeros + scale_at + base // GROUP, mask=own) * whole[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += load(bias + m, mask=here)
    store(out + m, y, mask=here)


@triton.jit
def _dot_bytes(a, b, acc, PTX: tl.constexpr):
    """acc and the products of the four signed bytes of two words."""
    if PTX:
        acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for i in tl.static_range(4):
            acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def _bytes(a, b, c, d):
    """The low bytes of four words as one, the first lowest."""
    return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)


@triton.jit
def _by_place(a):
    """Inputs in rows of 32, as eight tensors: the first ones of each eight, the second ones, and so on."""
    even, odd = tl.split(tl.reshape(a, [a.shape[0] * 4, 2, 2, 2]))  # by the three bits of a place
    a04, a26 = tl.split(even)
    a15, a37 = tl.split(odd)
    a0, a4 = tl.split(a04)
    a1, a5 = tl.split(a15)
    a2, a6 = tl.split(a26)
    a3, a7 = tl.split(a37)
    return a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def _words(
    x, words, scales, zeros, bias, out, m_count, x_stride, words_stride, scales_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, WORDS: tl.constexpr, ZEROS: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, PTX: tl.constexpr, DEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Codes of 4 bits, eight to a word, the first in the lowest bits: little more than one instruction for each.

    Inputs become whole numbers of 16 bits, 32 to a scale, and these two bytes, so that one instruction multiplies four
    codes, and sums of 32 are exact. A program does that once, for several blocks of outputs; a thread has four words
    that lie side by side, of every output of a block, and the next block's are on their way meanwhile.
    """
    j, run, r = tl.arange(0, WORDS), tl.arange(0, WORDS // 4), tl.arange(0, BLOCK_M)
    near, runs_near = j < K // 8, run < K // 32
    # Programs of the rows of one block of outputs follow each other, so that weights come from memory once.
    t, first, step = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    own = (first * BLOCK_M + r < m_count)[:, None]
    row = (first * BLOCK_M + r).to(tl.int64)[:, None]
    at = words + row * words_stride + j[None, :]
    scale_at = row * scales_stride + (run * 32 // GROUP)[None, :]
    ahead = load_number(at, mask=own & near[None, :])
    ahead_scale = load(scales + scale_at, mask=own & runs_near[None, :])
    if DEEP:
        own = ((first + step) * BLOCK_M + r < m_count)[:, None]
        at += step.to(tl.int64) * BLOCK_M * words_stride
        scale_ahead = scale_at + step.to(tl.int64) * BLOCK_M * scales_stride
        later = load_number(at, mask=own & near[None, :])
        later_scale = load(scales + scale_ahead, mask=own & runs_near[None, :])
    wait_for_others(EARLY)
    e = tl.arange(0, 32)
    a = load(x + t * x_stride + run[:, None] * 32 + e[None, :], mask=runs_near[:, None])
    most = tl.maximum(tl.max(tl.abs(a), 1), 1e-30)
    x_scale = most / 32639.0 + 0.0 * tl.sum(a, 1)  # not a number where an input is none
    a = rounded(a * (32639.0 / most)[:, None]).to(tl.int32)
    whole = tl.sum(a, 1)
    a0, a1, a2, a3, a4, a5, a6, a7 = _by_place(a)
    none = tl.zeros([BLOCK_M, WORDS], tl.int32)
    low_even, low_odd = _bytes(a0, a2, a4, a6)[None, :] + none, _bytes(a1, a3, a5, a7)[None, :] + none
    a0, a1, a2, a3 = (a0 + 128) >> 8, (a1 + 128) >> 8, (a2 + 128) >> 8, (a3 + 128) >> 8
    a4, a5, a6, a7 = (a4 + 128) >> 8, (a5 + 128) >> 8, (a6 + 128) >> 8, (a7 + 128) >> 8
    high_even, high_odd = _bytes(a0, a2, a4, a6)[None, :] + none, _bytes(a1, a3, a5, a7)[None, :] + none
    for block in range(first, tl.cdiv(m_count, BLOCK_M), step):
        m = block * BLOCK_M + r
        here = m < m_count
        word, scale, zero_at = ahead, ahead_scale, scale_at
        at += step.to(tl.int64) * BLOCK_M * words_stride
        scale_at += step.to(tl.int64) * BLOCK_M * scales_stride
        if DEEP:
            ahead, ahead_scale = later, later_scale
            own = (m + 2 * step * BLOCK_M < m_count)[:, None]
            scale_ahead += step.to(tl.int64) * BLOCK_M * scales_stride
            later = load_number(at, mask=own & near[None, :])
            later_scale = load(scales + scale_ahead, mask=own & runs_near[None, :])
        else:
            own = (m + step * BLOCK_M < m_count)[:, None]
            ahead = load_number(at, mask=own & near[None, :])
            ahead_scale = load(scales + scale_at, mask=own & runs_near[None, :])
        even, odd = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        part = _dot_bytes(odd, high_odd, _dot_bytes(even, high_even, none, PTX), PTX) << 8
        part = _dot_bytes(odd, low_odd, _dot_bytes(even, low_even, part, PTX), PTX)
        sums = tl.sum(tl.reshape(part, [BLOCK_M, WORDS // 4, 4]), 2)
        if ZEROS == "none":
            sums -= (OFFSET * whole)[None, :]
        acc = sums.to(tl.float32)
        if ZEROS == "codes":
            zero = load(zeros + zero_at, mask=here[:, None] & runs_near[None, :])
            acc -= zero * whole.to(tl.float32)[None, :]
        acc = acc * x_scale[None, :] * scale
        if ZEROS == "values":
            zero = load(zeros + zero_at, mask=here[:, None] & runs_near[None, :])
            acc -= zero * (whole.to(tl.float32) * x_scale)[None, :]
        y = tl.sum(acc, 1)
        if BIAS:
            y += load(bias + m, mask=here)
        store(out + t * m_count + m, y, mask=here)


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
    rows, columns, warps = shape or ((4, 2048, 8) if k <= 8192 else (8, 512, 4))
    columns = min(columns, padded(k))
    _floats[triton.cdiv(m, rows),](
        x, weight, bias, out, m, weight.stride(0), K=k, BLOCK_M=rows, BLOCK_K=columns, BIAS=bias is not None,
        num_warps=warps, **overlap(), **LAUNCH,
    )  # fmt: skip
    return out


def coded_row(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *, bits: int, zeros_are: str = "codes", offset: int = 0, code: str = "int",
    into: torch.dtype | None = None, shape: tuple[Any, ...] | None = None,
) -> torch.Tensor:  # fmt: skip
    """`products.product_int8` or, with 4 `bits`, `product_int4` of one row x [1, K], which is not narrowed; of
    several [T, K], if `are_words`, each of which has the bits it has alone. Beside whole numbers of 4 bits x has 16
    bits and a scale for each 32 inputs.

    `shape`, for those who look for the best: outputs of a tile, inputs of it, and warps; of `_words` see
    `_shape`. Raises: ValueError for groups that `fits` refuses.
    """
    (t, k), m, groups = x.shape, codes.shape[0], scales.shape[1]
    group = k // groups
    if not fits(k, groups, bits):
        raise ValueError(f"groups of {group} inputs: a row takes powers of two from {_least(bits)} on")
    if t > 1 and not are_words(codes, bits, code):
        raise ValueError(f"{t} rows: several are for whole numbers of 4 bits at multiples of 16 bytes")
    out = torch.empty((t, m), dtype=into or x.dtype, device=x.device)
    if are_words(codes, bits, code):
        if k > _MOST:
            cut = _MOST // group * group
            how: dict[str, Any] = {"bits": bits, "zeros_are": zeros_are, "offset": offset, "into": torch.float32}
            y = coded_row(x[:, :cut], codes[:, : cut // 2], scales[:, : cut // group],
                          None if zeros is None else zeros[:, : cut // group], bias, **how)  # fmt: skip
            y += coded_row(x[:, cut:], codes[:, cut // 2 :], scales[:, cut // group :],
                           None if zeros is None else zeros[:, cut // group :], **how)  # fmt: skip
            return y.to(out.dtype)
        rows, warps, each, deep = shape or _shape(m, k)
        blocks = triton.cdiv(m, rows)
        _words[t, min(blocks, triton.cdiv(each * _multiprocessors(x.device), t))](
            x, codes.view(torch.int32), scales, zeros, bias, out, m, x.stride(0), codes.stride(0) // 4,
            scales.stride(0), K=k, GROUP=group, BLOCK_M=rows, WORDS=padded(k // 8),
            ZEROS="none" if zeros is None else zeros_are, OFFSET=0 if zeros is not None else offset,
            BIAS=bias is not None, PTX=has_ptx(), DEEP=deep, num_warps=warps,
            **overlap(), **LAUNCH,
        )  # fmt: skip
        return out
    rows, columns, warps = shape or (8, 1024, 4)
    _codes[triton.cdiv(m, rows),](
        x, codes, scales, zeros, bias, out, m, codes.stride(0), scales.stride(0),
        K=k, GROUP=group, BLOCK_M=rows, GROUPS=min(padded(groups, 1), max(1, columns // group)), BITS=bits,
        ZEROS="none" if zeros is None else zeros_are,
        OFFSET=float(0 if zeros is not None else offset), BIAS=bias is not None, CODE=code,
        num_warps=warps, **overlap(), **LAUNCH,
    )  # fmt: skip
    return out


def _shape(m: int, k: int) -> tuple[int, int, int, bool]:
    """Outputs of a block, warps, programs of a multiprocessor, and whether two blocks are on their way: what was
    fastest on an H100 for 4096 and 14336 inputs."""
    if k > 8192:
        return 4, 16, 1, False
    if k <= 2048:
        return 8, 4, 4, False
    if k <= 4096 and m > 16384:
        return 4, 4, 4, True
    return 8, 8, 2 if m <= 4096 else 3, False


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def are_words(codes: torch.Tensor, bits: int, code: str) -> bool:
    """Whether `coded_row` takes several rows, too."""
    return bits == 4 and code != "e2m1" and codes.data_ptr() % 16 == 0 and codes.stride(0) % 16 == 0


def _least(bits: int) -> int:
    return 32 if bits == 4 else 16


def fits(inputs: int, groups: int, bits: int) -> bool:
    """Whether `coded_row` takes rows of so many inputs in so many groups."""
    group = inputs // groups
    return _least(bits) <= group <= 2048 and not group & (group - 1)
