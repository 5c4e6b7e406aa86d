"""BitNet's ternary matrices: four codes in a byte, or the floats of training rounded as they are read.

Packed: of N rows a byte of row r holds those of r, r + N/4, r + N/2 and r + 3N/4, the first in its lowest bits; a code
less one is -1, 0 or +1. W = code * scale, or code * (1 / scale). Trained: with m the mean of |W| (1e-5 at least), W is
round(W / m), cut to [-1, 1], times m, which is rounded to the type of the stored numbers. Source: `pack_weights` and
`WeightQuant` of integrations/bitnet.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, narrow, widen
from penstock.families.checkpoint import Codes
from penstock.families.quantization.bitnet import PER_BYTE
from penstock.ops.ref.product import as_float32
from penstock.ops.stored import Rows, StoredMatrix, as_numbers, row_numbers
from penstock.weights.stored.checks import scale_fault

_CHUNK = 1 << 20
_LEAST = 1e-5


class PackedTernary(StoredMatrix):
    """See the module."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: scales, one number; numbers: divides, bfloat16 (of that number)."""
        super().__init__(codes.format, shape, dtype, None, rows)
        self._packed = arrays["codes"].reshape(-1, shape[1])
        self._scale = arrays["scales"].reshape(1, 1)
        self._divides, self._bfloat16 = bool(codes.numbers["divides"]), bool(codes.numbers["bfloat16"])

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self._packed, self._scale

    def _codes(self, rows: Rows) -> npt.NDArray[np.uint8]:
        part, row = np.divmod(row_numbers(rows), len(self._packed))
        shift = (2 * part).astype(np.uint8)[:, None]
        out: npt.NDArray[np.uint8] = self._packed[row] >> shift & np.uint8(3)
        return out

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        one = self._scale
        if self._divides:
            with np.errstate(all="ignore"):  # a zero is refused by `fault`
                one = np.float32(1.0) / as_numbers("bfloat16" if self._bfloat16 else "float32", one)
        return (np.repeat(one, len(row_numbers(rows)), axis=0),)

    def fault(self) -> str | None:
        """See `StoredMatrix.fault`. Of the four codes one stands for nothing."""
        found = scale_fault(self, 1.0)
        step = max(1, _CHUNK // max(1, self.shape[1]))
        for first in range(0, 0 if found else len(self._packed), step):
            part = self._packed[first : first + step]
            if (part & part >> np.uint8(1) & np.uint8(0x55)).any():
                return f"holds codes of 3; {PER_BYTE} of 0, 1 or 2 are in a byte"
        return found


class TrainedTernary(StoredMatrix):
    """See the module."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. No parts."""
        super().__init__(codes.format, shape, dtype, None, rows)
        self._floats = arrays["codes"].reshape(-1, shape[1])

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return (self._floats,)

    @cached_property
    def _mean(self) -> np.float32:
        """Of all that is stored, not of chosen rows alone."""
        step = max(1, _CHUNK // max(1, self.shape[1]))
        parts = (as_float32(self._floats[n : n + step]) for n in range(0, len(self._floats), step))
        total = sum(float(np.abs(part).sum(dtype=np.float64)) for part in parts)
        return np.float32(max(total / self._floats.size, _LEAST))

    def _codes(self, rows: Rows) -> npt.NDArray[np.uint8]:
        by = np.float32(1.0) / self._mean
        found: F32 = np.rint(as_float32(self._floats[rows]) * by)
        out: npt.NDArray[np.uint8] = (np.clip(found, -1, 1) + np.float32(1.0)).astype(np.uint8)
        return out

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        one = np.float32(1.0) / (np.float32(1.0) / self._mean)
        if self._floats.dtype == np.uint16:
            one = widen(narrow(np.array([one], np.float32)))[0]
        elif self._floats.dtype == np.float16:
            one = np.float32(np.float16(one))
        return (np.full((len(row_numbers(rows)), 1), one, np.float32),)

    def fault(self) -> str | None:
        """See `StoredMatrix.fault`."""
        return None if np.isfinite(self._mean) else "holds NaN or infinity"
