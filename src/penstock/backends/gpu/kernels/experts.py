"""Mixtures of experts: pairs of a token and one of its experts, put in order by expert, and products over a stack.

Nothing leaves the device and no shape follows from what is chosen: there are as many tiles as there can be at most,
and those that have no pairs end at once. A pair's inputs are walked in one order and a token's experts added in id
order, so with one width of the tile (`columns`) a token's bits do not depend on the batch.

Source: Gale et al., MegaBlocks, arXiv 2211.15841 (products over tokens in groups of their expert); the counting sort is
the usual one. Shape letters: T tokens, C choices of a token, P = T C pairs, X experts, E hidden, F width of an expert,
K inputs and M outputs of one product, G groups along a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.activation import _ALPHA, ACTIVATIONS, _activated, _sigmoid
from penstock.backends.gpu.kernels.expert_rows import run_few
from penstock.backends.gpu.kernels.loads import (
    LAUNCH,
    dot,
    load,
    load_number,
    narrowed,
    operands_of,
    overlap,
    padded,
    store,
    wait_for_others,
)

_TILES = 16
"""Tiles that one program looks up."""
_FEW = 32
"""Pairs, up to which each is a tile of its own and nothing is sorted."""
_NO_ZEROS, _CODES, _VALUES = 0, 1, 2


class Stack(NamedTuple):
    """Equal matrices [M, K] of X experts, one below the other. Codes are bytes, or two of 4 bits to a byte.

    Shapes: codes [X M, K] (floats, uint8, int8) or, where `bits` is 4, uint8 [X M, K/2], the first in the low half;
    scales and zeros float32 [X M, G]; table float32 [256 or 16], what unsigned codes stand for; bias [X, M].
    `offset`: of codes without zeros; `zeros_are` "values": weights are code * scale - zero; `group`: inputs that share
    a scale, 0: all.
    """

    codes: torch.Tensor
    bits: int = 16
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None
    offset: int = 0
    zeros_are: str = "codes"
    group: int = 0
    bias: torch.Tensor | None = None

    def why_not(self) -> str | None:
        """What keeps the kernel from multiplying with it, as an end of a sentence."""
        least = 32 if self.bits == 4 else 16
        return f"groups of {self.group} inputs are no multiple of {least}" if self.group % least else None


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(ids, order, starts, num_pairs, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """A program for each expert, and one more: where its pairs begin, and which they are."""
    wait_for_others(EARLY)
    expert = tl.program_id(0)
    before = 0
    for base in range(0, num_pairs, BLOCK):
        i = base + tl.arange(0, BLOCK)
        own = load_number(ids + i, mask=i < num_pairs, other=expert)
        before += tl.sum((own < expert).to(tl.int32), 0)
    store(starts + expert, before)
    for base in range(0, num_pairs, BLOCK):
        i = base + tl.arange(0, BLOCK)
        mine = (load_number(ids + i, mask=i < num_pairs, other=-1) == expert).to(tl.int32)
        store(order + before + tl.cumsum(mine, 0) - 1, i, mask=mine > 0)
        before += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["num_tiles"])
def _lay_out(starts, tiles, num_tiles, X: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_T: tl.constexpr,
             BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """The expert, first pair and end of every tile; of those without pairs the end is 0."""
    wait_for_others(EARLY)
    e = tl.arange(0, BLOCK_X)
    count = load_number(starts + e + 1, mask=e < X) - load_number(starts + e, mask=e < X)
    ends = tl.cumsum((count + BLOCK_T - 1) // BLOCK_T, 0)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    passed = ends[None, :] <= j[:, None]
    expert = tl.sum((passed & (e < X)[None, :]).to(tl.int32), 1)
    skipped = tl.max(tl.where(passed, ends[None, :], 0), 1)
    there = (j < num_tiles) & (expert < X)
    first = load_number(starts + expert, mask=there) + (j - skipped) * BLOCK_T
    end = tl.minimum(first + BLOCK_T, load_number(starts + expert + 1, mask=there))
    store(tiles + 3 * j, expert, mask=j < num_tiles)
    store(tiles + 3 * j + 1, first, mask=j < num_tiles)
    store(tiles + 3 * j + 2, tl.where(there, end, 0), mask=j < num_tiles)


@triton.jit
def _numbers(codes, table, TABLE: tl.constexpr):
    """What codes stand for."""
    if TABLE:
        x = load_number(table + codes.to(tl.int32))
    else:
        x = codes.to(tl.float32)
    return x


@triton.jit
def _add_tile(
    acc, codes, scales, zeros, table, row, here, base, a, b, codes_stride, groups, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    OPERANDS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_T] and the products of inputs base ... base + BLOCK_K; `b`: of 4 bits, every other one."""
    if BITS == 16:
        k = base + tl.arange(0, BLOCK_K)
        w = load(codes + row[:, None] * codes_stride + k[None, :], mask=here[:, None] & (k < K)[None, :])
        acc = dot(w, a, acc, OPERANDS)
    else:
        at = row * groups + base // GROUP
        scale = load(scales + at, mask=here)
        shift = tl.full(scale.shape, OFFSET, tl.float32)
        if ZEROS == 1:
            shift = load(zeros + at, mask=here)
        part = tl.zeros(acc.shape, tl.float32)
        if BITS == 4:
            j = base // 2 + tl.arange(0, BLOCK_K // 2)
            near = here[:, None] & (2 * j < K)[None, :]
            pair = load_number(codes + row[:, None] * codes_stride + j[None, :], mask=near)
            part = dot(_numbers(pair & 15, table, TABLE) - shift[:, None], a, part, OPERANDS)
            part = dot(_numbers(pair >> 4, table, TABLE) - shift[:, None], b, part, OPERANDS)
        else:
            k = base + tl.arange(0, BLOCK_K)
            own = load_number(codes + row[:, None] * codes_stride + k[None, :], mask=here[:, None] & (k < K)[None, :])
            part = dot(_numbers(own, table, TABLE) - shift[:, None], a, part, OPERANDS)
        acc += part * scale[:, None]
        if ZEROS == 2:
            total = tl.sum(narrowed(a, OPERANDS).to(tl.float32), 0)
            if BITS == 4:
                total += tl.sum(narrowed(b, OPERANDS).to(tl.float32), 0)
            acc -= load(zeros + at, mask=here)[:, None] * total[None, :]
    return acc


