"""Attention of many tokens of a sequence over its paged keys and values.

A program takes some tokens of one sequence and all query heads of one kv head, so that heads share what is loaded, and
walks the keys in tiles that begin at multiples of the tile. Tiles that a token does not see change none of its bits, so
they depend on its own position alone; they differ in the last places from those of `attention_decode`, which cuts the
keys elsewhere. Trees of drafts are for that kernel: nodes see paths of their own, and share no tiles.

Source: Dao, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.attention_decode import (
    LOG2_E,
    Cache,
    Rule,
    capped,
    first_key,
    products_of,
    shares_in,
    tile_of,
)
from penstock.backends.gpu.kernels.loads import LAUNCH, as_bytes, dot, load, load_number, padded, store


@triton.jit
def _tile(
    base, m, total, acc, query, query2, slope, p, first, begin, end, table,
    keys, key_scales, rope_keys, values, value_scales, scale,
    key_page, key_slot, rope_page, rope_slot, value_page, value_slot, scale_page, scale_slot,
    D: tl.constexpr, D2: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, CAP: tl.constexpr,
    OPERANDS: tl.constexpr, E4M3: tl.constexpr, SCALED: tl.constexpr, ALIBI: tl.constexpr, PAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The keys base ... base + BLOCK_N - 1. `MASKED`: some row does not see some of them."""
    d, w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    n = base + tl.arange(0, BLOCK_N)
    there = n >= 0
    if MASKED:
        there = (n >= begin) & (n < end)
    if PAGES:  # a tile lies in several
        page = load_number(table + n // SIZE, mask=there, other=-1).to(tl.int64)
    else:
        page = load_number(table + base // SIZE).to(tl.int64)
    there = there & (n * 0 + page >= 0)
    place = n % SIZE
    k_at = keys + page * key_page + place * key_slot
    k = load(k_at[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], e4m3=E4M3)
    s = dot(query, k, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), OPERANDS)
    if D2 > 0:
        d2 = tl.arange(0, BLOCK_D2)
        k2_at = rope_keys + page * rope_page + place * rope_slot
        k2 = load(k2_at[None, :] + d2[:, None], mask=there[None, :] & (d2 < D2)[:, None], e4m3=E4M3)
        s = dot(query2, k2, s, OPERANDS)
    s_at = page * scale_page + place * scale_slot
    if SCALED:
        s = s * load_number(key_scales + s_at, mask=there, other=0.0)[None, :]
    # Shares are powers of two: with no more to do a score is multiplied once, as its exponent.
    power = scale * LOG2_E
    if CAP is not None or ALIBI:
        s = capped(s * scale, CAP)
        power = scale * 0.0 + LOG2_E
    if ALIBI:
        s = s - slope[:, None] * (p[:, None] - n[None, :]).to(tl.float32)
    if MASKED:
        s = tl.where((n[None, :] >= first[:, None]) & (n[None, :] <= p[:, None]), s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    base_m = tl.where(new == float("-inf"), 0.0, new) * power
    weights = tl.exp2(s * power - base_m[:, None])
    alpha = tl.exp2(m * power - base_m)
    total = total * alpha + tl.sum(weights, 1)
    if SCALED:
        weights = weights * load_number(value_scales + s_at, mask=there, other=0.0)[None, :]
    v_at = values + page * value_page + place * value_slot
    v = load(v_at[:, None] + w[None, :], mask=there[:, None] & (w < W)[None, :], e4m3=E4M3)
    acc = dot(weights, v, acc * alpha[:, None], shares_in(OPERANDS, SCALED))
    return new, total, acc


@triton.jit(do_not_specialize=("pages_stride",))
def _prefill(
    q, keys, key_scales, rope_keys, values, value_scales, pages, starts, positions, slopes, sinks, out,
    scale, window, chunk, heads, group,
    q_stride, key_page, key_slot, key_head, rope_page, rope_slot, rope_head, value_page, value_slot, value_head,
    scale_page, scale_slot, pages_stride,
    D: tl.constexpr, D2: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, CAP: tl.constexpr,
    OPERANDS: tl.constexpr, E4M3: tl.constexpr, SCALED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    PAGES: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    b, g = tl.program_id(1), tl.program_id(2)
    lo, hi = load_number(starts + b), load_number(starts + b + 1)
    # Rows are pairs of a token and one of its heads; the last tile of a sequence is run first: it has most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    num_rows = (hi - lo) * group
    if tile * BLOCK_M >= num_rows:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    own = row < num_rows
    t = (lo + tl.minimum(row, num_rows - 1) // group).to(tl.int64)
    head = g * group + row % group
    start = load_number(positions + lo)
    p = start + (t - lo).to(tl.int32)
    first = first_key(p, window, chunk)
    d, w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    q_at = q + t * q_stride + head * (D + D2)
    query = load(q_at[:, None] + d[None, :], mask=own[:, None] & (d < D)[None, :])
    query2, slope = query, first
    if D2 > 0:
        d2 = tl.arange(0, BLOCK_D2)
        query2 = load(q_at[:, None] + D + d2[None, :], mask=own[:, None] & (d2 < D2)[None, :])
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = load_number(slopes + head, mask=own, other=0.0)
    if SINKS:
        m = load_number(sinks + head, mask=own, other=0.0)
        if CAP is None and not ALIBI:
            m = m / scale  # as scores that are still to be scaled
        total = total + 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    table = pages + b.to(tl.int64) * pages_stride
    begin, end = tl.min(first) // BLOCK_N * BLOCK_N, tl.max(p) + 1
    keys, rope_keys, values = keys + g * key_head, rope_keys + g * rope_head, values + g * value_head
    if SCALED:
        key_scales, value_scales = key_scales + g, value_scales + g
    # Tiles that all rows see whole lie between these two; only the others are masked, which changes no bit.
    whole = begin
    if BOUNDED:
        whole = tl.minimum(tl.cdiv(tl.max(first), BLOCK_N) * BLOCK_N, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        for base in range(begin, whole, BLOCK_N):
            m, total, acc = _tile(
                base, m, total, acc, query, query2, slope, p, first, begin, end, table,
                keys, key_scales, rope_keys, values, value_scales, scale,
                key_page, key_slot, rope_page, rope_slot, value_page, value_slot, scale_page, scale_slot,
                D, D2, W, BLOCK_D, BLOCK_D2, BLOCK_W, BLOCK_M, BLOCK_N, SIZE, CAP, OPERANDS, E4M3, SCALED, ALIBI, PAGES,
                True,
            )  # fmt: skip
    last = tl.maximum((tl.min(p) + 1) // BLOCK_N * BLOCK_N, whole)
    for base in range(whole, last, BLOCK_N):
        m, total, acc = _tile(
            base, m, total, acc, query, query2, slope, p, first, begin, end, table,
            keys, key_scales, rope_keys, values, value_scales, scale,
            key_page, key_slot, rope_page, rope_slot, value_page, value_slot, scale_page, scale_slot,
            D, D2, W, BLOCK_D, BLOCK_D2, BLOCK_W, BLOCK_M, BLOCK_N, SIZE, CAP, OPERANDS, E4M3, SCALED, ALIBI, PAGES,
            False,
        )  # fmt: skip
    for base in range(last, end, BLOCK_N):
        m, total, acc = _tile(
            base, m, total, acc, query, query2, slope, p, first, begin, end, table,
            keys, key_scales, rope_keys, values, value_scales, scale,
            key_page, key_slot, rope_page, rope_slot, value_page, value_slot, scale_page, scale_slot,
            D, D2, W, BLOCK_D, BLOCK_D2, BLOCK_W, BLOCK_M, BLOCK_N, SIZE, CAP, OPERANDS, E4M3, SCALED, ALIBI, PAGES,
            True,
        )  # fmt: skip
    at = out + (t * heads + head) * W
    store(at[:, None] + w[None, :], acc / total[:, None], mask=own[:, None] & (w < W)[None, :])


def attend_rows(
    q: torch.Tensor, cache: Cache, rule: Rule, query_start_loc: torch.Tensor, positions: torch.Tensor,
    longest: int, *, out: torch.Tensor | None = None, operands: torch.dtype | None = None,
    shape: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """All tokens of a step over their sequences' keys: [T, H, W], of q's type.

    Shapes and types are those of `attention_decode.attend_tokens`; `longest`: no sequence has more tokens in the step.
    Tokens of a sequence stand at consecutive positions. `shape`: rows and keys of a tile, warps, and stages of loads,
    for those who look for the best.
    """
    t, heads, dim = q.shape
    _, size, kv_heads, width = cache.values.shape
    d = cache.keys.shape[-1]
    group = heads // kv_heads
    q = q.contiguous()
    if out is None:
        out = torch.empty((t, heads, width), dtype=q.dtype, device=q.device)
    if not t:
        return out
    products, wide = products_of(q, cache, operands), padded(width)
    # What keeps registers and shared memory within every target: `tools/gpu_kernels.py`.
    codes = cache.keys.element_size() == 1
    rows, warps, stages = 64, 4, 3
    if wide > 128:
        rows, warps, stages = 32, 4, 2
    elif products == "float32":
        rows, warps, stages = 32, 8, 2
    elif codes:
        warps, stages = 8, 1
    tile = tile_of(size, 16 if products == "float32" else 32)
    if shape is not None:
        rows, tile, warps, stages = shape
    rows = min(rows, padded(longest * group))
    keys, values = as_bytes(cache.keys), as_bytes(cache.values)
    rope_keys = keys if cache.rope_keys is None else as_bytes(cache.rope_keys)
    scales = cache.key_scales
    _prefill[triton.cdiv(longest * group, rows), len(cache.pages), kv_heads](
        q, keys, scales, rope_keys, values, cache.value_scales, cache.pages, query_start_loc, positions, rule.slopes,
        rule.sinks, out, rule.scale, rule.window or 0, rule.chunk or 0, heads, group,
        q.stride(0), *keys.stride()[:3], *rope_keys.stride()[:3], *values.stride()[:3],
        *((0, 0) if scales is None else scales.stride()[:2]), cache.pages.stride(0),
        D=d, D2=dim - d, W=width, BLOCK_D=padded(d), BLOCK_D2=padded(dim - d), BLOCK_W=wide, BLOCK_M=rows,
        BLOCK_N=tile, PAGES=tile > size,
        BOUNDED=bool(rule.window or rule.chunk), SIZE=size, CAP=rule.soft_cap, OPERANDS=products,
        E4M3=cache.keys.dtype == torch.float8_e4m3fn,
        SCALED=scales is not None, ALIBI=rule.slopes is not None, SINKS=rule.sinks is not None,
        num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
    return out
