"""Rotation of queries and keys, with keys and values written to their pages: one pass instead of four.

Source: Su et al., RoFormer, arXiv 2104.09864.
Shape letters: T tokens, H query heads, G kv heads, D key dim, W value dim, S block size, N pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import (
    LAUNCH,
    as_bytes,
    load,
    load_number,
    overlap,
    padded,
    rounded,
    store,
    to_e4m3,
    wait_for_others,
)

_HEADS = 16
"""Heads of a program at most."""


@triton.jit
def _turned(x, at, own, cos, sin, first, d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Heads, each component times the cosine of its pair, and its partner times the sine, with the pair's sign."""
    i = d - first
    inside = (i >= 0) & (i < 2 * HALF)
    if INTERLEAVED:
        pair, second = i // 2, i % 2 == 1
        partner = tl.where(second, d - 1, d + 1)
    else:
        pair, second = i % HALF, i >= HALF
        partner = tl.where(second, d - HALF, d + HALF)
    other = load(at[:, None] + partner[None, :], mask=own & inside[None, :])
    c, s = load(cos + pair, mask=inside), load(sin + pair, mask=inside)
    turned = x * c[None, :] + tl.where(second[None, :], other * s[None, :], -(other * s[None, :]))
    return tl.where(inside[None, :], turned, x)


@triton.jit
def _write(plane, scales, at, scale_at, x, own, here, d, KIND: tl.constexpr):
    """Heads into a plane, as `core.kv_codec` encodes them."""
    to = plane + at[:, None] + d[None, :]
    if KIND == "int8":
        largest = tl.max(tl.where(own, tl.abs(x), 0.0), 1)
        sick = tl.max(tl.where(own & (x != x), 1, 0), 1) > 0
        largest = tl.where(sick, float("nan"), largest)
        scale = tl.where(largest < float("inf"), tl.div_rn(largest, 127.0), float("nan"))
        whole = tl.minimum(tl.maximum(rounded(tl.div_rn(x, scale[:, None] + x * 0.0)), -127.0), 127.0)
        store(to, tl.where(scale[:, None] > 0.0, whole, 0.0), mask=own)
        store(scales + scale_at, scale, mask=here)
    elif KIND == "e4m3":
        store(to, to_e4m3(x), mask=own)
    else:
        store(to, x, mask=own)


@triton.jit
def _rope_write(
    q, k, v, positions, table, pages, places, turned, keys, key_scales, values, value_scales, first, table_half,
    q_stride, k_stride, v_stride, heads, kv_heads,
    key_page, key_slot, key_head, value_page, value_slot, value_head, scale_page, scale_slot,
    D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_others(EARLY)
    # A program has some heads of one token: of its query, its key or its value.
    t, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, h = tl.arange(0, BLOCK), tl.arange(0, BLOCK_H)
    cos = table + load_number(positions + t).to(tl.int64) * HALF
    sin = cos + table_half
    query_runs, key_runs = tl.cdiv(heads, BLOCK_H), tl.cdiv(kv_heads, BLOCK_H)
    if run < query_runs:
        head = run * BLOCK_H + h
        own = (head < heads)[:, None] & (d < D)[None, :]
        at = q + t * q_stride + head * D
        x = load(at[:, None] + d[None, :], mask=own)
        x = _turned(x, at, own, cos, sin, first, d, HALF, INTERLEAVED)
        store(turned + (t * heads + head)[:, None] * D + d[None, :], x, mask=own)
        return
    page, place = load_number(pages + t).to(tl.int64), load_number(places + t).to(tl.int64)
    g = (run - query_runs) % key_runs * BLOCK_H + h
    here = g < kv_heads
    scale_at = page * scale_page + place * scale_slot + g
    if run < query_runs + key_runs:
        own = here[:, None] & (d < D)[None, :]
        at = k + t * k_stride + g * D
        x = load(at[:, None] + d[None, :], mask=own)
        x = _turned(x, at, own, cos, sin, first, d, HALF, INTERLEAVED)
        to = page * key_page + place * key_slot + g * key_head
        _write(keys, key_scales, to, scale_at, x, own, here, d, KIND)
    else:
        own = here[:, None] & (d < W)[None, :]
        x = load((v + t * v_stride + g * W)[:, None] + d[None, :], mask=own)
        to = page * value_page + place * value_slot + g * value_head
        _write(values, value_scales, to, scale_at, x, own, here, d, KIND)


def rope_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, table: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, places: torch.Tensor, *,
    interleaved: bool = False, first: int = 0, key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Turned queries [T, H, D] of q's type, or float32 for planes of that; turned keys, and values, go to places[t] of
    page pages[t] of their planes.

    Shapes: q [T, H, D], k [T, G, D], v [T, G, W] float32, float16 or bfloat16, heads of a token side by side;
    positions, pages, places int32 or int64 [T]; table float32 [2, positions, n] (cosines and sines of n pairs from
    component `first` on, pairs of neighbours if `interleaved`, else n apart); keys [N, S, G, D], values [N, S, G, W]
    float32, float16, bfloat16, float8_e4m3fn, or int8 with scales float32 [N, S, G, 1].
    Mutates: the planes. A token's int8 codes are those of `core.kv_codec`.
    """
    t, heads, d = q.shape
    kv_heads, w = v.shape[1:]
    half = table.shape[-1]
    turned = torch.empty((t, heads, d), dtype=keys.dtype if keys.dtype == torch.float32 else q.dtype, device=q.device)
    if not t:
        return turned
    kind = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}.get(keys.dtype, "float")
    scale_strides = (0, 0) if key_scales is None else key_scales.stride()[:2]
    keys, values = as_bytes(keys), as_bytes(values)
    block_h = padded(min(heads, _HEADS), 1)
    _rope_write[t, triton.cdiv(heads, block_h) + 2 * triton.cdiv(kv_heads, block_h)](
        q, k, v, positions, table, pages, places, turned, keys, key_scales, values, value_scales, first,
        table.stride(0), q.stride(0), k.stride(0), v.stride(0), heads, kv_heads,
        *keys.stride()[:3], *values.stride()[:3], *scale_strides,
        D=d, W=w, BLOCK=padded(max(d, w)), BLOCK_H=block_h, HALF=half, INTERLEAVED=interleaved, KIND=kind,
        num_warps=4 if block_h * d > 1024 else 1, **overlap(), **LAUNCH,
    )  # fmt: skip
    return turned
