"""Rounding weights and rows to few bits, in numpy: what the native formats stand for.

This is the oracle of the native products (`csrc/include/penstock.h`) and the way to measure what a scheme costs without
them. Shape letters: T rows, N outputs and K inputs of a matrix, G groups of inputs.

Rules. int8, one scale per output: scale = max |w| / 127 as float32, code = w / scale rounded to the nearest, ties to
even, cut to -127 ... 127; or the same with one half per `group` inputs. int4, one half scale per `group` inputs: see
`int4_groups`. Rows, 8 bits: scale = max |x| / 127 of a block of 32 neighbours, or of a group of the weights where that
is 64 or 128. A scale of zero gives zeros.
Source of 8 bits: Dettmers et al., LLM.int8(), arXiv 2208.07339, section 2.1; groups: Frantar et al., GPTQ, arXiv
2210.17323, section 5 ("grouping"); blocks of 32 in rows: `block_q8_0` of github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.matrix_format import MatrixFormat, Scheme
from penstock.core.panels import PANEL_ROWS, panels_of, takes
from penstock.ops.ref.product import product, rows_as_float32
from penstock.ops.stored import StoredMatrix, Weight

I8 = npt.NDArray[np.int8]
_CHUNK_ELEMENTS = 1 << 20


def int8_outputs(w: F32) -> tuple[I8, F32]:
    """w [N, K] -> codes [N, K] in -127 ... 127 and scales [N]."""
    scale: F32 = np.abs(w).max(axis=1) / np.float32(127)
    codes = np.clip(np.rint(_divided(w, scale[:, None])), -127, 127)
    return codes.astype(np.int8), scale


def int8_groups(w: F32, group: int) -> tuple[I8, npt.NDArray[np.float16]]:
    """w [N, K] -> codes [N, K] in -127 ... 127 and scales [N, G]; the last group may be short."""
    grouped = _in_groups(w, group)
    scale = _half(np.abs(grouped).max(axis=2, keepdims=True) / np.float32(127))
    codes = np.clip(np.rint(_divided(grouped, scale.astype(np.float32))), -127, 127)
    return codes.astype(np.int8).reshape(len(w), -1)[:, : w.shape[1]], scale[:, :, 0]


def int4_groups(w: F32, group: int) -> tuple[I8, npt.NDArray[np.float16]]:
    """w [N, K] -> codes [N, K] in -8 ... 7 and scales [N, G]; the last group may be short.

    The number of largest magnitude (the first of equals) becomes -8: scale = -w / 8, rounded to a half, so it may be
    negative, and all sixteen codes are used. Codes are divided by the rounded scale, nearest, ties to even.
    """
    grouped = _in_groups(w, group)
    largest: F32 = np.take_along_axis(grouped, np.argmax(np.abs(grouped), axis=2)[:, :, None], axis=2)
    scale = _half(largest / np.float32(-8))
    codes = np.clip(np.rint(_divided(grouped, scale.astype(np.float32))), -8, 7)
    return codes.astype(np.int8).reshape(len(w), -1)[:, : w.shape[1]], scale[:, :, 0]


def _in_groups(w: F32, group: int) -> F32:
    """w [N, K] -> [N, G, group], zeros behind the last."""
    return np.pad(w, ((0, 0), (0, -w.shape[1] % group))).reshape(len(w), -1, group)


def _half(x: F32) -> npt.NDArray[np.float16]:
    """The nearest half; what is too large becomes the largest one, not infinity."""
    most = np.float32(np.finfo(np.float16).max)
    return np.clip(x, -most, most).astype(np.float16)


def _divided(w: F32, scale: F32) -> F32:
    """w / scale, and zero where the scale is zero."""
    out: F32 = np.divide(w, scale, out=np.zeros_like(w), where=np.broadcast_to(scale != 0, w.shape))
    return out


@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix [N, K] in few bits: codes [N, K], scales [N] or [N, G]."""

    codes: I8
    scales: npt.NDArray[Any]
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def values(self, first: int = 0, last: int | None = None) -> F32:
        """What rows `first` to `last` stand for, float32."""
        codes = self.codes[first:last].astype(np.float32)
        scales = self.scales[first:last].astype(np.float32)
        wide = np.repeat(scales, self.group, axis=1)[:, : codes.shape[1]] if self.group else scales[:, None]
        out: F32 = codes * wide
        return out


