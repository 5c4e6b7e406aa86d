"""Numbers of 4 and 2 bits: how planes of bytes are packed, scaled and read.

x stands as code * scale + minimum with codes 0 ... 2^bits - 1; scale and minimum are float16. Source: FlexGen, arXiv
2303.06865, section 4.2 (asymmetric, group-wise).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.kv_codec import group_size

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]


def pack(codes: U8, bits: int) -> U8:
    """Codes [..., D] below 2^bits -> bytes [..., D * bits / 8], the first code in the lowest bits."""
    per = 8 // bits
    split = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per)
    packed: U8 = np.bitwise_or.reduce(split << np.arange(0, 8, bits, dtype=np.uint8), axis=-1)
    return packed


def unpack(packed: U8, bits: int) -> U8:
    """The inverse of `pack`."""
    codes: U8 = (packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def quantise_along(x: F32, axis: int, bits: int) -> tuple[U8, F16, F16]:
    """Codes of the shape of x; scale and minimum, which share it but for a 1 at `axis`: of all numbers along it.

    Codes are worked out with scale and minimum as they are stored. Equal numbers have scale 0. If one number is not
    finite, or too large for float16, the scale is NaN, so that what is read back is no number either.
    """
    steps = np.float32((1 << bits) - 1)
    with np.errstate(all="ignore"):
        low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
        scale, minimum = ((high - low) / steps).astype(np.float16), low.astype(np.float16)
        scale[~(np.isfinite(scale) & np.isfinite(minimum))] = np.nan
        wide = scale.astype(np.float32)
        whole = np.clip(np.rint((x - minimum.astype(np.float32)) / wide), 0, steps)
        codes = np.where(wide > 0, whole, np.float32(0)).astype(np.uint8)
    return codes, scale, minimum


def encode_tokens(x: F32, bits: int, group: int) -> tuple[U8, F16]:
    """x [..., D] -> bytes [..., D * bits / 8] and scales | minima [..., 2 D / group] of D / group runs of numbers."""
    codes, scale, minimum = quantise_along(x.reshape(*x.shape[:-1], x.shape[-1] // group, group), -1, bits)
    return pack(codes.reshape(x.shape), bits), np.concatenate([scale[..., 0], minimum[..., 0]], axis=-1)


def decode_tokens(packed: U8, bounds: F32, bits: int) -> F32:
    """The inverse of `encode_tokens`, as far as there is one: [..., D] from bytes and bounds as float32."""
    scale, minimum = np.split(bounds[..., None], 2, axis=-2)
    codes = unpack(packed, bits)
    groups = scale.shape[-2]
    split = codes.reshape(*codes.shape[:-1], groups, codes.shape[-1] // groups).astype(np.float32)
    return (split * scale + minimum).reshape(codes.shape)


def encode_channels(x: F32, bits: int) -> tuple[U8, F16]:
    """x [blocks, S, G, D] -> bytes [blocks, S, G, D * bits / 8] and scales | minima [blocks, 1, G, 2 D]: of every
    channel over the tokens of a block. Source: KIVI, arXiv 2402.02750, section 3.2."""
    codes, scale, minimum = quantise_along(x, 1, bits)
    return pack(codes, bits), np.concatenate([scale, minimum], axis=-1)


def decode_channels(packed: U8, bounds: F32, bits: int) -> F32:
    """The inverse of `encode_channels`, as far as there is one."""
    scale, minimum = np.split(bounds, 2, axis=-1)
    return unpack(packed, bits).astype(np.float32) * scale + minimum


@dataclass(frozen=True)
class GroupCodes:
    """By token: a scale and a minimum for every `group_size` numbers of a head."""

    bits: int

    def encode(self, x: F32) -> tuple[U8, F16]:
        return encode_tokens(x, self.bits, group_size(x.shape[-1]))

    def decode(self, elements: U8, scales: F16 | None) -> F32:
        assert scales is not None, "codes without their scales"
        return decode_tokens(elements, scales.astype(np.float32), self.bits)


@dataclass(frozen=True)
class ChannelCodes:
    """By block: a scale and a minimum for each channel of a head."""

    bits: int

    def encode(self, x: F32) -> tuple[U8, F16]:
        return encode_channels(x, self.bits)

    def decode(self, elements: U8, scales: F16 | None) -> F32:
        assert scales is not None, "codes without their scales"
        return decode_channels(elements, scales.astype(np.float32), self.bits)


INT4, INT2 = GroupCodes(4), GroupCodes(2)
CHANNEL4, CHANNEL2 = ChannelCodes(4), ChannelCodes(2)
