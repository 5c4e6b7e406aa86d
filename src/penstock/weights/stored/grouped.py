"""GPTQ and AWQ: scales and zero points lie [G, N], zero points in words whose neighbours are outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.families.checkpoint import Codes
from penstock.ops.stored import Rows, StoredMatrix, row_numbers
from penstock.weights.stored.checks import order_fault, scale_fault
from penstock.weights.stored.words import U8, U32, picked

_CHUNK_GROUPS = 1 << 20


class Tensors(NamedTuple):
    """The arrays of one matrix as they lie in the file: `words`, `scales` [G, N], `zeros` words [G, ceil(N b / 32)] and
    the group `order` int32 [K] of every input, each but the first two possibly None. `first_zero` is added to zeros."""

    words: U32
    scales: npt.NDArray[Any]
    zeros: U32 | None
    order: npt.NDArray[np.int32] | None
    first_zero: int


class GroupedMatrix(StoredMatrix):
    """A matrix whose scales and zero points lie [G, N]. A subclass says how codes lie in `words`.

    `places`: of every so many neighbouring outputs that share words, where in these each is. Empty: in their order.
    """

    places: tuple[int, ...] = ()

    @classmethod
    @abstractmethod
    def laid_out(cls, words: U32, n: int, k: int) -> U32:
        """All words of a matrix [n, k] in the two axes of the file."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: scales, zeros?, order?; numbers: first_zero."""
        scales, order = arrays["scales"], arrays.get("order")
        order = None if order is None else order.view("<i4")
        super().__init__(codes.format, shape, dtype, order if codes.format.ordered else None, rows)
        words = self.laid_out(arrays["codes"], scales.shape[1], shape[1])
        self.tensors = Tensors(words, scales, arrays.get("zeros"), order, int(codes.numbers["first_zero"]))

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return tuple(a for a in self.tensors[:4] if isinstance(a, np.ndarray))

    def along_outputs(self, words: U32, rows: Rows) -> U8:
        """Numbers of these outputs, where neighbours in a word of `words` [M, ceil(N b / 32)] are outputs: [n, M]."""
        which = row_numbers(rows)
        if self.places:
            per = len(self.places)
            which = which // per * per + np.array(self.places)[which % per]
        return picked(words, which, self.format.bits).T

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        return (self.tensors.scales[:, rows].T,)

    def _zeros(self, rows: Rows) -> tuple[npt.NDArray[np.int32]]:
        return (self._zero_points(rows),)

    def _zero_points(self, rows: Rows) -> npt.NDArray[np.int32]:
        # The sum may need one bit more than a code has.
        assert self.tensors.zeros is not None
        return self.along_outputs(self.tensors.zeros, rows).astype(np.int32) + np.int32(self.tensors.first_zero)

    def fault(self) -> str | None:
        """See `StoredMatrix.fault`. Codes themselves are never wrong."""
        t = self.tensors
        found = scale_fault(self, 2.0 ** (self.format.bits + 1))
        found = found or order_fault(self, t.order, len(t.scales), "set desc_act in its quantization_config")
        if not found and not self.format.zeros and t.zeros is not None and not self._is_centred(self.shape[0]):
            return "has zero points of asymmetric codes (qzeros); set sym false in its quantization_config"
        return found

    def _is_centred(self, n: int) -> bool:
        assert self.tensors.zeros is not None
        step = max(1, _CHUNK_GROUPS // len(self.tensors.zeros))
        spans = [self._span(lo, min(lo + step, n)) for lo in range(0, n, step)]
        return all((self._zero_points(span) == self.format.offset).all() for span in spans)