def quantised(weight: Weight, scheme: Scheme) -> RoundedMatrix:
    """A matrix [N, K] in the codes of a scheme other than `none`."""
    n, k = weight.shape
    codes = np.empty((n, k), np.int8)
    scales = np.empty((n, -(-k // scheme.group)), np.float16) if scheme.group else np.empty(n, np.float32)
    step = max(1, _CHUNK_ELEMENTS // max(1, k))
    for lo in range(0, n, step):
        part = rows_as_float32(weight, lo, lo + step)
        if not scheme.group:
            found: tuple[I8, npt.NDArray[Any]] = int8_outputs(part)
        else:
            found = (int8_groups if scheme.weight_bits == 8 else int4_groups)(part, scheme.group)
        codes[lo : lo + step], scales[lo : lo + step] = found
    return RoundedMatrix(codes, scales, scheme.group)


def rounded_rows(x: F32, block: int, order: npt.NDArray[np.int32] | None = None) -> F32:
    """x [T, K] with each block of a row rounded to 8 bits and back. NaN and infinity spoil their own block, whole.

    `order`: [K] the group of every input, if groups are no runs: blocks are then of inputs in the order of groups.
    """
    if order is not None:
        inputs = np.argsort(order, kind="stable")
        rows = np.empty_like(x)
        rows[:, inputs] = rounded_rows(x[:, inputs], block)
        return rows
    t, k = x.shape
    padded = np.zeros((t, -(-k // block) * block), np.float32)
    padded[:, :k] = x
    blocks = padded.reshape(t, -1, block)
    scale: F32 = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    rounded: F32 = np.rint(_divided(blocks, scale)) * scale
    out: F32 = np.where(np.isfinite(scale), rounded, np.float32(np.nan))
    return out.reshape(t, -1)[:, :k]


class QuantisedLinear:
    """An entry for `linear` of an op table: the same product with weights, and rows, of few bits.

    Without a scheme, what is stored as codes stays so, and rows are rounded as native products with such codes do, or
    not if `row_bits` is 0. One matrix product for all rows, so it is not batch-invariant: it measures. Each matrix is
    rounded when it is first met, and kept as codes (one byte each).

    Args:
        kept: matrices that stay as they are.
    """

    def __init__(self, scheme: Scheme, kept: Collection[Weight] = (), row_bits: int = 8) -> None:
        self.scheme = scheme
        self._row_bits = scheme.row_bits if scheme.weight_bits else row_bits
        # The arrays are kept beside their ids: an id alone may be another array's by now.
        self._kept = {id(w): w for w in kept}
        self._codes: dict[int, tuple[Weight, RoundedMatrix]] = {}

    def met(self, weight: Weight) -> bool:
        """Whether this very matrix has been rounded."""
        return id(weight) in self._codes

    def __call__(self, x: F32, weight: Weight, bias: F32 | None = None) -> F32:
        """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]."""
        format = self._format_of(weight)
        if format is None:
            out = product(x, weight)
        else:
            panels = panels_of(format, weight.shape[1])
            block = panels.row_block if panels is not None and self._row_bits else 0
            order = weight.order if isinstance(weight, StoredMatrix) else None
            out = self._product(rounded_rows(x, block, order) if block else x, self._of(weight))
        return out if bias is None else out + bias

    def _format_of(self, weight: Weight) -> MatrixFormat | None:
        """Of its codes, rounded or stored; None for one that stays plain."""
        if id(weight) in self._kept:
            return None
        if self.scheme.weight_bits:
            return self.scheme.format
        return weight.format if isinstance(weight, StoredMatrix) else None

    def _of(self, weight: Weight) -> RoundedMatrix | StoredMatrix:
        stays = not self.scheme.weight_bits
        if isinstance(weight, StoredMatrix) and (stays or takes(self.scheme, weight.format, weight.shape[1])):
            return weight
        if id(weight) not in self._codes:
            self._codes[id(weight)] = weight, quantised(weight, self.scheme)
        return self._codes[id(weight)][1]

    @staticmethod
    def _product(x: F32, weight: RoundedMatrix | StoredMatrix) -> F32:
        n, k = weight.shape
        out = np.empty((len(x), n), np.float32)
        step = max(1, _CHUNK_ELEMENTS // max(1, k))
        for lo in range(0, n, step):
            np.matmul(x, weight.values(lo, lo + step).T, out=out[:, lo : lo + step])
        return out


def panels_bytes(shape: tuple[int, int], held: MatrixFormat) -> int:
    """About the bytes of a matrix in the panels that hold it, its rows padded; its own bytes where there are none."""
    panels = panels_of(held, shape[1])
    if held.is_plain:
        return held.num_bytes((-(-shape[0] // PANEL_ROWS) * PANEL_ROWS, shape[1]))
    return held.num_bytes(shape) if panels is None else panels.num_bytes(shape)
