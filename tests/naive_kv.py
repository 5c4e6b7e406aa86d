"""Keys and values as a cache would give them back, worked out number by number from the whole text (see tests.oracle).

Nothing here packs a byte or knows a page; what a token may read follows from its position.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.base.bf16 import F32, narrow, widen
from penstock.core.kv_format import LayerFormat

BITS = {"int4": 4, "int2": 2, "channel4": 4, "channel2": 2}


def rounded(x: F32, codec: str) -> F32:
    """x [T, G, D] after a stay in a cache that rounds every token by itself."""
    if codec == "bfloat16":
        return widen(narrow(x))
    if codec == "int8":
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        return np.rint(x / np.where(scale == 0, np.float32(1), scale)) * scale
    if codec in BITS:
        out = np.empty_like(x)
        size = max(n for n in range(1, 33) if x.shape[-1] % n == 0)
        for t, head in np.ndindex(x.shape[:2]):
            for at in range(0, x.shape[-1], size):
                out[t, head, at : at + size] = few_steps(x[t, head, at : at + size], BITS[codec])
        return out
    return x.astype(codec).astype(np.float32)


def few_steps(numbers: F32, bits: int) -> F32:
    """Each number as the nearest of 2^bits steps from the smallest to the largest; both ends are float16."""
    steps = (1 << bits) - 1
    low, high = np.float32(min(numbers)), np.float32(max(numbers))
    minimum, scale = np.float32(np.float16(low)), np.float32(np.float16((high - low) / np.float32(steps)))
    if scale == 0:
        return np.full_like(numbers, minimum)
    return np.array([np.float32(min(max(np.rint((n - minimum) / scale), 0), steps)) * scale + minimum for n in numbers])


def coded(x: F32, codecs: tuple[str, ...], block: int) -> F32:
    """All complete blocks of x [T, G, D]; what follows them is NaN. A codec for all heads, or one for each."""
    out = np.full_like(x, np.nan)
    end = len(x) // block * block
    for head in range(x.shape[1]):
        codec, mine = codecs[head % len(codecs)], x[:end, head : head + 1]
        if codec not in ("channel4", "channel2"):
            out[:end, head : head + 1] = rounded(mine, codec)
            continue
        for first in range(0, end, block):
            for channel in range(x.shape[2]):
                out[first : first + block, head, channel] = few_steps(
                    mine[first : first + block, 0, channel], BITS[codec]
                )
    return out


def reader(x: F32, codecs: tuple[str, ...], how: LayerFormat, block: int) -> Callable[[int], F32]:
    """Position -> what the token there reads of x [T, G, D]: rows 0 ... position."""
    if not how.recent:
        heads = [rounded(x[:, g : g + 1], codecs[g % len(codecs)]) for g in range(x.shape[1])]
        whole = np.concatenate(heads, axis=1)
        return lambda position: whole[: position + 1]
    half = x.astype(np.float16).astype(np.float32)
    codes = coded(half, codecs, block)

    def read(position: int) -> F32:
        out = half[: position + 1].copy()
        for i in range(how.sinks, position + 1):
            if i // block < max(0, position + 1 - how.recent) // block:
                out[i] = codes[i]
        return out

    return read


def hadamard(x: F32) -> F32:
    """Every head times Sylvester's matrix, in butterflies instead of as a product."""
    out = x.astype(np.float64)
    size, step = x.shape[-1] & -x.shape[-1], 1
    while step < size:
        pairs = out.reshape(*x.shape[:-1], -1, 2, step)
        out = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        step *= 2
    return (out.reshape(x.shape) / np.sqrt(size)).astype(np.float32)
