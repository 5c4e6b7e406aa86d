"""FP4 (E2M1), two to a byte, the lower half first: NVFP4 (an E4M3 scale per 16 inputs and one float32) and MXFP4 (an
E8M0 exponent per 32 inputs).

NVFP4 of ModelOpt multiplies the scale of a group by that of the matrix (`weight_scale_2`), compressed-tensors divides
it (`weight_global_scale`, the reciprocal); the result is rounded to float32, then its product with the code is. Of
MXFP4 every value is exact; exponent 255 is NaN. `scales` gives the factor of the matrix, of compressed-tensors
therefore its reciprocal, rounded; `values` divides as the library does. Source: OCP Microscaling Formats 1.0, sections
5.3 and 6.3; `nvfp4_tensor.py` of NVIDIA's Model Optimizer; `nvfp4` of github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.small_floats import E2M1
from penstock.families.checkpoint import Codes
from penstock.ops.stored import Rows, StoredMatrix, as_numbers
from penstock.weights.stored.checks import NO_SCALES, scale_fault

U8 = npt.NDArray[np.uint8]


class Fp4Matrix(StoredMatrix):
    """See the module."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: scales [.., K / group], whole? of one number; numbers: divides."""
        super().__init__(codes.format, shape, dtype, None, rows)
        self._pairs: U8 = arrays["codes"].view(np.uint8).reshape(-1, shape[1] // 2)
        self._groups = arrays["scales"].reshape(len(self._pairs), -1)
        self._whole: F32 | None = arrays["whole"].reshape(1) if "whole" in arrays else None
        self._divides = bool(codes.numbers["divides"])

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return tuple(a for a in (self._pairs, self._groups, self._whole) if a is not None)

    def _codes(self, rows: Rows) -> U8:
        pairs = self._pairs[rows]
        return np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(pairs), -1)

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any], ...]:
        groups = self._groups[rows]
        if self._whole is None:
            return (groups,)
        factor = np.float32(1) / self._whole if self._divides else self._whole
        return groups, np.broadcast_to(factor, (len(groups), 1))

    def _values(self, rows: Rows) -> F32:
        scales = as_numbers(self.format.scales[0].dtype, self._groups[rows])
        if self._whole is not None:
            scales = scales / self._whole if self._divides else scales * self._whole
        values = E2M1[self._codes(rows)].reshape(*scales.shape, -1)
        return (values * scales[:, :, None]).reshape(len(scales), -1)

    def fault(self) -> str | None:
        """See `StoredMatrix.fault`. Codes themselves are never wrong."""
        if self._whole is not None and (
            not np.isfinite(self._whole).all() or (self._divides and not self._whole.all())
        ):
            return NO_SCALES
        return scale_fault(self, 6.0)
