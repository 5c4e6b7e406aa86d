"""Codecs of keys and values on tensors: the numbers of `ops.ref.codecs`, bit for bit. Shapes are theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.core.kv_codec import group_size

Encoded = tuple[Tensor, Tensor | None]


class TorchCodec(NamedTuple):
    """See `core.kv_codec.KVCodec`."""

    encode: Callable[[Tensor], Encoded]
    decode: Callable[[Tensor, Tensor | None], Tensor]


def _number(dtype: torch.dtype) -> TorchCodec:
    return TorchCodec(lambda x: (x.to(dtype), None), lambda elements, _: elements.float())


def _encode_int8(x: Tensor) -> Encoded:
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(torch.isfinite(largest), largest / 127, torch.nan)
    whole = torch.round(x / scale).clamp(-127, 127)
    return torch.where(scale > 0, whole, 0.0).to(torch.int8), scale


def _decode_int8(elements: Tensor, scales: Tensor | None) -> Tensor:
    assert scales is not None, "int8 without its scales"
    return elements.float() * scales


def _shifts(bits: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., D] below 2^bits -> bytes [..., D * bits / 8], the first code in the lowest bits."""
    per = 8 // bits
    split = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per) << _shifts(bits, codes)
    return split.sum(dim=-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    codes = (packed[..., None] >> _shifts(bits, packed)) & ((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _quantise_along(x: Tensor, axis: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    steps = (1 << bits) - 1
    low, high = x.amin(dim=axis, keepdim=True), x.amax(dim=axis, keepdim=True)
    scale, minimum = ((high - low) / steps).half(), low.half()
    scale = torch.where(torch.isfinite(scale) & torch.isfinite(minimum), scale, torch.nan)
    wide = scale.float()
    whole = torch.round((x - minimum.float()) / wide).clamp(0, steps)
    return torch.where(wide > 0, whole, 0.0).to(torch.uint8), scale, minimum


def _by_token(bits: int) -> TorchCodec:
    def encode(x: Tensor) -> Encoded:
        group = group_size(x.shape[-1])
        codes, scale, minimum = _quantise_along(x.reshape(*x.shape[:-1], x.shape[-1] // group, group), -1, bits)
        return pack(codes.reshape(x.shape), bits), torch.cat([scale[..., 0], minimum[..., 0]], dim=-1)

    def decode(elements: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None, "codes without their scales"
        scale, minimum = scales.float()[..., None].chunk(2, dim=-2)
        codes = unpack(elements, bits)
        groups = scale.shape[-2]
        split = codes.reshape(*codes.shape[:-1], groups, codes.shape[-1] // groups).float()
        return (split * scale + minimum).reshape(codes.shape)

    return TorchCodec(encode, decode)


def _by_channel(bits: int) -> TorchCodec:
    def encode(x: Tensor) -> Encoded:
        codes, scale, minimum = _quantise_along(x, 1, bits)
        return pack(codes, bits), torch.cat([scale, minimum], dim=-1)

    def decode(elements: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None, "codes without their scales"
        scale, minimum = scales.float().chunk(2, dim=-1)
        return unpack(elements, bits).float() * scale + minimum

    return TorchCodec(encode, decode)


TORCH_CODECS = {
    "float32": _number(torch.float32), "float16": _number(torch.float16), "bfloat16": _number(torch.bfloat16),
    "int8": TorchCodec(_encode_int8, _decode_int8), "int4": _by_token(4), "int2": _by_token(2),
    "channel4": _by_channel(4), "channel2": _by_channel(2),
}  # fmt: skip
"""By the names of `core.kv_codec.KV_CODECS`."""