@triton.jit
def _through(
    x, codes, scales, zeros, table, bias, gate, gate_scales, gate_zeros, gate_bias, shares, order, tiles, out,
    m_count, x_stride, codes_stride, groups, limit, CHOICES: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr,
    OFFSET: tl.constexpr, TABLE: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    WEIGHED: tl.constexpr, NAME: tl.constexpr, CLAMPED: tl.constexpr, OPERANDS: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    """FIRST: rows of tokens into rows of pairs in their order, activated. Else these into rows by pair. Not SORTED:
    `tiles` are the experts of the pairs, one to a tile."""
    if SORTED:
        tile = tiles + 3 * tl.program_id(1)
        expert, first, end = load_number(tile), load_number(tile + 1), load_number(tile + 2)
    else:
        first = tl.program_id(1)
        expert, end = load_number(tiles + first), first + 1
    if first < end:
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        p = first + tl.arange(0, BLOCK_T)
        here, there = m < m_count, p < end
        row = expert.to(tl.int64) * m_count + m
        pair = p
        if SORTED:
            pair = load_number(order + p, mask=there)
        share = tl.full([BLOCK_T], 1.0, tl.float32)
        if WEIGHED:
            share = load(shares + pair, mask=there)
        if FIRST:
            column = x + (pair // CHOICES).to(tl.int64)[None, :] * x_stride
        else:
            column = x + p.to(tl.int64)[None, :] * x_stride
        acc = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
        other = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
        for base in range(0, K, BLOCK_K):
            if BITS == 4:
                k = base + 2 * tl.arange(0, BLOCK_K // 2)
            else:
                k = base + tl.arange(0, BLOCK_K)
            a = load(column + k[:, None], mask=there[None, :] & (k < K)[:, None])
            if FIRST and WEIGHED:
                a = a * share[None, :]
            b = a
            if BITS == 4:
                b = load(column + k[:, None] + 1, mask=there[None, :] & (k < K)[:, None])
                if FIRST and WEIGHED:
                    b = b * share[None, :]
            acc = _add_tile(acc, codes, scales, zeros, table, row, here, base, a, b, codes_stride, groups, K, GROUP,
                            BLOCK_K, BITS, ZEROS, OFFSET, TABLE, OPERANDS)  # fmt: skip
            if GATED:
                other = _add_tile(other, gate, gate_scales, gate_zeros, table, row, here, base, a, b, codes_stride,
                                  groups, K, GROUP, BLOCK_K, BITS, ZEROS, OFFSET, TABLE, OPERANDS)  # fmt: skip
        if BIAS:
            acc += load(bias + row, mask=here)[:, None]
            if GATED:
                other += load(gate_bias + row, mask=here)[:, None]
        if FIRST:
            if NAME == "swiglu_clamped":
                if CLAMPED:
                    other = tl.minimum(other, limit)
                    acc = tl.minimum(tl.maximum(acc, -limit), limit)
                acc = other * _sigmoid(other * _ALPHA) * (acc + 1.0)
            elif GATED:
                acc = _activated(other, NAME) * acc
            else:
                acc = _activated(acc, NAME)
            at = p.to(tl.int64)
        else:
            if WEIGHED:
                acc = acc * share[None, :]
            at = pair.to(tl.int64)
        store(out + at[None, :] * m_count + m[:, None], acc, mask=here[:, None] & there[None, :])


@triton.jit
def _add_choices(parts, out, count, m_count, CHOICES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_others(EARLY)
    t = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = m < m_count
    at = parts + t * CHOICES * m_count + m
    total = load(at, mask=own)
    for _ in range(1, CHOICES):
        at += m_count
        total += load(at, mask=own)
    store(out + t * m_count + m, total, mask=own)


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, gate: Stack | None, up: Stack, down: Stack,
    num_experts: int, activation: str, limit: float | None = None, *, scale_input: bool = False,
    operands: torch.dtype | None = None, columns: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum of each token's experts, down(f(gate x) * up x) weighed by its share, in id order: [T, E] of x's type.

    Shapes: x [T, E] float32, float16 or bfloat16, rows of which lie side by side; ids [T, C] whole numbers below X,
    ascending, none twice; shares float32 [T, C]. Without a gate it is down(f(up x)). `limit`: of "swiglu_clamped".
    `scale_input`: x is weighed instead of the sum. `operands`: what products multiply; None: the weights' type, of
    codes x's, bfloat16 if that is float32. `columns`: pairs of a tile, 16 or 64; None: 16 where an expert has 16 or
    less on the mean. Raises: ValueError for another activation, gate and up in two formats, or `Stack.why_not`.
    """
    (t, e), choices = x.shape, ids.shape[1]
    f = up.codes.shape[0] // num_experts
    if activation not in ACTIVATIONS or (activation == "swiglu_clamped" and gate is None):
        raise ValueError(f"no kernel knows the activation {activation!r}: it is one of {', '.join(ACTIVATIONS)}")
    if gate is not None and not _alike(gate, up):
        raise ValueError("gate and up are held in two formats: multiply with them one by one")
    problem = up.why_not() or down.why_not()
    if problem is not None:
        raise ValueError(f"{problem}: look the experts up instead")
    out = torch.empty((t, e), dtype=x.dtype, device=x.device)
    pairs = t * choices
    if not pairs:
        return out.zero_()
    width = columns or (16 if pairs <= 16 * num_experts else 64)

    def whole(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=x.device)

    ids, shares = ids.contiguous(), shares.contiguous()
    few, early = pairs <= _FEW and width == 16, overlap()
    if few and columns is None and operands is None and all(s.bits == 16 for s in (up, down)):
        return run_few(x, ids, shares, gate, up, down, num_experts, activation, limit, scale_input)
    num_tiles, order, tiles = pairs, None, ids
    if not few:
        num_tiles = min(pairs, pairs // width + num_experts)
        order, starts, tiles = whole(pairs), whole(num_experts + 1), whole(num_tiles, 3)
        _sort[num_experts + 1,](ids, order, starts, pairs, BLOCK=1024, num_warps=4, **early, **LAUNCH)
        _lay_out[triton.cdiv(num_tiles, _TILES),](
            starts, tiles, num_tiles, X=num_experts, BLOCK_X=padded(num_experts), BLOCK_T=width, BLOCK=_TILES,
            num_warps=4, **early, **LAUNCH,
        )  # fmt: skip
    inner = torch.empty((pairs, f), dtype=torch.float32, device=x.device)
    parts = torch.empty((pairs, e), dtype=torch.float32, device=x.device)
    narrow = operands or (torch.bfloat16 if x.dtype == torch.float32 else x.dtype)
    own = {"CHOICES": choices, "BLOCK_T": width, "CLAMPED": limit is not None}
    for first, given, into, stack, beside in ((True, x, inner, up, gate), (False, inner, parts, down, None)):
        k, m = given.shape[1], into.shape[1]
        tile, rows = _tile(stack, width), 32 if width == 16 or stack.bits == 4 else 64
        kind = operands or stack.codes.dtype if stack.bits == 16 else narrow
        groups = 1 if stack.scales is None else stack.scales.shape[1]
        zeros = _NO_ZEROS if stack.zeros is None else _VALUES if stack.zeros_are == "values" else _CODES
        _through[triton.cdiv(m, rows), num_tiles](
            given, stack.codes, stack.scales, stack.zeros, stack.table, stack.bias, *_beside(beside), shares, order,
            tiles, into, m, given.stride(0), stack.codes.stride(0), groups, 0.0 if limit is None else float(limit),
            K=k, GROUP=stack.group or triton.cdiv(k, tile) * tile, BLOCK_M=rows, BLOCK_K=tile,
            BITS=stack.bits, ZEROS=zeros, OFFSET=float(stack.offset if stack.zeros is None else 0),
            TABLE=stack.table is not None, FIRST=first, GATED=beside is not None, BIAS=stack.bias is not None,
            WEIGHED=first == scale_input, NAME=activation, OPERANDS=operands_of(kind),
            SORTED=not few, num_warps=4 if width == 16 else 8, num_stages=3, **own, **LAUNCH,
        )  # fmt: skip
    _add_choices[t, triton.cdiv(e, 1024)](parts, out, pairs, e, CHOICES=choices, BLOCK=1024, num_warps=4, **early,
                                           **LAUNCH)  # fmt: skip
    return out


def _alike(a: Stack, b: Stack) -> bool:
    """Whether one launch can multiply with both."""

    def kind(s: Stack) -> tuple[Any, ...]:
        return (
            s.codes.shape, s.codes.dtype, s.bits, s.offset, s.zeros_are, s.group, s.zeros is None, s.table is None,
            None if s.scales is None else s.scales.shape, s.bias is None,
        )  # fmt: skip

    return kind(a) == kind(b)


def _tile(stack: Stack, width: int) -> int:
    """Inputs at a time: they share a scale. Two codes to a byte take the registers of twice as many."""
    tile = 128 if width == 16 and stack.bits != 4 else 64
    while stack.group % tile:
        tile //= 2
    return tile


def _beside(gate: Stack | None) -> tuple[torch.Tensor | None, ...]:
    return (None,) * 4 if gate is None else (gate.codes, gate.scales, gate.zeros, gate.bias)
