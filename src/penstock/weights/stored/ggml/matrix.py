"""A matrix of ggml's blocks as it is stored, and the values of blocks.

Exactness: a scale times a scale times a code has fewer than 24 bits in every type, so float32 has it exactly; only the
minimum that some types subtract rounds, once, as it does in ggml's own scalar code. Values equal those bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.families.checkpoint import Codes
from penstock.formats.ggml import GGML_FORMATS
from penstock.formats.tensor_ref import BLOCKS
from penstock.ops.stored import Rows, StoredMatrix, as_numbers
from penstock.weights.stored.ggml.fields import U8
from penstock.weights.stored.ggml.types import BLOCK_TYPES, GRID_TYPES

Array = npt.NDArray[Any]
_CHUNK_BLOCKS = 1 << 12
"""Looked at together: about as many as a cache holds."""
_SAFE = np.float32(2.0**120)
"""No number that multiplies a scale is so large that a scale below this becomes infinite."""
_SAFE_FACTOR = np.float32(2.0**100)
"""Of all blocks: a safe scale times this is not infinite either, if it is one of E4M3."""


class BlockMatrix(StoredMatrix):
    """Any of the types of `formats.ggml.GGML_FORMATS`."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, Array], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: factor? [1], which multiplies everything, of what is no grid."""
        super().__init__(codes.format, shape, dtype, None, rows)
        self._factor: F32 | None = arrays.get("factor")
        kind, data = codes.layout.upper(), arrays["codes"]
        numbers, size = BLOCKS[kind]
        self.kind, self._per = kind, shape[1] // numbers
        self._data = data.reshape(-1, self._per, size)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self._data,) if self._factor is None else (self._data, self._factor)

    def _blocks(self, rows: Rows) -> U8:
        return self._data[rows].reshape(-1, self._data.shape[2])

    def _codes(self, rows: Rows) -> Array:
        if self.format.code == "grid":
            return self._data[rows]
        blocks = self._blocks(rows)
        if len(blocks) <= _CHUNK_BLOCKS:
            return BLOCK_TYPES[self.kind].codes(blocks).reshape(-1, self.shape[1])
        out = np.empty((len(blocks), BLOCKS[self.kind][0]), np.int8 if self.format.code == "int" else np.uint8)
        for lo in range(0, len(blocks), _CHUNK_BLOCKS):
            out[lo : lo + _CHUNK_BLOCKS] = BLOCK_TYPES[self.kind].codes(blocks[lo : lo + _CHUNK_BLOCKS])
        return out.reshape(-1, self.shape[1])

    def _scales(self, rows: Rows) -> tuple[Array, ...]:
        parts = self._levels(BLOCK_TYPES[self.kind].scales(self._blocks(rows)) if self.kind in BLOCK_TYPES else ())
        return parts if self._factor is None else (*parts, np.broadcast_to(self._factor, (len(parts[0]), 1)))

    def _zeros(self, rows: Rows) -> tuple[Array, ...]:
        return self._levels(BLOCK_TYPES[self.kind].zeros(self._blocks(rows)) if self.kind in BLOCK_TYPES else ())

    def _levels(self, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        """[blocks, runs of one] -> [rows, runs of a row]."""
        return tuple(part.reshape(-1, self._per * part.shape[1]) for part in parts)

    def _values(self, rows: Rows) -> F32:
        if self._factor is not None:
            return super()._values(rows)
        return decoded_blocks(self.kind, self._blocks(rows)).reshape(-1, self.shape[1])

    def fault(self) -> str | None:
        if self._factor is not None and not np.abs(self._factor[0]) < _SAFE_FACTOR:
            return f"is multiplied by {self._factor[0]:.3g} (the scale beside it), which makes weights infinite"
        step = max(1, _CHUNK_BLOCKS // self._per)
        with np.errstate(all="ignore"):
            for lo in range(0, self.shape[0], step):
                blocks = self._blocks(self._span(lo, min(lo + step, self.shape[0])))
                suspects = blocks[~(np.abs(_floats(self.kind, blocks)) < _SAFE).all(axis=1)]
                if len(suspects) and not np.isfinite(decoded_blocks(self.kind, suspects)).all():
                    return "holds NaN or infinity"
        return None


def _floats(kind: str, blocks: U8) -> F32:
    """[N, any]: the scales of blocks that are floating-point numbers."""
    if kind in GRID_TYPES:
        return GRID_TYPES[kind].scale(blocks).astype(np.float32)
    format, type = GGML_FORMATS[kind], BLOCK_TYPES[kind]
    parts = [*zip(format.scales, type.scales(blocks), strict=True), *zip(format.zeros, type.zeros(blocks), strict=True)]
    return np.concatenate([as_numbers(s.dtype, p) for s, p in parts if "int" not in s.dtype], axis=1)


def decoded_blocks(kind: str, blocks: U8) -> F32:
    """The values of blocks [N, B] of a type: [N, K]. NaN and infinity if scales are."""
    if kind in GRID_TYPES:
        return GRID_TYPES[kind].values(blocks)
    codes = Codes(kind.lower(), GGML_FORMATS[kind])
    return _Narrow(codes, {"codes": blocks}, (len(blocks), BLOCKS[kind][0]), np.dtype(np.float32), None).values()


class _Narrow(BlockMatrix):
    """A matrix whose rows are one block each: groups are the same runs in all blocks, so few steps decode many."""

    def _values(self, rows: Rows) -> F32:
        return StoredMatrix._values(self, rows)
