"""`--quantization` for torch: matrices in the codes of a scheme, by the rounding that native panels are packed with."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.matrix_format import MatrixFormat, Scheme
from penstock.core.panels import takes
from penstock.ops.stored import Array, Rows, StoredMatrix, Weight
from penstock.quant.reference import quantised


class Rounded(StoredMatrix):
    """What `quant.reference.quantised` makes of a matrix. Codes of 4 bits have 8 added, so that two fit a byte."""

    def __init__(self, weight: Weight, scheme: Scheme) -> None:
        form = scheme.format
        if scheme.weight_bits == 4:
            form = MatrixFormat("uint", 4, form.scales, offset=8)
        super().__init__(form, (weight.shape[0], weight.shape[1]), weight.dtype, None)
        self._rounded = quantised(weight, scheme)

    def _codes(self, rows: Rows) -> Array:
        codes = self._rounded.codes[rows]
        return (codes + np.int8(8)).view(np.uint8) if self.format.offset else codes

    def _scales(self, rows: Rows) -> tuple[Array, ...]:
        return (self._rounded.scales[rows].reshape(-1, 1) if not self.format.group else self._rounded.scales[rows],)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self._rounded.codes, self._rounded.scales

    def fault(self) -> str | None:
        return None


def under(scheme: Scheme, weight: Weight) -> Any:
    """A matrix as a scheme rounds it; what is no matrix, and codes that are what it rounds to already, as they are."""
    if not scheme.weight_bits or weight.ndim != 2:
        return weight
    if isinstance(weight, StoredMatrix) and takes(scheme, weight.format, weight.shape[1]):
        return weight
    return Rounded(weight, scheme)
