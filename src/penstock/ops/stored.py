"""A matrix that stays the codes and scales of its file: what products multiply with instead of an array."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, widen
from penstock.base.small_floats import E2M1, E4M3, e8m0
from penstock.core.matrix_format import MatrixFormat, Shared

Array = npt.NDArray[Any]
Rows = slice | npt.NDArray[np.int64]


class StoredMatrix(ABC):
    """A matrix [N, K] as its file stores it, mostly mapped. A subclass reads one published layout.

    What its parts mean is said by `format`. Parts come for runs of rows, so that nobody needs all of them at once.

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
    def _codes(self, rows: Rows) -> Array:
        """See `codes`; of stored rows."""

    @abstractmethod
    def _scales(self, rows: Rows) -> tuple[Array, ...]:
        """See `scales`; of stored rows."""

    def _zeros(self, rows: Rows) -> tuple[Array, ...]:
        """See `zeros`; of stored rows."""
        return ()

    @property
    @abstractmethod
    def arrays(self) -> tuple[Array, ...]:
        """What it consists of: views of files, as a rule."""

    @abstractmethod
    def fault(self) -> str | None:
        """What is wrong with the numbers beside the codes (NaN, infinity, what makes weights that are; groups that do
        not exist), as the end of a sentence; None if nothing is. Looks at all of them, in parts."""

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def rows(self, first: int, last: int) -> Self:
        """The matrix of rows first ... last - 1 alone, over the same memory."""
        assert 0 <= first < last <= self.shape[0], f"rows {first} to {last} of {self.shape[0]}"
        found = copy(self)
        found.shape = (last - first, self.shape[1])
        found._rows = np.arange(first, last) if self._rows is None else self._rows[first:last]
        return found

    @property
    def nbytes(self) -> int:
        return self.format.num_bytes(self.shape)

    def codes(self, first: int, last: int) -> Array:
        """Rows first ... last - 1: [n, K], uint8, or int8 of signed integers. Of a table the indices, of small floats
        their bits; zero points are not subtracted. Of a grid its blocks, [n, blocks of a row, bytes of one]."""
        return self._codes(self._span(first, last))

    def scales(self, first: int, last: int) -> tuple[Array, ...]:
        """One [n, G] for each of `format.scales`, G its blocks along a row, in its own type: float32, float16; bits of
        bfloat16 (uint16), e4m3 and e8m0 (uint8); integers as uint8 or int8. What rows share is repeated for each."""
        return self._scales(self._span(first, last))

    def zeros(self, first: int, last: int) -> tuple[Array, ...]:
        """The same for `format.zeros`; zero points, which may need a bit more than a code, are int32."""
        return self._zeros(self._span(first, last))

    def values(self, first: int = 0, last: int | None = None) -> F32:
        """Rows first ... last - 1 as float32, bit for bit what the format's own library decodes them to, where it
        defines that. NaN and infinity if scales are."""
        return self._values(self._span(first, self.shape[0] if last is None else min(last, self.shape[0])))

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> F32:
        """Some rows, in this order, perhaps some of them twice, as float32."""
        chosen = rows.astype(np.int64)
        return self._values(chosen if self._rows is None else self._rows[chosen])

    def _values(self, rows: Rows) -> F32:
        """(code - zero) * scale, or code * scale - zero. Layouts whose library computes otherwise say how."""
        codes = unpacked(self.format, self._codes(rows))
        scales = product_of(self.format.scales, self._scales(rows))
        zeros = product_of(self.format.zeros, self._zeros(rows)) if self.format.zeros else None
        as_values = self.format.zeros_are == "values"
        offset = np.float32(self.format.offset)
        if self.order is not None:
            codes -= offset if zeros is None else zeros[:, self.order]
            codes *= scales[:, self.order]
            return codes
        # Every group is a run of inputs, the last one may be short.
        per = self.format.group or self.shape[1]
        each = None if zeros is None else self.format.zeros[0].columns or self.shape[1]
        assert each in (None, per), "zeros lie where scales do"
        for g in range(scales.shape[1]):
            run = codes[:, g * per : (g + 1) * per]
            if not as_values:
                run -= offset if zeros is None else zeros[:, g, None]
            run *= scales[:, g, None]
            if as_values and zeros is not None:
                run -= zeros[:, g, None]
        return codes

    def _span(self, first: int, last: int) -> Rows:
        return slice(first, last) if self._rows is None else self._rows[first:last]


def unpacked(format: MatrixFormat, codes: Array) -> F32:
    """Codes as the numbers that scales multiply."""
    if format.code == "table":
        return np.array(format.table, np.float32)[codes]
    if format.code == "e2m1":
        return E2M1[codes]
    if format.code == "e4m3":
        return E4M3[codes]
    return codes.astype(np.float32)


def as_numbers(dtype: str, part: Array) -> F32:
    """Scales or zeros of a type of `core.matrix_format.SHARED_BITS`, as a `StoredMatrix` gives them, as float32."""
    if dtype == "bfloat16":
        return widen(part)
    if dtype == "e4m3":
        return E4M3[part]
    if dtype == "e8m0":
        return e8m0(part)
    return part.astype(np.float32)


def product_of(levels: Sequence[Shared], parts: Sequence[Array]) -> F32:
    """Scales (or zeros) times the scales of these, and so on, one for each group: [n, G]."""
    out = as_numbers(levels[0].dtype, parts[0])
    for level, part in zip(levels[1:], parts[1:], strict=True):
        wide = as_numbers(level.dtype, part)
        times = level.columns // levels[0].columns if level.columns else out.shape[1]
        out = np.repeat(wide, times, axis=1)[:, : out.shape[1]] * out
    return out


def row_numbers(rows: Rows) -> npt.NDArray[np.int64]:
    """The numbers of these rows, one by one."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def in_one_run(rows: Rows, columns: int) -> npt.NDArray[np.int64]:
    """Where the numbers of these rows are if row lies behind row: [n, columns]."""
    return row_numbers(rows)[:, None] * columns + np.arange(columns)


Weight: TypeAlias = Array | StoredMatrix
"""float32, float16, bfloat16 bits (uint16), or, of a matrix, codes."""


def alike(a: Weight, b: Weight) -> bool:
    """Whether both can be rows of one matrix: of one type; codes of one format, their inputs in the same order, their
    scales times the same number, where they have one that a whole matrix shares."""
    if isinstance(a, StoredMatrix) and isinstance(b, StoredMatrix):
        return a.format == b.format and same_order(a, b) and _whole_scale(a) == _whole_scale(b)
    return isinstance(a, StoredMatrix) == isinstance(b, StoredMatrix) and bool(a.dtype == b.dtype)


def same_order(a: Weight, b: Weight) -> bool:
    """Whether both take the inputs of a row in the same order."""
    one, other = (w.order if isinstance(w, StoredMatrix) else None for w in (a, b))
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _whole_scale(matrix: StoredMatrix) -> float | None:
    """What multiplies all scales of groups of a matrix, if one number does."""
    levels = matrix.format.scales
    if len(levels) < 2 or levels[-1].rows or levels[-1].columns:
        return None
    return float(as_numbers(levels[-1].dtype, matrix.scales(0, 1)[-1]).reshape(-1)[0])
