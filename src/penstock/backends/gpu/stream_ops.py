"""Rows of several streams, and gates of which a share works, on tensors. See `ops.ref.streams`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.ops.ref.streams import LEAST_SQUARE


def cut_off(gate: Tensor, factor: float) -> Tensor:
    n = gate.shape[-1]
    centred = gate - gate.sum(dim=-1, keepdim=True) / n
    deviation = torch.sqrt((centred * centred).sum(dim=-1, keepdim=True) / n)
    return torch.relu(centred - deviation * factor)


def match_magnitude(x: Tensor, like: Tensor) -> Tensor:
    n = x.shape[-1]
    wanted = torch.sqrt((like * like).sum(dim=-1, keepdim=True) / n)
    found = ((x * x).sum(dim=-1, keepdim=True) / n).clamp(min=LEAST_SQUARE)
    return x * (wanted / torch.sqrt(found))


def scale_columns(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def stack_streams(*streams: Tensor) -> Tensor:
    return torch.stack(streams, dim=1)


def mix_streams(x: Tensor, weights: Tensor) -> Tensor:
    n = x.shape[1]
    out = x.clone()
    for i in range(n):
        for j in range(n):
            out[:, i] += weights[:, n * i + j, None] * x[:, j]
    return out


def correct_streams(x: Tensor, found: Tensor, weights: Tensor, active: int) -> Tensor:
    return x + (found - x[:, active])[:, None] * (1.0 + weights)[:, :, None]


def add_streams(x: Tensor, y: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1:] += y[:, None]
    return out


STREAM_OPS: dict[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (cut_off, match_magnitude, scale_columns, stack_streams, mix_streams, correct_streams, add_streams)
}
ROWED: dict[Callable[..., Tensor], int] = {cut_off: 1, match_magnitude: 2}
"""Those that add up a row, and how many of their arguments are rows."""
