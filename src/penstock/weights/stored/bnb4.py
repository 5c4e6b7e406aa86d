"""bitsandbytes, 4 bits (NF4, FP4): indices into a table of 16 values, two to a byte, the upper half first.

The matrix is one run of numbers, row after row, in blocks of mostly 64 with the largest value (absmax) of each: W[i] =
table[code] * absmax[i // block]. With double quantisation absmax is itself an index: nested_table[absmax] *
nested_absmax[j // nested block] + nested offset, rounded to float32 after each. Table and sizes are the file's own.
Exactness: bit for bit bitsandbytes in float32; it rounds that to the type the model had. If rows are no whole number of
blocks, groups go across rows: such a matrix is read as its values. Source: `QuantState` of functional.py and
`dequantize_4bit`, github.com/bitsandbytes-foundation/bitsandbytes; Dettmers et al., QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.families.checkpoint import Codes
from penstock.ops.stored import Rows, StoredMatrix, in_one_run
from penstock.weights.stored.checks import NO_SCALES

_CHUNK = 1 << 18


class TableMatrix(StoredMatrix):
    """See the module."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: absmax, table, nested_absmax?, nested_table?; numbers: block,
        nested_block, nested_offset."""
        super().__init__(codes.format, shape, dtype, None, rows)
        self._pairs: npt.NDArray[np.uint8] = arrays["codes"].view(np.uint8)
        self._table: F32 = arrays["table"]
        self._absmax = arrays["absmax"]
        self._nested: F32 | None = arrays.get("nested_absmax")
        self._nested_table: F32 | None = arrays.get("nested_table")
        self._block, self._nested_block = int(codes.numbers["block"]), int(codes.numbers["nested_block"])
        self._offset = np.float32(codes.numbers["nested_offset"])

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        found = (self._pairs, self._absmax, self._table, self._nested, self._nested_table)
        return tuple(a for a in found if a is not None)

    def _codes(self, rows: Rows) -> npt.NDArray[np.uint8]:
        at = in_one_run(rows, self.shape[1])
        pairs = self._pairs[at // 2]
        return np.where(at % 2 == 0, pairs >> 4, pairs & 15)

    def _largest(self, which: npt.NDArray[np.int64]) -> F32:
        """absmax of these blocks."""
        out: F32 = self._absmax[which]
        if self._nested is None or self._nested_table is None:
            return out
        out = self._nested_table[self._absmax[which]] * self._nested[which // self._nested_block]
        out += self._offset
        return out

    def _scales(self, rows: Rows) -> tuple[F32]:
        return (self._largest(in_one_run(rows, self.shape[1] // self._block)),)

    def _values(self, rows: Rows) -> F32:
        return self._table[self._codes(rows)] * self._largest(in_one_run(rows, self.shape[1]) // self._block)

    def fault(self) -> str | None:
        """See `StoredMatrix.fault`. Codes themselves are never wrong."""
        most = np.abs(self._table).max()
        with np.errstate(all="ignore"):
            for first in range(0, len(self._absmax), _CHUNK):
                which = np.arange(first, min(first + _CHUNK, len(self._absmax)))
                if not np.isfinite(self._largest(which) * most).all():
                    return NO_SCALES
        return None
