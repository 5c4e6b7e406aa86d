"""Decoders of ggml's block formats: block bytes [N, B] uint8 -> values [N, K] float32.

Exactness: every operation is one in float32, in ggml's order, so values equal those of ggml's own scalar code bit for
bit. Shape letters: N blocks, B bytes and K elements of a block (`formats.tensor_ref.BLOCKS`).
Source: the block structs of ggml-common.h and `dequantize_row_*` of ggml-quants.c, github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]


def _half(blocks: U8, at: int) -> F32:
    """The float16 at byte `at` of every block: [N, 1] float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(codes: U8) -> U8:
    """[N, M] -> [N, 2M]: all low halves, then all high halves."""
    return np.concatenate([codes & 15, codes >> 4], axis=1)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """Bit i of the u32 at byte `at` as 16 or 0, i = 0 ... 31: [N, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: U8) -> F32:
    """d float16, 16 bytes of two nibbles: (q - 8) d."""
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - 8) * _half(blocks, 0)


def _q4_1(blocks: U8) -> F32:
    """d, m float16, nibbles: q d + m."""
    return _nibbles(blocks[:, 4:]).astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: U8) -> F32:
    """d float16, u32 of fifth bits, nibbles: (q - 16) d."""
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (codes.astype(np.float32) - 16) * _half(blocks, 0)


def _q5_1(blocks: U8) -> F32:
    """d, m float16, u32 of fifth bits, nibbles: q d + m."""
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes.astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: U8) -> F32:
    """d float16, 32 int8: q d."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _pairs(codes: U8, bits: int) -> U8:
    """[N, 2, 32] bytes -> [N, 2, 8 / bits, 32]: their lowest `bits` bits, then the next, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    out: U8 = (codes[:, :, None, :] >> shifts) & np.uint8((1 << bits) - 1)
    return out


def _q2_k(blocks: U8) -> F32:
    """16 scales (low half: of the code; high half: of the minimum), 64 bytes of four codes, d, dmin."""
    n = len(blocks)
    scales = blocks[:, :16]
    codes = _pairs(blocks[:, 16:80].reshape(n, 2, 32), 2).reshape(n, 16, 16).astype(np.float32)
    step = _half(blocks, 80) * (scales & 15).astype(np.float32)
    low = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    out: F32 = step[:, :, None] * codes - low[:, :, None]
    return out.reshape(n, 256)


def _q3_k(blocks: U8) -> F32:
    """32 bytes of third bits (clear: minus 4), 64 bytes of four low codes, 16 scales of 6 bits in 12 bytes, d."""
    n = len(blocks)
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (low | high << 4).astype(np.float32) - 32
    third = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little").reshape(n, 2, 4, 32)
    codes = _pairs(blocks[:, 32:96].reshape(n, 2, 32), 2) | third << 2
    step = _half(blocks, 108) * scales
    out: F32 = step[:, :, None] * (codes.reshape(n, 16, 16).astype(np.float32) - 4)
    return out.reshape(n, 256)


def _scales_and_minima(packed: U8) -> tuple[F32, F32]:
    """The 8 scales and 8 minima of 6 bits in 12 bytes: [N, 8] each."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _with_minima(blocks: U8, codes: U8) -> F32:
    """Codes [N, 8, 32] with d, dmin and 12 bytes of scales at the front of the block."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    step, low = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    out: F32 = step[:, :, None] * codes.astype(np.float32) - low[:, :, None]
    return out.reshape(len(blocks), 256)


def _q4_k(blocks: U8) -> F32:
    """d, dmin, 12 bytes of scales and minima, 4 times 32 bytes: 32 low, then 32 high nibbles."""
    codes = blocks[:, 16:].reshape(-1, 4, 32)
    return _with_minima(blocks, _pairs(codes, 4).reshape(-1, 8, 32))


def _q5_k(blocks: U8) -> F32:
    """As q4_k; bit i of 32 bytes before the nibbles is the fifth bit of the i-th run of 32."""
    codes = _pairs(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    fifth = np.unpackbits(blocks[:, None, 16:48], axis=1, bitorder="little")
    return _with_minima(blocks, codes | fifth << np.uint8(4))


def _q6_k(blocks: U8) -> F32:
    """128 bytes of low nibbles, 64 bytes of four upper pairs, 16 int8 scales, d: d scale (q - 32)."""
    n = len(blocks)
    packed = blocks[:, :128].reshape(n, 2, 64)
    low = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(n, 2, 4, 32)
    high = _pairs(blocks[:, 128:192].reshape(n, 2, 32), 2)
    codes = (low | high << 4).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    step = _half(blocks, 208) * scales
    out: F32 = step[:, :, None] * codes.reshape(n, 16, 16)
    return out.reshape(n, 256)


DECODERS: dict[str, Callable[[U8], F32]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
"""Type -> decoder; its keys are keys of BLOCKS."""
