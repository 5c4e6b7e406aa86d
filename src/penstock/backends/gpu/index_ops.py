"""Sparse latent attention on tensors: see `ops.ref.indexer`. A token at a time, and the host knows the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.cache_ops import read_kv
from penstock.backends.gpu.step import TorchStep
from penstock.base.bf16 import F32
from penstock.core.selection import TokenReads
from penstock.ops.plan import I32
from penstock.ops.ref.rehearsal import rehearse_rows


def rehearse(
    q: Tensor, step: TorchStep, group: int, layer: int, plane: str, scale: float, reads: TokenReads, late: bool
) -> None:
    """See `ops.ref.rehearsal.rehearse`, which does it, on the host."""

    def keys_of(pages: I32, hi: int) -> F32:
        keys: F32 = read_kv(step, group, plane, pages, 0, hi).cpu().numpy()
        return keys

    rehearse_rows(q.cpu().numpy(), step, group, layer, scale, reads, late, keys_of)


def choose_tokens(
    q: Tensor, weights: Tensor, step: TorchStep, group: int, layer: int, plane: str, top_k: int, scale: float
) -> list[Tensor]:
    """See `ops.ref.indexer.choose_tokens`: sorts are stable, so ties go to the lower position."""
    out = []
    for t, (keys,) in _contexts(step, group, layer, (plane,)):
        shares = torch.relu(torch.matmul(q[t].contiguous(), keys[:, 0].T.contiguous()) * scale)
        scores = torch.matmul(weights[t].contiguous(), shares)
        out.append(torch.sort(torch.sort(-scores, stable=True).indices[:top_k]).values)
    return out


def attend_chosen(
    q: Tensor, chosen: Sequence[Tensor], step: TorchStep, group: int, layer: int, *, keys: tuple[str, ...], value: str,
    scale: float,
) -> Tensor:  # fmt: skip
    """See `ops.ref.indexer.attend_chosen`."""
    out = q.new_zeros((*q.shape[:2], step.tensor(group, value).shape[-1]))
    for t, (*parts, v) in _contexts(step, group, layer, (*keys, value)):
        k, own = torch.cat(parts, dim=-1)[chosen[t], 0], v[chosen[t], 0]
        scores = torch.matmul(q[t].contiguous(), k.T.contiguous()) * scale
        weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        out[t] = torch.matmul(weights, own.contiguous()) / weights.sum(dim=-1, keepdim=True)
    return out


def attend_blocks(
    q: Tensor, index_q: Tensor, step: TorchStep, group: int, layer: int, block: int, top_k: int, local: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """See `ops.ref.blocks.attend_blocks`."""
    out, share = torch.zeros_like(q), q.shape[1] // index_q.shape[1]
    for t, (k, v, index) in _contexts(step, group, layer, ("k", "v", "index")):
        n, count = len(k), -(-len(k) // block)
        at = torch.ones((index_q.shape[1], n), dtype=torch.bool, device=q.device)
        if count > top_k:
            scores = q.new_full((index_q.shape[1], count * block), -torch.inf)
            scores[:, :n] = torch.matmul(index_q[t].contiguous(), index[:, 0].T.contiguous())
            worth = scores.view(-1, count, block).amax(dim=-1)
            worth[:, count - local :] = torch.inf
            best = torch.sort(-worth, dim=-1, stable=True).indices[:, :top_k]
            kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)
            at = kept.repeat_interleave(block, dim=-1)[:, :n]
        for g in range(index_q.shape[1]):
            heads, own = slice(g * share, (g + 1) * share), at[g]
            found = torch.matmul(q[t, heads].contiguous(), k[own, g].T.contiguous()) * scale
            weights = torch.exp(found - found.amax(dim=-1, keepdim=True))
            out[t, heads] = torch.matmul(weights, v[own, g].contiguous()) / weights.sum(dim=-1, keepdim=True)
    return out


def _contexts(step: TorchStep, group: int, layer: int, names: Sequence[str]) -> Iterator[tuple[int, list[Tensor]]]:
    plan, where = step.plan, step.plan.groups[group]
    for b in range(step.num_sequences):
        lo, hi = step.bounds[b], step.bounds[b + 1]
        if lo == hi:
            continue
        gone = where.num_dropped(b, layer, 0)
        start = int(plan.positions[lo]) - gone
        pages, paths = where.pages(b, layer, 0), step.trees(b)
        held = [read_kv(step, group, name, pages, 0, start + hi - lo) for name in names]
        for t in range(lo, hi):
            if paths is None:
                yield t, [x[: int(plan.positions[t]) - gone + 1] for x in held]
            else:
                path = np.array(paths[t - lo], np.int64) + (start - lo)
                at = step.on_device(np.concatenate([np.arange(start), path]))
                yield t, [x[at] for x in held]


INDEX_OPS: dict[str, Callable[..., Any]] = {
    "rehearse": rehearse, "choose_tokens": choose_tokens, "attend_chosen": attend_chosen,
    "attend_blocks": attend_blocks,
}  # fmt: skip
