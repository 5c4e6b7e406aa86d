"""HQQ: codes of 8, 4, 3, 2 and 1 bits with zero points that are no whole numbers.

The matrix is seen as [groups, G] (axis 1: each group is a run of inputs) or [G, groups] (axis 0); a byte holds number r
of each of 8 / bits equal parts of the rows of that, the first part in its highest bits; 3-bit codes lie in the same way
ten to a 32-bit word, bits 27 to 29 first, the parts filled up with zeros; codes of 5 and 6 bits take a byte each. W =
(code - zero) * scale, rounded after each. Exactness: bit for bit HQQ with float32 as its compute type; with the usual
float16 it rounds the same two steps to that. Of axis 0 an input shares its scale with others far away, so such a matrix
is read as its values. Source: `bitpack.py` and `quantize.py` of github.com/mobiusml/hqq.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.families.checkpoint import Codes
from penstock.families.quantization.hqq import PER_UNIT
from penstock.ops.stored import Rows, StoredMatrix, as_numbers, in_one_run
from penstock.weights.stored.checks import NO_SCALES

_CHUNK = 1 << 18


class HqqMatrix(StoredMatrix):
    """See the module."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: scales, zeros; numbers: bits, group, axis, wide (of the table that
        is packed), bfloat16 (whether scales and zeros are)."""
        super().__init__(codes.format, shape, dtype, None, rows)
        numbers = codes.numbers
        self._bits, self._axis, self._wide = int(numbers["bits"]), int(numbers["axis"]), int(numbers["wide"])
        self._packed = arrays["codes"].view(np.uint32 if self._bits == 3 else np.uint8)
        self._shared = arrays["scales"].reshape(-1), arrays["zeros"].reshape(-1)
        self._type = "bfloat16" if numbers["bfloat16"] else "float32"

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self._packed, *self._shared

    def _codes(self, rows: Rows) -> npt.NDArray[np.uint8]:
        row, column = np.divmod(in_one_run(rows, self.shape[1]), self._wide)
        step, per = len(self._packed) // self._wide, PER_UNIT[self._bits]
        part, row = np.divmod(row, step)
        bits = 8 if per == 1 else self._bits
        shift = ((per - 1 - part) * bits).astype(self._packed.dtype)
        mask = self._packed.dtype.type((1 << bits) - 1)
        out: npt.NDArray[np.uint8] = (self._packed[row * self._wide + column] >> shift & mask).astype(np.uint8)
        return out

    def _of_groups(self, rows: Rows, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What the groups of these rows have: [n, G]."""
        out: npt.NDArray[Any] = part[in_one_run(rows, self.shape[1] // self._wide)]
        return out

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        return (self._of_groups(rows, self._shared[0]),)

    def _zeros(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        return (self._of_groups(rows, self._shared[1]),)

    def _values(self, rows: Rows) -> F32:
        at = in_one_run(rows, self.shape[1])
        group = at // self._wide if self._axis else at % self._wide
        scale, zero = (as_numbers(self._type, part)[group] for part in self._shared)
        return (self._codes(rows).astype(np.float32) - zero) * scale

    def fault(self) -> str | None:
        """See `StoredMatrix.fault`. Codes themselves are never wrong."""
        with np.errstate(all="ignore"):
            for first in range(0, len(self._shared[0]), _CHUNK):
                scale, zero = (as_numbers(self._type, part[first : first + _CHUNK]) for part in self._shared)
                if not np.isfinite((np.abs(zero) + np.float32(1 << self._bits)) * scale).all():
                    return NO_SCALES
        return None
