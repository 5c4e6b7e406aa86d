"""Several residual streams: see `core.mixers.streams.Streams`. Sums run over the streams in their order.

Shape letters: T tokens, n streams, E hidden.
"""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.ref.experts import softmax
from penstock.ops.ref.pointwise import sigmoid


def spread(x: F32, num: int) -> F32:
    """x [T, E] -> [T, n*E], n times the same."""
    return np.tile(x, (1, num))


def weigh_streams(x: F32, scale: F32, base: F32, num: int, iterations: int, eps: float) -> F32:
    """x [T, (2 + n) n] (or [T, n], of the head) -> of each token the weights to read [n], to write [n], to mix [n, n].

    scale [3] (or [1]), base [(2 + n) n] (or [n]).
    """
    least = np.float32(eps)
    read = sigmoid(x[:, :num] * scale[0] + base[:num]) + least
    if x.shape[1] == num:
        return read
    write = np.float32(2) * sigmoid(x[:, num : 2 * num] * scale[1] + base[num : 2 * num])
    mix = softmax((x[:, 2 * num :] * scale[2] + base[2 * num :]).reshape(len(x), num, num)) + least
    for i in range(iterations):
        if i:
            mix = mix / (np.add.reduce(mix, axis=2, keepdims=True) + least)
        mix = mix / (np.add.reduce(mix, axis=1, keepdims=True) + least)
    return np.concatenate([read, write, mix.reshape(len(x), num * num)], axis=1)


def collapse_streams(x: F32, weights: F32, num: int) -> F32:
    """x [T, n*E] -> [T, E], the sum of the streams by the first n weights."""
    streams = x.reshape(len(x), num, x.shape[1] // num)
    out: F32 = streams[:, 0] * weights[:, :1]
    for i in range(1, num):
        out = out + streams[:, i] * weights[:, i : i + 1]
    return out


def blend_streams(x: F32, weights: F32, y: F32, num: int) -> F32:
    """x [T, n*E], y [T, E] -> [T, n*E]: stream k is write[k] y + sum over j of mix[j, k] x[j]."""
    streams = x.reshape(len(x), num, x.shape[1] // num)
    write, mix = weights[:, num : 2 * num], weights[:, 2 * num :].reshape(len(x), num, num)
    out: F32 = write[:, :, None] * y[:, None, :]
    for j in range(num):
        out = out + mix[:, j, :, None] * streams[:, j : j + 1]
    return out.reshape(x.shape)
