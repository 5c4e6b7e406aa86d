"""Bits of the bytes of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


def numbers(blocks: U8, at: int, count: int, dtype: str) -> npt.NDArray[Any]:
    """`count` numbers from byte `at` of every block: [N, count]."""
    size = np.dtype(dtype).itemsize * count
    return np.ascontiguousarray(blocks[:, at : at + size]).view(dtype)


def half(blocks: U8, at: int) -> npt.NDArray[np.float16]:
    """The float16 at byte `at` of every block: [N, 1]."""
    return numbers(blocks, at, 1, "<f2")


def fields(packed: U8, bits: int, run: int) -> U8:
    """[N, M] bytes -> [N, M * 8 / bits]: of each run of bytes their lowest `bits` bits, then the next, and so on."""
    n, m = packed.shape
    runs = packed.reshape(n, m // run, run)
    out = np.empty((n, m // run, 8 // bits, run), np.uint8)
    mask, top = np.uint8((1 << bits) - 1), 8 // bits - 1
    np.bitwise_and(runs, mask, out=out[:, :, 0])
    for i in range(1, top):
        np.right_shift(runs, np.uint8(bits * i), out=out[:, :, i])
        out[:, :, i] &= mask
    np.right_shift(runs, np.uint8(bits * top), out=out[:, :, top])
    return out.reshape(n, m * 8 // bits)


def bits_of(packed: U8) -> U8:
    """[N, M] bytes -> [N, 8 M]: their bits, the lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")
