"""Attention of single tokens over paged keys and values, with the keys split at fixed positions.

A sequence's keys are cut at multiples of `split`, counted from position 0. One program reduces one token's query heads
of one kv head over one cut; a second kernel puts the cuts together in order. So with one size of cuts a token's bits
depend on its own position and nothing else: neither on the batch, nor on how many of its sequence's tokens run beside
it. A tree of drafts is read along each node's path, so an accepted node has the bits that plain decoding would have
given.

Source: Dao, "Flash-Decoding" (2023); Milakov and Gimelshein, arXiv 1805.02867 (online softmax).
Shape letters: T tokens, B sequences, H query heads, G kv heads, D key dim, W value dim, S block size, M blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels import latent_decode
from penstock.backends.gpu.kernels.loads import (
    LAUNCH,
    as_bytes,
    dot,
    load,
    load_number,
    operands_of,
    overlap,
    padded,
    store,
    wait_for_others,
)

SPLIT = 512
"""Keys of a cut, where the device is full anyway."""
_LEAST_SPLIT = 64
"""A cut of so many is read as one tile, whatever pages its keys lie in: there, waiting is what takes time."""
_FILL = 512
"""Programs that a device should have: else cuts are smaller."""
_BLOCK_M = 16
_CUTS = tl.constexpr(16)
"""Cuts that are put together at once."""
LOG2_E = tl.constexpr(1.4426950408889634)


class Rule(NamedTuple):
    """How a layer scores and what a token sees. `slopes` (ALiBi) and `sinks` are float32 [H] or None.

    A token at position p sees positions max(0, p + 1 - window, p // chunk * chunk) ... p.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class Cache(NamedTuple):
    """Keys and values of a layer's group, and where its sequences have them.

    `keys` [N, S, G, D] and `values` [N, S, G, W] are float32, float16, bfloat16, float8_e4m3fn, or int8 with
    `key_scales` and `value_scales` float32 [N, S, G, 1], of equal strides; components of a head lie side by side.
    `pages` int32 [B, M]: the page of each block, negative where there is none. `rope_keys` [N, S, G, D2]: a second
    plane of keys, of the queries' last D2 components (not with int8).
    """

    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    rope_keys: torch.Tensor | None = None


@triton.jit
def first_key(position, window, chunk):
    """The earliest position that a token sees; `window` and `chunk` are 0 where there is none."""
    first = position * 0
    if window > 0:
        first = tl.maximum(first, position + 1 - window)
    if chunk > 0:
        first = tl.maximum(first, position // chunk * chunk)
    return first


@triton.jit
def capped(s, cap: tl.constexpr):
    """cap * tanh(s / cap), or s."""
    if cap is not None:
        s = cap * (1.0 - 2.0 / (tl.exp(s * (2.0 / cap)) + 1.0))
    return s


@triton.constexpr_function
def shares_in(operands, scaled):
    """The operands of values: shares times scales may be too small for float16."""
    return "bfloat16" if scaled and operands == "float16" else operands


@triton.jit
def bits_set(x):
    """How many of the low 32 bits are set, of int64."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F


@triton.jit
def node_at(mask, depth):
    """The number of the mask's `depth`-th set bit, counted from 0: the node at that depth of a path."""
    node = depth * 0
    for i in tl.static_range(6):
        below = bits_set((mask >> node) & ((1 << (32 >> i)) - 1))
        beyond = depth >= below
        depth = tl.where(beyond, depth - below, depth)
        node = tl.where(beyond, node + (32 >> i), node)
    return node


@triton.jit(do_not_specialize=("num_splits", "shift", "pages_stride"))
def _split(
    q, keys, key_scales, rope_keys, values, value_scales, pages, sequences, starts, positions, mask, slopes,
    out, out_m, out_l, scale, window, chunk, heads, group, num_splits, shift,
    q_stride, key_page, key_slot, key_head, rope_page, rope_slot, rope_head, value_page, value_slot, value_head,
    scale_page, scale_slot, pages_stride,
    D: tl.constexpr, D2: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr,
    CAP: tl.constexpr, OPERANDS: tl.constexpr, E4M3: tl.constexpr, SCALED: tl.constexpr, TREE: tl.constexpr,
    ALIBI: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_others(EARLY)
    t = tl.program_id(0).to(tl.int64)
    blocks_of_group = tl.cdiv(group, BLOCK_M)
    g, part = tl.program_id(1) // blocks_of_group, tl.program_id(1) % blocks_of_group
    cut = tl.program_id(2)
    p = load_number(positions + t)
    first = first_key(p, window, chunk)
    if cut < (first >> shift) or cut > (p >> shift):
        return
    b = load_number(sequences + t)
    at = part * BLOCK_M + tl.arange(0, BLOCK_M)
    own = at < group
    head = g * group + at
    d, w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    q_at = q + t * q_stride + head * (D + D2)
    query = load(q_at[:, None] + d[None, :], mask=own[:, None] & (d < D)[None, :])
    if D2 > 0:
        d2 = tl.arange(0, BLOCK_D2)
        query2 = load(q_at[:, None] + D + d2[None, :], mask=own[:, None] & (d2 < D2)[None, :])
    if ALIBI:
        slope = load_number(slopes + head, mask=own, other=0.0)
    if TREE:
        start = load_number(positions + load_number(starts + b))
        bits = load_number(mask + t)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    table = pages + b.to(tl.int64) * pages_stride
    begin = tl.maximum(first // BLOCK_N * BLOCK_N, cut << shift)
    end = tl.minimum(p + 1, (cut + 1) << shift)
    for base in range(begin, end, BLOCK_N):
        n = base + tl.arange(0, BLOCK_N)
        seen = (n >= first) & (n <= p)
        slot = n
        # A tile lies in one page, unless it is wide or a path leads it.
        if TREE:
            node = node_at(bits, tl.maximum(n - start, 0).to(tl.int64)).to(tl.int32)
            slot = tl.where((bits != 0) & (n >= start) & seen, start + node, n)
        if TREE or WIDE:
            page = load_number(table + slot // SIZE, mask=seen, other=-1).to(tl.int64)
            there = seen & (page >= 0)
        else:
            page = load_number(table + base // SIZE).to(tl.int64)
            there = seen & (n * 0 + page >= 0)
        place = slot % SIZE
        k_at = keys + page * key_page + place * key_slot + g * key_head
        k = load(k_at[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], e4m3=E4M3)
        v_at = values + page * value_page + place * value_slot + g * value_head
        if WIDE:  # on their way together
            v = load(v_at[:, None] + w[None, :], mask=there[:, None] & (w < W)[None, :], e4m3=E4M3)
        s = dot(query, k, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), OPERANDS)
        if D2 > 0:
            k2_at = rope_keys + page * rope_page + place * rope_slot + g * rope_head
            k2 = load(k2_at[None, :] + d2[:, None], mask=there[None, :] & (d2 < D2)[:, None], e4m3=E4M3)
            s = dot(query2, k2, s, OPERANDS)
        s_at = page * scale_page + place * scale_slot + g
        if SCALED:
            s = s * load_number(key_scales + s_at, mask=there, other=0.0)[None, :]
        s = capped(s * scale, CAP)
        if ALIBI:
            s = s - slope[:, None] * (p - n).to(tl.float32)[None, :]
        s = tl.where(seen[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        base_m = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(s - base_m[:, None])
        alpha = tl.exp(m - base_m)
        total = total * alpha + tl.sum(weights, 1)
        m = new
        if SCALED:
            weights = weights * load_number(value_scales + s_at, mask=there, other=0.0)[None, :]
        if not WIDE:
            v = load(v_at[:, None] + w[None, :], mask=there[:, None] & (w < W)[None, :], e4m3=E4M3)
        acc = dot(weights, v, acc * alpha[:, None], shares_in(OPERANDS, SCALED))
    line = (t * heads + head) * num_splits + cut
    store(out_m + line, m, mask=own)
    store(out_l + line, total, mask=own)
    store(out + line[:, None] * W + w[None, :], acc, mask=own[:, None] & (w < W)[None, :])


@triton.jit(do_not_specialize=("num_splits", "shift"))
def _combine(
    parts, parts_m, parts_l, positions, sinks, out, window, chunk, heads, num_splits, shift,
    W: tl.constexpr, BLOCK_W: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_others(EARLY)
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = load_number(positions + t)
    first = first_key(p, window, chunk)
    w = tl.arange(0, BLOCK_W)
    line = (t * heads + head) * num_splits
    m = p.to(tl.float32) * 0.0 + float("-inf")
    total = p.to(tl.float32) * 0.0
    if SINKS:
        m = load_number(sinks + head)
        total = total + 1.0
    acc = tl.zeros([BLOCK_W], tl.float32)
    c = tl.arange(0, _CUTS)
    for base in range((first >> shift) // _CUTS * _CUTS, (p >> shift) + 1, _CUTS):
        cut = base + c
        there = (cut >= (first >> shift)) & (cut <= (p >> shift))
        own = load_number(parts_m + line + cut, mask=there, other=float("-inf"))
        new = tl.maximum(m, tl.max(own, 0))
        old, fresh = tl.exp(m - new), tl.exp(own - new)
        total = total * old + tl.sum(load_number(parts_l + line + cut, mask=there, other=0.0) * fresh, 0)
        part = load(parts + (line + cut)[:, None] * W + w[None, :], mask=there[:, None] & (w < W)[None, :])
        acc = acc * old + tl.sum(part * fresh[:, None], 0)
        m = new
    store(out + (t * heads + head) * W + w, acc / total, mask=w < W)


def sequences_of(query_start_loc: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The sequence of every token of a step, int32 [T]: computed once, read by every layer."""
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True).to(torch.int32)


def attend_tokens(
    q: torch.Tensor, cache: Cache, rule: Rule, query_start_loc: torch.Tensor, positions: torch.Tensor,
    max_position: int, *, sequences: torch.Tensor | None = None, mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None, operands: torch.dtype | None = None, split: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Each token over its own keys, for decoding and for trees of drafts: [T, H, W], of q's type.

    Shapes: q [T, H, D + D2] float32, float16 or bfloat16; query_start_loc int32 [B+1]; positions int32 [T], counted
    without tokens that the layer has forgotten; sequences int32 [T] (`sequences_of`); mask int64 [T], the bits of
    `ops.tree`, or None; `max_position`: no token of the step stands later (it sizes the grid and the partial results).
    `operands`: what products multiply; None: the type of the planes, and for codes q's (bfloat16, if that is float32).
    `split`: keys of a cut, a power of two from 64 on; None: fewer where there would be few programs. A token's bits
    depend on it.
    """
    t, heads, _ = q.shape
    kv_heads, width = cache.values.shape[2:]
    q = q.contiguous()
    if out is None:
        out = torch.empty((t, heads, width), dtype=q.dtype, device=q.device)
    if not t:
        return out
    if sequences is None:
        sequences = sequences_of(query_start_loc, t)
    alone, products = split is None, products_of(q, cache, operands)
    latent = mask is None and latent_decode.takes_latent(q, cache, rule, products)
    if latent:
        split = split or split_of(t * triton.cdiv(heads, latent_decode.HEADS), max_position, latent_decode.FILL)
    split = split or split_of(t * kv_heads * triton.cdiv(heads // kv_heads, _BLOCK_M), max_position)
    shift = split.bit_length() - 1  # cuts are powers of two: shifting takes fewer registers than division
    splits = max_position // split + 1
    parts = torch.empty((t, heads, splits, width), dtype=torch.float32, device=q.device)
    parts_m, parts_l = (torch.empty((t, heads, splits), dtype=torch.float32, device=q.device) for _ in range(2))
    wide, window, chunk = padded(width), rule.window or 0, rule.chunk or 0
    if latent:
        latent_decode.split_latent(q, cache, rule.scale, sequences, positions, products, (parts, parts_m, parts_l),
                                   splits, shift)  # fmt: skip
    else:
        _split_paged(q, cache, rule, query_start_loc, sequences, positions, mask, products, (parts, parts_m, parts_l),
                     splits, shift, alone)  # fmt: skip
    _combine[t, heads](
        parts, parts_m, parts_l, positions, rule.sinks, out, window, chunk, heads, splits, shift,
        W=width, BLOCK_W=wide, SINKS=rule.sinks is not None, num_warps=4, **overlap(),
        **LAUNCH,
    )  # fmt: skip
    return out


def _split_paged(
    q: torch.Tensor, cache: Cache, rule: Rule, query_start_loc: torch.Tensor, sequences: torch.Tensor,
    positions: torch.Tensor, mask: torch.Tensor | None, products: str,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], splits: int, shift: int, alone: bool,
) -> None:  # fmt: skip
    """Every cut of 2^`shift` keys by itself, for any keys and rules. `alone`: its size was chosen here.

    Mutates: `parts`.
    """
    t, heads, dim = q.shape
    _, size, kv_heads, width = cache.values.shape
    d, group = cache.keys.shape[-1], heads // kv_heads
    keys, values = as_bytes(cache.keys), as_bytes(cache.values)
    rope_keys = keys if cache.rope_keys is None else as_bytes(cache.rope_keys)
    scales = cache.key_scales
    wide, window, chunk = padded(width), rule.window or 0, rule.chunk or 0
    # What keeps registers and shared memory within every target: `tools/gpu_kernels.py`.
    tile = 16 if wide > 256 else 32 if products == "float32" else 64
    warps = 8 if wide > 256 else 4
    few = (
        alone and 1 << shift == _LEAST_SPLIT and mask is None and products != "float32" and max(wide, padded(d)) <= 128
        and d == dim and rule.slopes is None and rule.soft_cap is None
    )  # fmt: skip
    tile = tile_of(size, tile)
    if few:  # a cut at once: what one waits for is all there is
        tile, warps = 1 << shift, 8
    stages = 2 if wide > 256 or rule.soft_cap is not None or rule.slopes is not None else 3
    _split[t, kv_heads * triton.cdiv(group, _BLOCK_M), splits](
        q, keys, scales, rope_keys, values, cache.value_scales, cache.pages, sequences, query_start_loc, positions,
        mask, rule.slopes, *parts, rule.scale, window, chunk, heads, group, splits, shift,
        q.stride(0), *keys.stride()[:3], *rope_keys.stride()[:3], *values.stride()[:3],
        *((0, 0) if scales is None else scales.stride()[:2]), cache.pages.stride(0),
        D=d, D2=dim - d, W=width, BLOCK_D=padded(d), BLOCK_D2=padded(dim - d), BLOCK_W=wide, BLOCK_M=_BLOCK_M,
        BLOCK_N=tile, SIZE=size,
        CAP=rule.soft_cap, OPERANDS=products,
        E4M3=cache.keys.dtype == torch.float8_e4m3fn, SCALED=scales is not None, TREE=mask is not None,
        ALIBI=rule.slopes is not None, WIDE=few, num_warps=warps, num_stages=1 if few else stages, **overlap(),
        **LAUNCH,
    )  # fmt: skip


def split_of(programs: int, max_position: int, fill: int = _FILL) -> int:
    """Keys of a cut, if there are so many programs for each, and a device should have `fill`."""
    split = SPLIT
    while split > _LEAST_SPLIT and programs * (max_position // split + 1) < fill:
        split //= 2
    return split


def tile_of(size: int, most: int) -> int:
    """Keys of a tile: it lies in one page. Raises: ValueError for blocks that cannot be cut so."""
    tile = min(size, most)
    if size % tile or tile < 16 or tile & (tile - 1):
        raise ValueError(
            f"the kernels read blocks of 16, 32 or a multiple of 64 tokens, not of {size}: set --block-size 32"
        )
    return tile


def products_of(q: torch.Tensor, cache: Cache, operands: torch.dtype | None) -> str:
    """The name of the operands of a call's products: see `attend_tokens`."""
    if operands is not None:
        return operands_of(operands)
    return operands_of(cache.keys.dtype, torch.bfloat16 if q.dtype == torch.float32 else q.dtype)
