"""Attention of single tokens over a latent: keys that all heads share, whose components are the values as well.

A program takes 64 query heads of one token over one cut of its keys and reads each key once: a tile of keys lies in
shared memory, where it is multiplied across, for scores, and along, as values. `attention_decode` chooses the cuts and
puts them together.

It is made for NVIDIA's sm_90, whose matrix units read both operands from shared memory; elsewhere the tiles do not fit.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1 (absorbed latent attention).
Shape letters: T tokens, H query heads, D components of the latent, D2 rotated ones, C cuts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import (
    LAUNCH,
    dot,
    fetch,
    has_ptx,
    is_arch,
    load,
    load_number,
    narrowed,
    overlap,
    padded,
    store,
    wait_for_others,
)

HEADS = 64
"""Of a program: the rows that a matrix instruction has."""
FEW = 16
"""With fewer heads most rows would be padding."""
FILL = 128
"""Programs that a device should have: one fills a multiprocessor, and large ones have some more than this."""
_WIDEST = 512, 64
"""Components of the latent, and rotated ones, with which two tiles fit."""
_TILE = 64
_AHEAD = 2
"""Tiles between the one that is multiplied and the one that is brought near: what is copied into shared memory
meanwhile is only the next."""
_LOG2_E, _LN_2 = 1.4426950408889634, tl.constexpr(0.6931471805599453)


@triton.jit
def _bring_near(
    keys, rope_keys, table, base, last, key_page, rope_page,
    D: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, SLOT: tl.constexpr, SLOT2: tl.constexpr,
):  # fmt: skip
    """A tile of keys into the cache that multiprocessors share."""
    n = base + tl.arange(0, BLOCK_N)
    page = tl.maximum(load_number(table + tl.minimum(n // SIZE, last)), 0).to(tl.int64)
    line = tl.arange(0, D // 64) * 64  # of 128 bytes
    fetch((keys + page * key_page + n % SIZE * SLOT)[:, None] + line[None, :])
    fetch(rope_keys + page * rope_page + n % SIZE * SLOT2)


@triton.jit(do_not_specialize=("num_splits", "shift", "pages_stride"))
def _latent(
    q, keys, rope_keys, pages, sequences, positions, out, out_m, out_l, scale, heads, num_splits, shift,
    q_stride, key_page, rope_page, pages_stride,
    D: tl.constexpr, D2: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr, SLOT: tl.constexpr, SLOT2: tl.constexpr, OPERANDS: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_others(EARLY)
    t, part, cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p = load_number(positions + t)
    if cut > (p >> shift):
        return
    table = pages + load_number(sequences + t).to(tl.int64) * pages_stride
    head = part * BLOCK_M + tl.arange(0, BLOCK_M)
    own = head < heads
    d, d2, n = tl.arange(0, D), tl.arange(0, BLOCK_D2), tl.arange(0, BLOCK_N)
    q_at = q + t.to(tl.int64) * q_stride + head * (D + D2)
    query = narrowed(load(q_at[:, None] + d[None, :], mask=own[:, None]), OPERANDS)
    query2 = narrowed(load(q_at[:, None] + D + d2[None, :], mask=own[:, None] & (d2 < D2)[None, :]), OPERANDS)
    last, begin, end = p // SIZE, cut << shift, tl.minimum(p + 1, (cut + 1) << shift)
    nowhere = load_number(table) < 0  # a row that fills up a captured step, whose result is 0
    end = tl.where(nowhere, begin, end)
    m = tl.where(nowhere, tl.zeros([BLOCK_M], tl.float32), float("-inf"))
    total = tl.where(nowhere, m + 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    place = n % SIZE
    for i in tl.static_range(1, AHEAD):
        _bring_near(keys, rope_keys, table, begin + i * BLOCK_N, last, key_page, rope_page, D, BLOCK_N, SIZE, SLOT,
                    SLOT2)  # fmt: skip
    for base in range(begin, end, BLOCK_N):
        if AHEAD > 0:
            if base + AHEAD * BLOCK_N < end:
                _bring_near(keys, rope_keys, table, base + AHEAD * BLOCK_N, last, key_page, rope_page, D, BLOCK_N, SIZE,
                            SLOT, SLOT2)  # fmt: skip
        # The last page of the token stands for those behind it, of which nothing is read: it may be anything.
        page = load_number(table + base // SIZE).to(tl.int64) + n * 0
        for i in tl.static_range(1, BLOCK_N // SIZE):
            page = tl.where(n < i * SIZE, page, load_number(table + tl.minimum(base // SIZE + i, last)).to(tl.int64))
        if BLOCK_N < SIZE:
            place = base % SIZE + n
        seen = (n <= p - base)[:, None]
        k = narrowed(load((keys + page * key_page + place * SLOT)[:, None] + d[None, :], mask=seen), OPERANDS)
        k2_at = (rope_keys + page * rope_page + place * SLOT2)[:, None] + d2[None, :]
        if D2 == BLOCK_D2:
            k2 = narrowed(load(k2_at, mask=seen), OPERANDS)
        else:
            k2 = narrowed(load(k2_at, mask=seen & (d2 < D2)[None, :]), OPERANDS)
        s = dot(query2, tl.trans(k2), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), OPERANDS)
        s = dot(query, tl.trans(k), s, OPERANDS) * scale
        s = tl.where((n <= p - base)[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        weights = tl.exp2(s - new[:, None])
        alpha = tl.exp2(m - new)
        total = total * alpha + tl.sum(weights, 1)
        m = new
        acc = dot(weights, k, acc * alpha[:, None], OPERANDS)
    first = (t.to(tl.int64) * heads + part * BLOCK_M) * num_splits + cut
    line = tl.arange(0, BLOCK_M) * num_splits
    store(out_m + first + line, m * _LN_2, mask=own)
    store(out_l + first + line, total, mask=own)
    store(out + first * D + (line[:, None] * D + d[None, :]), acc, mask=own[:, None])


def takes_latent(q: torch.Tensor, cache: Any, rule: Any, products: str) -> bool:
    """Whether there is a program for such a call (`attention_decode.Cache`, `Rule`), and what runs it is the right one.

    Keys and values are one tensor, of one head whose tokens lie side by side, and nothing but their position and sinks
    decides what they count.
    """
    keys, rope = cache.keys, cache.rope_keys
    if cache.values is not keys or rope is None or keys.shape[2] != 1 or not is_arch(90):
        return False
    d, d2, size = keys.shape[3], rope.shape[3], keys.shape[1]
    if products == "float32" or keys.element_size() != 2 or size & (size - 1) or q.shape[1] < FEW:
        return False
    fits = d == padded(d, 64) and d <= _WIDEST[0] and d2 <= _WIDEST[1]
    plain = rule.window is None and rule.chunk is None and rule.soft_cap is None and rule.slopes is None
    return fits and plain


def split_latent(
    q: torch.Tensor, cache: Any, scale: float, sequences: torch.Tensor, positions: torch.Tensor, products: str,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], splits: int, shift: int,
) -> None:  # fmt: skip
    """Every cut of 2^`shift` keys by itself. Mutates: `parts`, float32 [T, H, C, D], and [T, H, C] maxima and sums."""
    t, heads, _ = q.shape
    keys, rope = cache.keys, cache.rope_keys
    d, d2, size = keys.shape[3], rope.shape[3], keys.shape[1]
    _latent[t, triton.cdiv(heads, HEADS), splits](
        q, keys, rope, cache.pages, sequences, positions, *parts, scale * _LOG2_E, heads, splits, shift,
        q.stride(0), keys.stride(0), rope.stride(0), cache.pages.stride(0),
        D=d, D2=d2, BLOCK_D2=padded(d2), BLOCK_M=HEADS, BLOCK_N=_TILE, SIZE=size, SLOT=keys.stride(1),
        SLOT2=rope.stride(1), OPERANDS=products, AHEAD=_AHEAD if has_ptx() else 0, num_warps=8, num_stages=2,
        **overlap(), **LAUNCH,
    )  # fmt: skip
