"""Entries of several tokens on tensors: see `ops.ref.entries`. A token at a time; the host knows positions and pages.

A token's tensors have shapes that follow from its position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.backends.gpu.cache_ops import read_kv, store, write_kv
from penstock.backends.gpu.codecs import TORCH_CODECS
from penstock.backends.gpu.ops import rms_norm, rope
from penstock.backends.gpu.step import TorchStep
from penstock.ops.ref.entries import pieces, places
from penstock.ops.ref.storage import codec_of


def write_entries(
    step: TorchStep, value: Tensor, score: Tensor, group: int, layer: int, entry_group: int, entry_layer: int,
    plane: str, *, every: int, overlap: bool, bias: Tensor, weight: Tensor, eps: float, table: Tensor,
    interleaved: bool,
) -> None:  # fmt: skip
    """See `ops.ref.entries.write_entries`."""
    names = (f"{plane}_value", f"{plane}_score")
    write_kv(step, value[:, None], score[:, None], group, layer, names)
    for piece in pieces(step):
        first, last = piece.start // every, piece.end // every
        if first == last:
            continue
        pages = step.plan.groups[group].pages(piece.b, layer)
        begin = max(0, first - overlap) * every
        v, g = (read_kv(step, group, name, pages, begin, last * every)[:, 0] for name in names)
        made = []
        for number in range(first, last):
            lo = (number - overlap) * every - begin
            parts = v[max(0, lo) : lo + (1 + overlap) * every], g[max(0, lo) : lo + (1 + overlap) * every]
            x = rms_norm(_pool(*parts, bias, every, overlap=overlap), weight, eps)
            angles = table[:, number * every][:, None]
            made.append(rope(x[:, None], angles, interleaved, x.shape[1] - 2 * table.shape[2]))
        at = places(step.plan.groups[entry_group], piece.b, entry_layer, first, last, every)
        store(step.planes[entry_group], plane, tuple(step.on_device(x) for x in at), torch.cat(made))


def _pool(value: Tensor, score: Tensor, bias: Tensor, every: int, *, overlap: bool) -> Tensor:
    """One entry [1, D] of its own m tokens [m, s*D], behind those of the entry before, if there is one."""
    v, g = value, score + bias.repeat(len(score) // every, 1)
    if overlap:
        dim, before = v.shape[1] // 2, len(v) - every
        v = torch.cat([v[:before, :dim], v[before:, dim:]])
        g = torch.cat([g[:before, :dim], g[before:, dim:]])
    e = torch.exp(g - g.amax(dim=0, keepdim=True))
    return (v * (e / e.sum(dim=0, keepdim=True))).sum(dim=0, keepdim=True)


def choose_entries(
    q: Tensor, weights: Tensor, step: TorchStep, group: int, layer: int, plane: str, top_k: int, scale: float,
    every: int,
) -> list[Tensor]:  # fmt: skip
    """See `ops.ref.entries.choose_entries`: of each token the entries that it reads. Sorts are stable."""
    out = []
    for t, entries in _tokens(step, group, layer, plane, every):
        shares = torch.relu(torch.matmul(q[t].contiguous(), entries.T.contiguous()) * scale)
        worth = torch.matmul(weights[t].contiguous(), shares)
        out.append(torch.sort(torch.sort(-worth, stable=True).indices[:top_k]).values)
    return out


def attend_entries(
    q: Tensor, step: TorchStep, *more: Any, every: int, window: int, scale: float, sinks: Tensor
) -> Tensor:
    """See `ops.ref.entries.attend_entries`."""
    chosen, at = (more[0], more[1:]) if len(more) == 7 else (None, more)
    group, layer, entry_group, entry_layer, near, far = at
    out = torch.empty_like(q)
    near_keys = _windows(step, group, layer, near, window)
    for (t, entries), keys in zip(_tokens(step, entry_group, entry_layer, far, every), near_keys, strict=True):
        found = torch.cat([keys, entries if chosen is None else entries[chosen[t]]])
        s = torch.matmul(q[t].contiguous(), found.T.contiguous()) * scale
        most = torch.maximum(s.amax(dim=-1, keepdim=True), sinks[:, None])
        e = torch.exp(s - most)
        out[t] = torch.matmul(e, found) / (e.sum(dim=-1, keepdim=True) + torch.exp(sinks[:, None] - most))
    return out


def _tokens(step: TorchStep, group: int, layer: int, plane: str, every: int) -> Iterator[tuple[int, Tensor]]:
    """Every token of the step with the entries [n, D] that it may see."""
    for piece in pieces(step):
        where = step.plan.groups[group]
        at = tuple(step.on_device(x) for x in places(where, piece.b, layer, 0, piece.end // every, every))
        codec, beside = codec_of(step.planes[group], plane)
        scales: Any = beside
        held = TORCH_CODECS[codec].decode(step.tensor(group, plane)[at], None if scales is None else scales.tensor[at])[
            :, 0
        ]
        for t in range(piece.lo, piece.hi):
            yield t, held[: (piece.start + t - piece.lo + 1) // every]


def _windows(step: TorchStep, group: int, layer: int, plane: str, window: int) -> Iterator[Tensor]:
    """Of every token of the step the keys [w, D] of its window."""
    for piece in pieces(step):
        begin = max(0, piece.start + 1 - window)
        held = read_kv(step, group, plane, step.plan.groups[group].pages(piece.b, layer), begin, piece.end)[:, 0]
        for position in range(piece.start, piece.end):
            yield held[max(0, position + 1 - window) - begin : position + 1 - begin]


ENTRY_OPS: dict[str, Callable[..., Any]] = {
    "write_entries": write_entries, "choose_entries": choose_entries, "attend_entries": attend_entries,
}  # fmt: skip
