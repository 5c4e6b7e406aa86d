"""What the kernels are compared with: the operations written down plainly, in float64, one token at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.ops.tree import path, tree_mask

ABSENT = "Triton is not installed: pip install 'penstock[gpu]'"
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def rough(dtype: torch.dtype) -> float:
    """The distance between 1 and the next number of a type."""
    return torch.finfo(dtype).eps


class Paged(NamedTuple):
    """A random step over paged planes, and what the planes hold, decoded, in float64."""

    q: Tensor
    planes: dict[str, Tensor]
    scales: dict[str, Tensor]
    decoded: dict[str, Tensor]
    pages: Tensor
    query_start_loc: Tensor
    positions: Tensor
    mask: Tensor | None
    cached: tuple[int, ...]


def encode(x: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Values as a plane of a kind: elements and scales."""
    if kind == "int8":
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
    return x.to(torch.float8_e4m3fn if kind == "e4m3" else FLOATS[kind]), None


def decode(elements: Tensor, scale: Tensor | None) -> Tensor:
    x = elements.float().double()
    return x if scale is None else x * scale.double()


def paged_step(
    seed: int, cached: tuple[int, ...], new: tuple[int, ...], *, heads: int = 4, kv_heads: int = 2,
    dims: dict[str, int],
    size: int = 16, kind: str = "float32", q_kind: str = "float32", trees: bool = False, drop: int = 0,
) -> Paged:  # fmt: skip
    """`cached[b]` tokens stand, `new[b]` run. `dims`: components of each plane. `drop`: blocks gone at the front."""
    draw = torch.Generator().manual_seed(seed)
    need = [-(-(c + n) // size) for c, n in zip(cached, new, strict=True)]
    order = torch.randperm(sum(need) + 3, generator=draw)
    pages = torch.full((len(cached), max(need) + 1), -1, dtype=torch.int32)
    taken = 0
    for b, count in enumerate(need):
        pages[b, :count] = order[taken : taken + count].int()
        taken += count
        pages[b, : min(drop, max(count - 1, 0))] = -1
    planes: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, dim in dims.items():
        x = torch.randn((len(order), size, kv_heads, dim), generator=draw)
        planes[name], scale = encode(x, kind)
        decoded[name] = decode(planes[name], scale)
        if scale is not None:
            scales[name] = scale
    positions, masks = [], []
    for c, n in zip(cached, new, strict=True):
        parents = [-1] + [int(torch.randint(max(0, i - 3), i, (1,), generator=draw)) for i in range(1, n)]
        if trees and n > 1:
            bits, depths = tree_mask(parents)
            masks += bits.astype(np.int64).tolist()
            positions += (depths + c).tolist()
        else:
            masks += [0] * n
            positions += range(c, c + n)
    width = sum(d for name, d in dims.items() if name != "v")
    q = torch.randn((sum(new), heads, width), generator=draw).to(FLOATS[q_kind])
    starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    mask = torch.tensor(masks, dtype=torch.int64) if trees else None
    return Paged(q, planes, scales, decoded, pages, starts, torch.tensor(positions, dtype=torch.int32), mask, cached)


def attention(step: Paged, rule: Any) -> Tensor:
    """[T, H, W] in float64: `ops.ref.attention.rows` for planes in pages."""
    keys = [name for name in step.planes if name != "v"]
    size, rows = step.planes["v"].shape[1], []
    for b in range(len(step.pages)):
        lo, hi = step.query_start_loc[b : b + 2].tolist()
        for t in range(lo, hi):
            p, start = int(step.positions[t]), int(step.positions[lo])
            first = 0 if rule.window is None else max(0, p + 1 - rule.window)
            if rule.chunk is not None:
                first = max(first, p // rule.chunk * rule.chunk)
            slots = list(range(p + 1))
            if step.mask is not None and step.mask[t]:
                slots = [*range(start), *(start + i for i in path(int(step.mask[t]) & (1 << 64) - 1, t - lo))]
                assert len(slots) == p + 1
            at = torch.tensor(slots[first:])
            page = step.pages[b, at // size].long()
            assert (page >= 0).all()
            k = torch.cat([step.decoded[name][page, at % size] for name in keys], -1)
            v = step.decoded["v"][page, at % size]
            g = k.shape[1]
            q = step.q[t].double().reshape(g, -1, k.shape[-1])
            s = torch.einsum("ghd,ngd->ghn", q, k) * rule.scale
            if rule.soft_cap is not None:
                s = torch.tanh(s / rule.soft_cap) * rule.soft_cap
            if rule.slopes is not None:
                s = s - rule.slopes.double().reshape(g, -1, 1) * torch.arange(p - first, -1, -1)
            if rule.sinks is not None:
                sinks = rule.sinks.double().reshape(g, -1, 1)
                s = torch.cat([s, sinks], -1)
                v = torch.cat([v, torch.zeros_like(v[:1])])
            rows.append(torch.einsum("ghn,ngw->ghw", torch.softmax(s, -1), v).reshape(step.q.shape[1], -1))
    return torch.stack(rows)
