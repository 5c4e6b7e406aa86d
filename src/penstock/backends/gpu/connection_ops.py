"""Several residual streams on tensors: see `ops.ref.connections`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.backends.gpu.ops import by_row


def spread(x: Tensor, num: int) -> Tensor:
    return x.repeat(1, num)


def weigh_streams(x: Tensor, scale: Tensor, base: Tensor, num: int, iterations: int, eps: float) -> Tensor:
    read = torch.sigmoid(x[:, :num] * scale[0] + base[:num]) + eps
    if x.shape[1] == num:
        return read
    write = 2.0 * torch.sigmoid(x[:, num : 2 * num] * scale[1] + base[num : 2 * num])
    mix = torch.softmax((x[:, 2 * num :] * scale[2] + base[2 * num :]).reshape(len(x), num, num), dim=-1) + eps
    for i in range(iterations):
        if i:
            mix = mix / (mix.sum(dim=2, keepdim=True) + eps)
        mix = mix / (mix.sum(dim=1, keepdim=True) + eps)
    return torch.cat([read, write, mix.reshape(len(x), num * num)], dim=1)


def collapse_streams(x: Tensor, weights: Tensor, num: int) -> Tensor:
    streams = x.reshape(len(x), num, x.shape[1] // num)
    out = streams[:, 0] * weights[:, :1]
    for i in range(1, num):
        out = out + streams[:, i] * weights[:, i : i + 1]
    return out


def blend_streams(x: Tensor, weights: Tensor, y: Tensor, num: int) -> Tensor:
    streams = x.reshape(len(x), num, x.shape[1] // num)
    write, mix = weights[:, num : 2 * num], weights[:, 2 * num :].reshape(len(x), num, num)
    out = write[:, :, None] * y[:, None, :]
    for j in range(num):
        out = out + mix[:, j, :, None] * streams[:, j : j + 1]
    return out.reshape(x.shape)


CONNECTION_OPS: dict[str, Callable[..., Any]] = {
    op.__name__: op for op in (spread, weigh_streams, collapse_streams, blend_streams)
}
CONNECTIONS_BY_ROW: dict[str, Callable[..., Any]] = CONNECTION_OPS | {
    op.__name__: by_row(op, n) for op, n in ((weigh_streams, 1), (collapse_streams, 2), (blend_streams, 3))
}
