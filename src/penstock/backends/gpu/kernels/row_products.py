"""Products of one row with weights: each weight is read once, and nothing but that takes time.

A program has a few outputs and walks all inputs, in vectors and without tensor cores, whose tiles one row would leave
empty. Shape letters: K inputs, M outputs, G groups along a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import INTERPRETED, LAUNCH, load, load_number, padded, store
from penstock.backends.gpu.kernels.products import code_value


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
def _nibble(word, HIGH: tl.constexpr, PTX: tl.constexpr):
    """Four bits of a word as a float: 128 and bits 16 to 19 as they are (`HIGH`), or bits 12 to 15 as sixteenths."""
    if not PTX:
        code = (word & (0xF0000 if HIGH else 0xF000)) | 0x43000000
    elif HIGH:
        code = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0xF0000, 0x43000000, 0xEA;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        code = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0xF000, 0x43000000, 0xEA;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    return code.to(tl.float32, bitcast=True)


@triton.jit
def _settled(x, PTX: tl.constexpr):
    """Float32 that is widened here, and not again wherever it is read."""
    if PTX:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def _words(
    x, words, scales, zeros, bias, out, m_count, words_stride, scales_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
    ZEROS: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Codes of 4 bits, eight to a word, the first in the lowest bits: 2.5 instructions for each.

    Tiles are [groups, outputs, words of a group]. In this order compilers give the lanes of a warp the words of one
    output, and a thread the same inputs for all outputs.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = m < m_count
    row, g, j = m.to(tl.int64), tl.arange(0, GROUPS), tl.arange(0, GROUP // 8)
    at = words + row[None, :, None] * words_stride + (g[:, None] * (GROUP // 8) + j[None, :])[:, None, :]
    scale_at = row[None, :] * scales_stride + g[:, None]
    a_at = x + (g[:, None] * GROUP + j[None, :] * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]
    acc = tl.zeros([GROUPS, BLOCK_M], tl.float32)
    ahead = load_number(at, mask=(here[None, :] & (g * GROUP < K)[:, None])[:, :, None])
    for base in range(0, K, GROUPS * GROUP):
        near = base + g * GROUP < K
        own = here[None, :] & near[:, None]
        word = ahead
        if GROUPS * GROUP < K:  # the next ones are on their way meanwhile
            after = base + GROUPS * GROUP
            ahead = load_number(at + after // 8, mask=(here[None, :] & (after + g * GROUP < K)[:, None])[:, :, None])
        # Loaded together, and split by the three bits of a place among eight.
        a = _settled(load(a_at + base, mask=near[:, None, None]), PTX)
        even, odd = tl.split(tl.reshape(a, [GROUPS, GROUP // 8, 2, 2, 2]))
        a04, a26 = tl.split(even)
        a15, a37 = tl.split(odd)
        a0, a4 = tl.split(a04)
        a1, a5 = tl.split(a15)
        a2, a6 = tl.split(a26)
        a3, a7 = tl.split(a37)
        direct, sixteenths = a0 + a2 + a4 + a6 + a7, a1 + a3 + a5
        low, high = word << 8, word >> 8
        part = _nibble(word << 16, True, PTX) * a0[:, None, :]
        part += _nibble(low, False, PTX) * (a1 * 16.0)[:, None, :]
        part += _nibble(low, True, PTX) * a2[:, None, :]
        part += _nibble(word, False, PTX) * (a3 * 16.0)[:, None, :]
        part += _nibble(word, True, PTX) * a4[:, None, :]
        part += _nibble(high, False, PTX) * (a5 * 16.0)[:, None, :]
        part += _nibble(high, True, PTX) * a6[:, None, :]
        part += _nibble(word >> 12, True, PTX) * a7[:, None, :]
        sums = tl.sum(part, 2) - 128.0 * tl.sum(direct + sixteenths * 16.0, 1)[:, None]
        whole = tl.sum(direct + sixteenths, 1)[:, None]
        if ZEROS == "codes":
            sums -= load(zeros + scale_at + base // GROUP, mask=own) * whole
        else:
            sums -= OFFSET * whole
        acc += sums * load(scales + scale_at + base // GROUP, mask=own)
        if ZEROS == "values":
            acc -= load(zeros + scale_at + base // GROUP, mask=own) * whole
    y = tl.sum(acc, 0)
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
    rows, columns, warps = shape or ((4, 2048, 8) if k <= 8192 else (8, 512, 4))
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
    if bits == 4 and code != "e2m1" and codes.data_ptr() % 16 == 0 and codes.stride(0) % 16 == 0:
        rows, columns, warps = shape or ((8, 4096, 4) if k % 4096 == 0 else (8, 2048, 4))
        _words[triton.cdiv(m, rows),](
            x, codes.view(torch.int32), scales, zeros, bias, out, m, codes.stride(0) // 4, scales.stride(0),
            K=k, GROUP=group, BLOCK_M=rows, GROUPS=min(padded(groups, 1), max(1, columns // group)),
            ZEROS="none" if zeros is None else zeros_are, OFFSET=float(0 if zeros is not None else offset),
            BIAS=bias is not None, PTX=_has_ptx(), num_warps=warps, **LAUNCH,
        )  # fmt: skip
        return out
    _codes[triton.cdiv(m, rows),](
        x, codes, scales, zeros, bias, out, m, codes.stride(0), scales.stride(0),
        K=k, GROUP=group, BLOCK_M=rows, GROUPS=min(padded(groups, 1), max(1, columns // group)), BITS=bits,
        ZEROS="none" if zeros is None else zeros_are,
        OFFSET=float(0 if zeros is not None else offset), BIAS=bias is not None, CODE=code,
        num_warps=warps, **LAUNCH,
    )  # fmt: skip
    return out


def _has_ptx() -> bool:
    """Whether what runs the kernels understands instructions of NVIDIA's."""
    return not INTERPRETED.value and triton.runtime.driver.active.get_current_target().backend == "cuda"


def _least(bits: int) -> int:
    return 32 if bits == 4 else 16


def fits(inputs: int, groups: int, bits: int) -> bool:
    """Whether `coded_row` takes rows of so many inputs in so many groups."""
    group = inputs // groups
    return _least(bits) <= group <= 2048 and not group & (group - 1)
