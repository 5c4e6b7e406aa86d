"""What formats share that keep codes, and zero points, in 32-bit words: a word holds 32 / bits of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.matrix_format import MatrixFormat
from penstock.families.checkpoint import Codes
from penstock.ops.stored import Rows, StoredMatrix

U32 = npt.NDArray[np.uint32]
_CHUNK_GROUPS = 1 << 20


class Tensors(NamedTuple):
    """The arrays of one matrix as they lie in the file: `words`, `scales` [G, N], `zeros` words [G, ceil(N b / 32)] and
    the group `order` int32 [K] of every input, each but the first two possibly None. `first_zero` is added to zeros."""

    words: U32
    scales: npt.NDArray[Any]
    zeros: U32 | None
    order: npt.NDArray[np.int32] | None
    first_zero: int


class WordMatrix(StoredMatrix):
    """A matrix whose scales and zero points lie [G, N]. A subclass says how codes lie in `words`.

    `places`: of every 32 / bits neighbours that share a word, which of its codes each is, the lowest bits being 0.
    """

    places: tuple[int, ...] = ()
    """Empty: in their order."""

    @classmethod
    @abstractmethod
    def laid_out(cls, words: U32, n: int, k: int) -> U32:
        """All words of a matrix [n, k] in the two axes of the file."""

    @classmethod
    def over(
        cls, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> WordMatrix:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: scales, zeros?, order?; numbers: first_zero."""
        scales, order = arrays["scales"], arrays.get("order")
        words = cls.laid_out(arrays["codes"], scales.shape[1], shape[1])
        tensors = Tensors(
            words, scales, arrays.get("zeros"), None if order is None else order.view("<i4"),
            int(codes.numbers["first_zero"]),
        )  # fmt: skip
        return cls(codes.format, shape, dtype, tensors, rows)

    def __init__(
        self, format: MatrixFormat, shape: tuple[int, int], dtype: np.dtype[Any], tensors: Tensors,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """`rows`: the matrix is these of what is stored."""
        super().__init__(format, shape, dtype, tensors.order if format.ordered else None, rows)
        self.tensors = tensors
        per = 32 // format.bits
        places = np.array(self.places or range(per), np.uint32)
        self._shifts = places * np.uint32(format.bits)
        self._mask = np.uint32((1 << format.bits) - 1)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return tuple(a for a in self.tensors[:4] if isinstance(a, np.ndarray))

    def along_outputs(self, words: U32, rows: Rows) -> npt.NDArray[np.uint32]:
        """Codes of these outputs, where neighbours in a word of `words` [M, ceil(N b / 32)] are outputs: [n, M]."""
        of = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        per = len(self._shifts)
        found: U32 = words.T[of // per] >> self._shifts[of % per, None] & self._mask
        return found

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        return (self.tensors.scales[:, rows].T,)

    def _zeros(self, rows: Rows) -> tuple[npt.NDArray[np.int32]]:
        return (self._zero_points(rows),)

    def _zero_points(self, rows: Rows) -> npt.NDArray[np.int32]:
        # The sum may need one bit more than a code has.
        assert self.tensors.zeros is not None
        return self.along_outputs(self.tensors.zeros, rows).astype(np.int32) + np.int32(self.tensors.first_zero)

    def fault(self) -> str | None:
        """What is wrong with the numbers beside the codes, as the end of a sentence; None if nothing is.

        Codes themselves are never wrong. Looks at all scales, zero points and groups, in parts.
        """
        t = self.tensors
        bits = t.scales.view(np.uint32 if t.scales.dtype == np.float32 else np.uint16)
        # The largest value is a scale times a difference of codes, which has a bit more than a code.
        most = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}[self.format.scales[0].dtype]
        if self.format.scales[0].dtype != "float16":
            most -= (self.format.bits + 1) * (1 << (7 if bits.dtype == np.uint16 else 23))
        sign = (1 << (8 * bits.itemsize - 1)) - 1
        if any((part & bits.dtype.type(sign)).max(initial=0) >= most for part in bits):
            return "has scales that are NaN or infinity, or make weights that are"
        groups, (n, k) = len(t.scales), self.shape
        if t.order is not None and not 0 <= int(t.order.min()) <= int(t.order.max()) < groups:
            return f"has inputs in groups {t.order.min()} to {t.order.max()} (g_idx), but scales for {groups} groups"
        runs = np.arange(k) // (self.format.group or k)
        if t.order is not None and not self.format.ordered and groups > 1 and not np.array_equal(t.order, runs):
            return "has inputs in an order of their own (g_idx); set desc_act in its quantization_config"
        if not self.format.zeros and t.zeros is not None and not self._is_centred(n):
            return "has zero points of asymmetric codes (qzeros); set sym false in its quantization_config"
        return None

    def _is_centred(self, n: int) -> bool:
        assert self.tensors.zeros is not None
        step = max(1, _CHUNK_GROUPS // len(self.tensors.zeros))
        spans = [self._span(lo, min(lo + step, n)) for lo in range(0, n, step)]
        return all((self._zero_points(span) == self.format.offset).all() for span in spans)
