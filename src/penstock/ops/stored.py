"""A matrix that stays the codes and scales of its file: what products multiply with instead of an array."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, widen
from penstock.core.matrix_format import MatrixFormat

Rows = slice | npt.NDArray[np.int64]


class StoredMatrix(ABC):
    """A matrix [N, K] as its file stores it, mostly mapped. A subclass reads one published layout.

    Attributes:
        dtype: what plain weights around it are held in (bfloat16: uint16), for those who choose how to compute.
        order: [K] the group of every input, where the format is `ordered`; else None: groups are runs.
    """

    ndim = 2

    def __init__(
        self, format: MatrixFormat, shape: tuple[int, int], dtype: np.dtype[Any], order: npt.NDArray[np.int32] | None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """`rows`: it consists of these rows of what is stored, which has all of them in their order if None."""
        self.format, self.shape, self.dtype, self.order = format, shape, dtype, order
        self._rows = rows

    @abstractmethod
    def _codes(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """[n, K] of stored rows."""

    @abstractmethod
    def _scales(self, rows: Rows) -> npt.NDArray[Any]:
        """[n, G] of stored rows, float32, float16 or bfloat16 bits."""

    @abstractmethod
    def _zeros(self, rows: Rows) -> npt.NDArray[np.int32]:
        """[n, G] zero points of stored rows."""

    @property
    @abstractmethod
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """What it consists of: views of files, as a rule."""

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        return self.format.num_bytes(self.shape)

    def codes(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """[last - first, K], zero points not subtracted."""
        return self._codes(self._span(first, last))

    def scales(self, first: int, last: int) -> npt.NDArray[Any]:
        """[last - first, G] in the type that they are stored in."""
        return self._scales(self._span(first, last))

    def values(self, first: int = 0, last: int | None = None) -> F32:
        """Rows first ... last - 1 as float32: (code - zero) * scale, rounded once. NaN and infinity if scales are."""
        rows = self._span(first, self.shape[0] if last is None else min(last, self.shape[0]))
        codes = self._codes(rows).astype(np.float32)
        scales = self._scales(rows)
        scales = widen(scales) if scales.dtype == np.uint16 else scales.astype(np.float32)
        zeros = self._zeros(rows).astype(np.float32) if self.format.zeros else None
        if self.order is not None:
            codes -= np.float32(self.format.offset) if zeros is None else zeros[:, self.order]
            codes *= scales[:, self.order]
            return codes
        # Every group is a run of inputs, the last one may be short.
        per = self.format.group or self.shape[1]
        for g in range(scales.shape[1]):
            run = codes[:, g * per : (g + 1) * per]
            run -= np.float32(self.format.offset) if zeros is None else zeros[:, g, None]
            run *= scales[:, g, None]
        return codes

    def _span(self, first: int, last: int) -> Rows:
        return slice(first, last) if self._rows is None else self._rows[first:last]


Weight: TypeAlias = npt.NDArray[Any] | StoredMatrix
"""float32, float16, bfloat16 bits (uint16), or, of a matrix, codes."""


def alike(a: Weight, b: Weight) -> bool:
    """Whether both can be rows of one matrix: of one type; codes of one format, their inputs in the same order."""
    if isinstance(a, StoredMatrix) and isinstance(b, StoredMatrix):
        same = a.order is b.order or (a.order is not None and b.order is not None and np.array_equal(a.order, b.order))
        return a.format == b.format and same
    return isinstance(a, StoredMatrix) == isinstance(b, StoredMatrix) and bool(a.dtype == b.dtype)
