"""Attention of single tokens with shapes that follow from no position: what a step that is captured needs.

Each row reads all blocks its table has room for, and what it does not see counts nothing. That is far more than the
kernels read, so it stands in for them only where they cannot run: on the CPU, where captured steps are tried.
Shape letters: T tokens, H query heads, G kv heads, D key dim, W value dim, n keys there is room for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.backends.gpu.codecs import TORCH_CODECS
from penstock.backends.gpu.ops import rope, rope_angles
from penstock.backends.gpu.step import HostRead, TorchStep
from penstock.core.cache_spec import run_name
from penstock.ops.ref.storage import codec_of


def attend_fixed(
    q: Tensor, step: TorchStep, group: int, layer: int, *, keys: tuple[str, ...], value: str, scale: float,
    window: int | None, chunk: int | None, soft_cap: float | None, slopes: Tensor | None, sinks: Tensor | None,
    rotation: Any,
) -> Tensor:  # fmt: skip
    """q [T, H, D] -> [T, H, W]; the arguments are those of `attention.TorchAttention.attend`.

    Raises: HostRead on a GPU, for what its kernels do not read.
    """
    static = step.static
    assert static is not None, "only in a step that is captured"
    if q.device.type != "cpu":
        raise HostRead("the kernels do not read the keys and values of one of its layers")
    every = step.plan.groups[group].num_layers
    rows = []
    for t in range(len(q)):
        slabs = static.tables[group][t]
        read = [_read(step, group, name, slabs, layer, every) for name in (*keys, value)]
        k, v = torch.cat(read[:-1], dim=-1), read[-1]
        n, p = torch.arange(len(k), device=q.device), static.positions[t].long()
        seen = n <= p
        if window is not None:
            seen &= n > p - window
        if chunk is not None:
            seen &= n >= p // chunk * chunk
        there = seen & (slabs >= 0).repeat_interleave(len(k) // len(slabs))
        # What lies in pages of others need not be a number, and nothing times NaN is NaN.
        k, v = (torch.where(there[:, None, None], x, 0.0) for x in (k, v))
        if rotation is not None:
            table, interleaved, first_dim = rotation
            k = rope(k, rope_angles(n.clamp(max=table.shape[1] - 1), table), interleaved, first_dim)
        own = q[t].reshape(k.shape[1], q.shape[1] // k.shape[1], -1)
        s = torch.matmul(own.contiguous(), k.permute(1, 2, 0).contiguous()) * scale
        if soft_cap is not None:
            s = torch.tanh(s / soft_cap) * soft_cap
        if slopes is not None:
            s = s - slopes.reshape(*s.shape[:2], 1) * (p - n).float()
        s = torch.where(seen, s, float("-inf"))
        m = s.amax(dim=-1, keepdim=True)
        if sinks is not None:
            m = torch.maximum(m, sinks.reshape(*s.shape[:2], 1))
        weights = torch.exp(s - m)
        total = weights.sum(dim=-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.reshape(*s.shape[:2], 1) - m)
        rows.append((torch.matmul(weights, v.transpose(0, 1).contiguous()) / total).reshape(q.shape[1], -1))
    return torch.stack(rows)


def _read(step: TorchStep, group: int, name: str, slabs: Tensor, layer: int, every: int) -> Tensor:
    """What the planes of `name` stand for in a row's slabs: [n, G, D], where there is none of any slab."""
    at = slabs.long().clamp(min=0)
    planes = step.planes[group]
    runs: list[Tensor] = []
    while (own := run_name(name, len(runs))) in planes:
        codec, beside = codec_of(planes, own)
        scales: Any = beside
        elements, kept = (
            None if plane is None else plane[layer::every][at].flatten(0, 1)
            for plane in (step.tensor(group, own), None if scales is None else scales.tensor)
        )
        assert elements is not None
        runs.append(TORCH_CODECS[codec].decode(elements, kept))
    return torch.cat(runs, dim=1)
