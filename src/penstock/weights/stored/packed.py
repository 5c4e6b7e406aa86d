"""compressed-tensors, "pack-quantized": words [N, ceil(K b / 32)] of codes, neighbours in a word being inputs.

A code is stored plus 2^(b-1), and a zero point too, so both are unsigned: W[n, k] = (code - zero) * scale[n, g]. Zero
points lie in words [ceil(N b / 32), G] whose neighbours are outputs; early files have them as int8 [N, G], signed. In
newer files a row is one run of bits; before, a word held 32 // b codes and the rest of it nothing, which is the same
for 2, 4 and 8 bits. Exactness: code less zero point times scale, rounded once to float32; the library rounds
the same product to the type of the scale. Source: `pack_quantized/helpers.py` of github.com/vllm-project/
compressed-tensors 0.20, and of github.com/neuralmagic/compressed-tensors before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.families.checkpoint import Codes
from penstock.formats.words import num_words
from penstock.ops.stored import Rows, StoredMatrix, row_numbers
from penstock.weights.stored.checks import order_fault, scale_fault
from penstock.weights.stored.words import U8, picked, unpacked


class PackedMatrix(StoredMatrix):
    """See the module."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: scales, zeros?, order?; numbers: dense."""
        order = arrays.get("order")
        self._order = None if order is None else order.view("<i4")
        super().__init__(codes.format, shape, dtype, self._order if codes.format.ordered else None, rows)
        self._dense = bool(codes.numbers["dense"])
        width = num_words(shape[1], codes.format.bits, self._dense)
        self._words = arrays["codes"].reshape(-1, width)
        scales = arrays["scales"]
        self._scale_rows = scales.reshape(len(scales) if scales.size > 1 else 1, -1)
        self._zero_words = arrays.get("zeros")

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        found = (self._words, self._scale_rows, self._zero_words, self._order)
        return tuple(a for a in found if a is not None)

    def _codes(self, rows: Rows) -> U8:
        return unpacked(self._words[rows], self.shape[1], self.format.bits, self._dense)

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        if self.format.scales[0].rows:
            return (self._scale_rows[rows],)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return (np.broadcast_to(self._scale_rows, (count, 1)),)

    def _zeros(self, rows: Rows) -> tuple[npt.NDArray[np.int32]]:
        zeros = self._zero_words
        assert zeros is not None
        if zeros.dtype == np.int8:
            return (zeros[rows].astype(np.int32) + np.int32(1 << self.format.bits - 1),)
        which = row_numbers(rows)
        return (picked(zeros.T, which, self.format.bits, self._dense).T.astype(np.int32),)

    def fault(self) -> str | None:
        """See `StoredMatrix.fault`. Codes themselves are never wrong."""
        groups = self._scale_rows.shape[1]
        zeros, half = self._zero_words, 1 << self.format.bits - 1
        if zeros is not None and zeros.dtype == np.int8 and not (-half <= zeros.min() <= zeros.max() < half):
            return f"has zero points (weight_zero_point) from {zeros.min()} to {zeros.max()}, but codes from {-half}"
        found = scale_fault(self, 2.0**self.format.bits)
        return found or order_fault(self, self._order, groups, "set actorder group in its quantization_config")
