"""Values of the block types whose numbers are coded together: points of a grid (IQ1 to IQ3), five digits of base 3.

Exactness: every product has fewer than 24 bits, so float32 has each exactly, in whatever order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.weights.stored.ggml.fields import U8, bits_of, fields, half, numbers
from penstock.weights.stored.ggml.grid_points import grid

_DELTA = np.float32(0.125)
_points = cache(grid)


@cache
def _signs() -> F32:
    """[256, 8]: -1 for every bit of a byte that is set, the lowest first, else 1."""
    return 1 - 2 * bits_of(np.arange(256, dtype=np.uint8)[:, None]).astype(np.float32)


@cache
def _even_signs() -> F32:
    """[128, 8]: the same of seven bits with an eighth that makes the number of minuses even."""
    seven = np.arange(128, dtype=np.uint8)
    parity = np.bitwise_xor.reduce(bits_of(seven[:, None]), axis=1)
    out: F32 = _signs()[seven | parity << np.uint8(7)]
    return out


def _scaled(step: F32, points: F32, signs: F32) -> F32:
    """step [N, S] times what its part of a block has: points and signs, in their order."""
    n, parts = step.shape
    out = points.reshape(n, parts, -1)
    out *= signs.reshape(n, parts, -1)
    out *= step[:, :, None]
    return out.reshape(n, -1)


def _float(blocks: U8) -> F32:
    return half(blocks, 0).astype(np.float32)


def iq2_xxs(blocks: U8) -> F32:
    """d, then eight times four indices and a u32 of four times seven signs and a scale of four bits."""
    n = len(blocks)
    words = np.ascontiguousarray(blocks[:, 2:]).reshape(n, 8, 8)
    rest = np.ascontiguousarray(words[:, :, 4:]).view("<u4")
    step = _float(blocks) * (np.float32(0.5) + (rest[:, :, 0] >> 28).astype(np.float32)) * np.float32(0.25)
    return _scaled(step, _points("IQ2_XXS")[words[:, :, :4]], _even_signs()[_sevens(rest)])


def _sevens(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """[N, M, 1] -> [N, M, 4]: the four times seven lowest bits."""
    return words >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)


def _half_steps(blocks: U8, at: int) -> F32:
    """16 scales of four bits, (s + 1/2) d / 4."""
    scales = fields(blocks[:, at : at + 8], 4, 1).astype(np.float32)
    out: F32 = _float(blocks) * (scales + np.float32(0.5)) * np.float32(0.25)
    return out


def iq2_xs(blocks: U8) -> F32:
    """d, 32 u16 of nine bits of index and seven signs, 16 scales of four bits."""
    words = numbers(blocks, 2, 32, "<u2")
    return _scaled(_half_steps(blocks, 66), _points("IQ2_XS")[words & 511], _even_signs()[words >> 9])


def iq2_s(blocks: U8) -> F32:
    """d, 32 bytes of indices, 32 of signs, 8 of two more bits of each index, 16 scales of four bits."""
    index = blocks[:, 2:34] | fields(blocks[:, 66:74], 2, 1).astype(np.uint16) << 8
    return _scaled(_half_steps(blocks, 74), _points("IQ2_S")[index], _signs()[blocks[:, 34:66]])


def iq3_xxs(blocks: U8) -> F32:
    """d, 64 indices, then eight u32 of four times seven signs and a scale of four bits."""
    rest = numbers(blocks, 66, 8, "<u4")[:, :, None]
    step = _float(blocks) * (np.float32(0.5) + (rest[:, :, 0] >> 28).astype(np.float32)) * np.float32(0.5)
    return _scaled(step, _points("IQ3_XXS")[blocks[:, 2:66]], _even_signs()[_sevens(rest)])


def iq3_s(blocks: U8) -> F32:
    """d, 64 bytes of indices, 8 of a ninth bit of each, 32 of signs, eight scales of four bits: (2 s + 1) d."""
    index = blocks[:, 2:66] | bits_of(blocks[:, 66:74]).astype(np.uint16) << 8
    step = _float(blocks) * (2 * fields(blocks[:, 106:110], 4, 1).astype(np.float32) + 1)
    return _scaled(step, _points("IQ3_S")[index], _signs()[blocks[:, 74:106]])


def _shifted(step: F32, index: npt.NDArray[Any], minus: npt.NDArray[np.bool_]) -> F32:
    """step (point + 1/8), minus 1/8 where `minus` says so: all [N, S], S dividing the 32 points of a block."""
    out: F32 = _points("IQ1_S")[index]
    out += np.where(minus, -_DELTA, _DELTA).repeat(32 // minus.shape[1], axis=1)[:, :, None]
    out *= step.repeat(32 // step.shape[1], axis=1)[:, :, None]
    return out.reshape(len(step), -1)


def iq1_s(blocks: U8) -> F32:
    """d, 32 bytes of indices, eight u16: three more bits of four indices, a scale of three bits, the sign of 1/8."""
    words = numbers(blocks, 34, 8, "<u2")
    high = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    index = blocks[:, 2:34] | high.reshape(-1, 32) << 8
    step = half(blocks, 0).astype(np.float32) * (2 * (words >> 12 & 7).astype(np.float32) + 1)
    return _shifted(step, index, words >> 15 == 1)


def iq1_m_scale(blocks: U8) -> npt.NDArray[np.float16]:
    """Four bits of it are the highest of each of the last four u16."""
    words = numbers(blocks, 48, 4, "<u2")
    parts = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    return np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16)


def iq1_m(blocks: U8) -> F32:
    """32 bytes of indices, 32 nibbles (three more bits of an index, the sign of 1/8), four u16 of four times a scale
    of three bits, each for 16 numbers, and a quarter of d."""
    nibbles = fields(blocks[:, 32:48], 4, 1)
    index = blocks[:, :32] | (nibbles & 7).astype(np.uint16) << 8
    words = numbers(blocks, 48, 4, "<u2")
    scales = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    step = iq1_m_scale(blocks).astype(np.float32) * (2 * scales.reshape(-1, 16).astype(np.float32) + 1)
    return _shifted(step, index, nibbles >> 3 == 1)


@cache
def _trits() -> F32:
    """[256, 5]: the digits of a byte, which is a fraction of 256 in base 3, less one."""
    tails = np.arange(256)[:, None] * 3 ** np.arange(5) % 256
    return (tails * 3 // 256 - 1).astype(np.float32)


def tq1_0(blocks: U8) -> F32:
    """32 and 16 bytes of five digits each, 4 bytes of four, d; a run's first digits come first."""
    n = len(blocks)
    digits = _trits()[blocks[:, :52]]
    parts = (digits[:, :32], digits[:, 32:48], digits[:, 48:, :4])
    out = np.concatenate([part.swapaxes(1, 2).reshape(n, -1) for part in parts], axis=1)
    out *= half(blocks, 52).astype(np.float32)
    return out
