"""Block type -> where its blocks keep codes and scales; of grids, their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.weights.stored.ggml import grids
from penstock.weights.stored.ggml import k_quants as k
from penstock.weights.stored.ggml.fields import U8, bits_of, fields, half, numbers

Array = npt.NDArray[Any]


class BlockType(NamedTuple):
    """Functions of blocks [N, B]. What they give means what `formats.ggml.GGML_FORMATS` says.

    `codes` -> [N, K]; `scales`, `zeros` -> one [N, runs] for each level, the innermost first.
    """

    codes: Callable[[U8], Array]
    scales: Callable[[U8], tuple[Array, ...]]
    zeros: Callable[[U8], tuple[Array, ...]] = lambda blocks: ()


class GridType(NamedTuple):
    """`values` -> [N, K]; `scale` -> [N, 1], the float16 of every block."""

    values: Callable[[U8], F32]
    scale: Callable[[U8], npt.NDArray[np.float16]]


def _front(blocks: U8) -> tuple[Array]:
    return (half(blocks, 0),)


def _less_second(blocks: U8) -> tuple[Array]:
    """A minimum that is added is a zero that is subtracted with the other sign."""
    return (-half(blocks, 2),)


def _nibbles(at: int) -> Callable[[U8], U8]:
    return lambda blocks: fields(blocks[:, at:], 4, 16)


def _one_zero(codes: U8) -> U8:
    """ggml's table of these floats has no negative zero."""
    codes[codes == 8] = 0
    return codes


def _five_bits(at: int) -> Callable[[U8], U8]:
    """Bit i of a u32 is the fifth bit of the i-th code."""

    def codes(blocks: U8) -> U8:
        out = bits_of(blocks[:, at : at + 4])
        out <<= np.uint8(4)
        out |= fields(blocks[:, at + 4 :], 4, 16)
        return out

    return codes


def _iq4_xs_scales(blocks: U8) -> tuple[Array, Array]:
    """Two high bits of eight scales in a u16, four low ones in four bytes."""
    high = fields(blocks[:, 2:4], 2, 1)
    low = fields(blocks[:, 4:8], 4, 1)
    return (low | high << np.uint8(4)).view(np.int8) - np.int8(32), half(blocks, 0)


def _unsigned(blocks: U8) -> tuple[U8]:
    """E4M3 without a sign. ggml overlooks the highest bit and takes NaN for zero; no file has either: all NaN here."""
    scales = blocks[:, :4]
    return (np.minimum(scales, np.uint8(0x7F)),)


BLOCK_TYPES: dict[str, BlockType] = {
    "Q1_0": BlockType(lambda b: bits_of(b[:, 2:]), _front),
    "Q2_0": BlockType(lambda b: fields(b[:, 2:], 2, 1), _front),
    "Q4_0": BlockType(_nibbles(2), _front),
    "Q4_1": BlockType(_nibbles(4), _front, _less_second),
    "Q5_0": BlockType(_five_bits(2), _front),
    "Q5_1": BlockType(_five_bits(4), _front, _less_second),
    "Q8_0": BlockType(lambda b: b[:, 2:].view(np.int8), _front),
    "Q2_K": BlockType(k.q2_k_codes, k.q2_k_scales, k.q2_k_zeros),
    "Q3_K": BlockType(k.q3_k_codes, k.q3_k_scales),
    "Q4_K": BlockType(k.q4_k_codes, k.q4_k_scales, k.q4_k_zeros),
    "Q5_K": BlockType(k.q5_k_codes, k.q4_k_scales, k.q4_k_zeros),
    "Q6_K": BlockType(k.q6_k_codes, k.q6_k_scales),
    "Q8_K": BlockType(lambda b: b[:, 4:260].view(np.int8), lambda b: (numbers(b, 0, 1, "<f4"),)),
    "IQ4_NL": BlockType(_nibbles(2), _front),
    "IQ4_XS": BlockType(_nibbles(8), _iq4_xs_scales),
    "TQ2_0": BlockType(lambda b: fields(b[:, :64], 2, 32), lambda b: (half(b, 64),)),
    "MXFP4": BlockType(lambda b: _one_zero(fields(b[:, 1:], 4, 16)), lambda b: (b[:, :1],)),
    "NVFP4": BlockType(lambda b: _one_zero(fields(b[:, 4:], 4, 8)), _unsigned),
}

GRID_TYPES: dict[str, GridType] = {
    "TQ1_0": GridType(grids.tq1_0, lambda b: half(b, 52)),
    "IQ1_S": GridType(grids.iq1_s, lambda b: half(b, 0)),
    "IQ1_M": GridType(grids.iq1_m, grids.iq1_m_scale),
    "IQ2_XXS": GridType(grids.iq2_xxs, lambda b: half(b, 0)),
    "IQ2_XS": GridType(grids.iq2_xs, lambda b: half(b, 0)),
    "IQ2_S": GridType(grids.iq2_s, lambda b: half(b, 0)),
    "IQ3_XXS": GridType(grids.iq3_xxs, lambda b: half(b, 0)),
    "IQ3_S": GridType(grids.iq3_s, lambda b: half(b, 0)),
}
