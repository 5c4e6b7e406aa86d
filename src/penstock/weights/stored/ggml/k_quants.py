"""Where k-quants keep codes and scales: super-blocks of 256 numbers with whole-numbered scales for 16 or 32 of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.weights.stored.ggml.fields import U8, fields, half, numbers

I8 = npt.NDArray[np.int8]
Pair = tuple[npt.NDArray[Any], npt.NDArray[np.float16]]


def q2_k_scales(blocks: U8) -> Pair:
    """16 bytes at the front: the scale of the codes in the low half, that of the minimum in the high one."""
    return blocks[:, :16] & np.uint8(15), half(blocks, 80)


def q2_k_zeros(blocks: U8) -> Pair:
    return blocks[:, :16] >> np.uint8(4), half(blocks, 82)


def q2_k_codes(blocks: U8) -> U8:
    return fields(blocks[:, 16:80], 2, 32)


def q3_k_scales(blocks: U8) -> Pair:
    """12 bytes: the low four bits of 16 scales, then the high two."""
    low, high = fields(blocks[:, 96:104], 4, 8), fields(blocks[:, 104:108], 2, 4)
    return (low | high << np.uint8(4)).view(np.int8) - np.int8(32), half(blocks, 108)


def q3_k_codes(blocks: U8) -> U8:
    """32 bytes of third bits, 64 of the two below."""
    out = fields(blocks[:, :32], 1, 32)
    out <<= np.uint8(2)
    out |= fields(blocks[:, 32:96], 2, 32)
    return out


def q4_k_scales(blocks: U8) -> Pair:
    """Of 12 bytes from the fifth: six bits of the first four scales; of the others four bits, and two that are above
    those six."""
    first, high = blocks[:, 4:8], blocks[:, 12:16]
    return np.concatenate([first & 63, high & 15 | first >> 6 << 4], axis=1), half(blocks, 0)


def q4_k_zeros(blocks: U8) -> Pair:
    """The same of minima, whose four bits are the upper ones."""
    first, high = blocks[:, 8:12], blocks[:, 12:16]
    return np.concatenate([first & 63, high >> 4 | first >> 6 << 4], axis=1), half(blocks, 2)


def q4_k_codes(blocks: U8) -> U8:
    return fields(blocks[:, 16:], 4, 32)


def q5_k_codes(blocks: U8) -> U8:
    """Bit i of 32 bytes is the fifth bit of the i-th run of 32."""
    out = fields(blocks[:, 16:48], 1, 32)
    out <<= np.uint8(4)
    out |= fields(blocks[:, 48:], 4, 32)
    return out


def q6_k_scales(blocks: U8) -> tuple[I8, npt.NDArray[np.float16]]:
    return numbers(blocks, 192, 16, "i1"), half(blocks, 208)


def q6_k_codes(blocks: U8) -> U8:
    """128 bytes of low nibbles, 64 of the two bits above."""
    out = fields(blocks[:, 128:192], 2, 32)
    out <<= np.uint8(4)
    out |= fields(blocks[:, :128], 4, 64)
    return out
