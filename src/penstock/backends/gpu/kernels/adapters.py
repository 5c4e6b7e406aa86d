"""Low-rank adapters of many rows at once: rows of one adapter in tiles, each tile with the matrices of its own.

Two kernels: inputs to ranks, cut where the number of inputs says, and ranks to outputs, which adds the cuts in order.
A tile has one width and a row's sums one order, so its bits do not depend on its company. Where the matrices lie is
read from a table, so that adapters may come and go under a captured graph, and may have any rank.

Source: Chen et al., Punica, arXiv 2310.18547 (the gathered product); Sheng et al., S-LoRA, arXiv 2311.03285 (ranks that
differ). Shape letters: T tokens, P of them with an adapter, K inputs, M outputs, R largest rank, A adapters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backends.gpu.kernels.loads import LAUNCH, dot, load, load_number, operands_of, padded, store

TILE = 16
"""Rows of a tile at most."""
RANK_STEP = 16
"""Ranks are filled up with zeros to multiples of so many."""
FIELDS = 6
_A, _B, _GAIN, _SHIFT, _RANK, _FACTOR = map(tl.constexpr, range(FIELDS))
_CUT, _MOST_CUTS = 512, 16


class AdapterSlots(NamedTuple):
    """Adapters of one product, by number.

    Shapes: table int64 [A, 6]: addresses of a [rank, K] and b [M, rank] of `like`'s type, of gain and shift float32 [M]
    (0: none), the rank, a multiple of 16, and the bits of the factor, a float32. `ranks`: R.
    """

    table: torch.Tensor
    like: torch.Tensor
    ranks: int


@triton.jit(do_not_specialize=["p_count"])
def _to_ranks(
    x, order, tiles, table, like, parts, p_count, x_stride, K, per_cut,
    R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(0)
    number, first, count = load_number(tile), load_number(tile + 1), load_number(tile + 2)
    if number >= 0:
        entry = table + number.to(tl.int64) * 6
        rank = load_number(entry + _RANK)
        r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        if tl.program_id(2) * BLOCK_R < rank:
            i = tl.arange(0, BLOCK_T)
            there, near = i < count, r < rank
            t = load_number(order + first + i, mask=there).to(tl.int64)
            a = tl.multiple_of(load_number(entry + _A), 16).to(like.dtype)
            k = tl.arange(0, BLOCK_K)
            x_at = x + t[None, :] * x_stride + k[:, None]
            a_at = a + r.to(tl.int64)[:, None] * K + k[None, :]
            acc = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
            start = tl.program_id(1) * per_cut
            for base in range(start, tl.minimum(start + per_cut, K), BLOCK_K):
                own = base + k < K
                rows = load(x_at + base, mask=there[None, :] & own[:, None])
                acc = dot(load(a_at + base, mask=near[:, None] & own[None, :]), rows, acc, OPERANDS)
            factor = load_number(entry + _FACTOR).to(tl.int32).to(tl.float32, bitcast=True)
            at = (tl.program_id(1).to(tl.int64) * p_count + first + i)[None, :] * R + r[:, None]
            store(parts + at, acc * factor, mask=there[None, :] & near[:, None])


@triton.jit(do_not_specialize=["p_count"])
def _to_outputs(
    parts, order, tiles, table, like, floats, y, p_count, y_stride, m_count, cuts,
    R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, OPERANDS: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(0)
    number, first, count = load_number(tile), load_number(tile + 1), load_number(tile + 2)
    if number >= 0:
        entry = table + number.to(tl.int64) * 6
        rank, gain, shift = load_number(entry + _RANK), load_number(entry + _GAIN), load_number(entry + _SHIFT)
        if (rank > 0) | (gain != 0) | (shift != 0):
            i, m = tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
            there, here = i < count, m < m_count
            t = load_number(order + first + i, mask=there).to(tl.int64)
            at = y + t[None, :] * y_stride + m[:, None]
            out = load(at, mask=there[None, :] & here[:, None])
            if gain != 0:
                out = out * load(gain.to(floats.dtype) + m, mask=here)[:, None]
            if shift != 0:
                out = out + load(shift.to(floats.dtype) + m, mask=here)[:, None]
            b = tl.multiple_of(load_number(entry + _B), 16).to(like.dtype)
            stride = tl.multiple_of(rank, 16)
            acc = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
            for base in range(0, rank, BLOCK_R):
                r = base + tl.arange(0, BLOCK_R)
                near = r < rank
                own = there[None, :] & near[:, None]
                u_at = parts + (first + i).to(tl.int64)[None, :] * R + r[:, None]
                u = load(u_at, mask=own)
                for cut in range(1, cuts):
                    u += load(u_at + tl.cast(cut, tl.int64) * p_count * R, mask=own)
                w = load(b + m.to(tl.int64)[:, None] * stride + r[None, :], mask=here[:, None] & near[None, :])
                acc = dot(w, u, acc, OPERANDS)
            store(at, out + acc, mask=there[None, :] & here[:, None])


def adapt(
    x: torch.Tensor, y: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, slots: AdapterSlots,
) -> torch.Tensor:  # fmt: skip
    """y [T, M] as the adapter of each token makes it of x [T, K]: y gain + shift + factor (x a^T) b^T. Mutates: y.

    Shapes: order int32 [P] tokens, those of one adapter side by side; tiles int32 [N, 3]: an adapter (negative: the
    tile is empty), its first token's place in `order`, and how many there are, at most 16.
    """
    (_, k), m, p = x.shape, y.shape[1], len(order)
    if not p:
        return y
    block_r = min(32, padded(slots.ranks))
    wide = slots.like.element_size() == 4 or block_r > RANK_STEP
    block_k, per_cut = 128 if wide else 256, _CUT * triton.cdiv(triton.cdiv(k, _CUT), _MOST_CUTS)
    cuts, ranks = triton.cdiv(k, per_cut), triton.cdiv(slots.ranks, RANK_STEP) * RANK_STEP
    parts = torch.empty((cuts, p, ranks), dtype=torch.float32, device=x.device)
    how = {"R": ranks, "BLOCK_T": TILE, "BLOCK_R": block_r, "OPERANDS": operands_of(slots.like.dtype)}
    _to_ranks[len(tiles), cuts, triton.cdiv(ranks, block_r)](
        x, order, tiles, slots.table, slots.like, parts, p, x.stride(0), k, per_cut, BLOCK_K=block_k, **how,
        num_warps=4, num_stages=3, **LAUNCH,
    )  # fmt: skip
    _to_outputs[len(tiles), triton.cdiv(m, 128)](
        parts, order, tiles, slots.table, slots.like, parts, y, p, y.stride(0), m, cuts, BLOCK_M=128, **how,
        num_warps=4, **LAUNCH,
    )  # fmt: skip
    return y
