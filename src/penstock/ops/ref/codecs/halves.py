"""Pages at half the bits: in the room of one token stand two, which share their scales.

A page of 8-bit keys holds twice as many keys of 4 bits, one of 4-bit values twice as many values of 2 bits, so pages of
both kinds come from one pool. Which are which is in no page: `ops.plan.GroupPlan.low`. Two tokens share scale and
minimum of each group of numbers (a whole head, where 8 bits have one scale), as in `packed`. Source: LeanKV, arXiv
2412.03131 (three levels of tokens; K8V4, K4V2, gone).
"""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.ops.plan import I32, Planes
from penstock.ops.ref.codecs.packed import pack, quantise_along, unpack
from penstock.ops.ref.storage import codec_of

BITS = {"int8": 4, "int4": 2}
"""Codec of whole pages -> bits of half ones."""


def store_halves(planes: Planes, name: str, pages: I32, x: F32) -> None:
    """x [2 S n, G, D] into the planes of `name` at pages [n], S slots each. Mutates: planes."""
    plane, (codec, scales) = planes[name], codec_of(planes, name)
    assert scales is not None, f"{codec} has no scales"
    n, size = len(pages), plane.shape[1]
    groups = scales.shape[-1] if codec == "int8" else scales.shape[-1] // 2
    pairs = x.reshape(n, size, 2, x.shape[1], groups, -1).transpose(0, 1, 3, 4, 2, 5)
    flat = pairs.reshape(*pairs.shape[:-2], -1)
    codes, scale, minimum = quantise_along(flat, -1, BITS[codec])
    packed = pack(codes.reshape(*codes.shape[:-2], -1), BITS[codec])
    plane[pages] = packed.view(plane.dtype)
    beside = np.concatenate([scale[..., 0], minimum[..., 0]], axis=-1)
    scales[pages] = np.ascontiguousarray(beside).view(scales.dtype)


def read_halves(planes: Planes, name: str, pages: I32) -> F32:
    """The inverse of `store_halves`, as far as there is one: [2 S n, G, D]."""
    plane, (codec, scales) = planes[name], codec_of(planes, name)
    assert scales is not None, f"{codec} has no scales"
    codes = unpack(np.ascontiguousarray(plane[pages]).view(np.uint8), BITS[codec])
    bounds = np.ascontiguousarray(scales[pages]).view(np.float16).astype(np.float32)
    scale, minimum = np.split(bounds[..., None], 2, axis=-2)
    split = codes.reshape(*codes.shape[:-1], scale.shape[-2], -1).astype(np.float32)
    flat = split * scale + minimum  # [n, S, G, groups, 2 * D / groups]
    pairs = flat.reshape(*flat.shape[:-1], 2, -1).transpose(0, 1, 4, 2, 3, 5)
    x: F32 = pairs.reshape(-1, pairs.shape[3], pairs.shape[4] * pairs.shape[5])
    return x
