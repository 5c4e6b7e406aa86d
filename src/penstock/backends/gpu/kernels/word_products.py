"""Products of several rows with int4 codes in groups of 128 inputs: codes stay words until they are operands.

A product does not ask for the order of its inputs, so eight codes of a word need not be put side by side: the first
codes of 16 words are one tile, the second ones the next, and so on. Inputs are laid out so before, once for all
programs. Outputs are the rows of a tile and tokens its columns; inputs are walked in order, cut where the weight's
shape says.

Source: Frantar et al., MARLIN, arXiv 2408.11743. Shape letters: T tokens, K inputs, M outputs, G groups along a row.
"""

from __future__ import annotations

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
from penstock.backends.gpu.kernels.products import _add_cuts

RUN = 128
"""Inputs of a tile."""
_FILL = 256
"""Programs that a device should have at least."""


@triton.jit
def _spread(x, out, totals, x_stride, K: tl.constexpr, OPERANDS: tl.constexpr, EARLY: tl.constexpr):
    """A run of inputs of one token: first those of the first codes of its words, then the second ones'; and the sum."""
    wait_for_others(EARLY)
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, w = tl.arange(0, 8), tl.arange(0, 16)
    a = load(x + t * x_stride + g * 128 + w[None, :] * 8 + i[:, None])
    store(out + t * K + g * 128 + i[:, None] * 16 + w[None, :], a)
    store(totals + t * (K // 128) + g, tl.sum(tl.sum(narrowed(a, OPERANDS).to(tl.float32), 1), 0))


@triton.jit
def _several(
    x, totals, words, scales, zeros, bias, out, t_count, m_count, per_cut, words_stride, scales_stride,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, ZEROS: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, OPERANDS: tl.constexpr, CUT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    cut = tl.program_id(2)
    here, there = m < m_count, t < t_count
    row, w = m.to(tl.int64), tl.arange(0, 16)
    wait_for_others(EARLY)
    acc = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
    column = x + t.to(tl.int64)[None, :] * K + w[:, None]
    total_at = totals + t.to(tl.int64) * (K // 128)
    for base in range(cut * per_cut, tl.minimum((cut + 1) * per_cut, K), 128):
        word = load_number(words + row[:, None] * words_stride + base // 8 + w[None, :], mask=here[:, None])
        part = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
        for i in tl.static_range(8):
            bits = (word << (16 - 4 * i)) if i < 4 else (word >> (4 * i - 16))
            code = ((bits & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)  # 128 more than it is
            part = dot(code, load(column + base + 16 * i, mask=there[None, :]), part, OPERANDS)
        at = row * scales_stride + base // GROUP
        total = load(total_at + base // 128, mask=there)
        if ZEROS == "codes":
            part -= (load(zeros + at, mask=here) + 128.0)[:, None] * total[None, :]
        else:
            part -= ((128.0 + OFFSET) * total)[None, :]
        acc += part * load(scales + at, mask=here)[:, None]
        if ZEROS == "values":
            acc -= load(zeros + at, mask=here)[:, None] * total[None, :]
    at = t.to(tl.int64)[None, :] * m_count + m[:, None]
    if CUT:
        at += cut.to(tl.int64) * t_count * m_count
    elif BIAS:
        acc += load(bias + m, mask=here)[:, None]
    store(out + at, acc, mask=here[:, None] & there[None, :])


def fits(codes: torch.Tensor, inputs: int, groups: int, code: str) -> bool:
    """Whether `product_words` takes a matrix."""
    group = inputs // groups
    aligned = codes.data_ptr() % 16 == 0 and codes.stride(0) % 16 == 0
    return code == "uint" and group % RUN == 0 and inputs % RUN == 0 and aligned


def product_words(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, *, zeros_are: str = "codes", offset: int = 8,
    operands: torch.dtype | None = None, columns: int | None = None, into: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """`products.product_int4` of matrices that `fits` takes, with the same shapes.

    `columns`: tokens of a tile, 16, 32 or 64; None: as many as there are. With one width of the tile a token's bits do
    not depend on the batch.
    """
    (t, k), m = x.shape, codes.shape[0]
    out = torch.empty((t, m), dtype=into or x.dtype, device=x.device)
    if not t or not m:
        return out
    narrow = operands or (torch.bfloat16 if x.dtype == torch.float32 else x.dtype)
    laid = torch.empty((t, k), dtype=narrow, device=x.device)
    totals = torch.empty((t, k // RUN), dtype=torch.float32, device=x.device)
    name, early = operands_of(narrow), overlap()
    _spread[t, k // RUN](x, laid, totals, x.stride(0), K=k, OPERANDS=name, num_warps=1, **early, **LAUNCH)
    width = columns or (16 if t <= 16 else 32 if t <= 32 else 64)
    rows, warps, stages = _shape(width, early["EARLY"])
    runs = k // RUN
    cuts = max(1, min(_FILL // triton.cdiv(m, rows), runs // 4))
    per_cut = triton.cdiv(runs, cuts) * RUN
    cuts = triton.cdiv(k, per_cut)
    target = out if cuts == 1 else torch.empty((cuts, t, m), dtype=torch.float32, device=x.device)
    _several[triton.cdiv(m, rows), triton.cdiv(t, width), cuts](
        laid, totals, codes.view(torch.int32), scales, zeros, bias, target, t, m, per_cut, codes.stride(0) // 4,
        scales.stride(0), K=k, GROUP=k // scales.shape[1], BLOCK_M=rows, BLOCK_T=width,
        ZEROS="none" if zeros is None else zeros_are, OFFSET=float(0 if zeros is not None else offset),
        BIAS=bias is not None, OPERANDS=name, CUT=cuts > 1, num_warps=warps, num_stages=stages, **early, **LAUNCH,
    )  # fmt: skip
    if cuts > 1:
        _add_cuts[triton.cdiv(t * m, 1024),](target, bias, out, t * m, m, cuts, BLOCK=1024, BIAS=bias is not None,
                                             num_warps=4, **early, **LAUNCH)  # fmt: skip
    return out


def _shape(width: int, new: bool) -> tuple[int, int, int]:
    """Outputs of a tile, warps, and tiles on their way. What is not `new` has too few registers for wide ones."""
    return (64, 4, 6) if width <= 32 else (128, 4 if new else 8, 3)
