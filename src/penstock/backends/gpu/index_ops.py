"""Sparse latent attention on tensors: see `ops.ref.indexer`. A token at a time, and the host knows the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.cache_ops import read_kv
from penstock.backends.gpu.step import TorchStep


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


INDEX_OPS: dict[str, Callable[..., Any]] = {"choose_tokens": choose_tokens, "attend_chosen": attend_chosen}
