"""Where one tensor's bytes lie. No tensor data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Element types by their safetensors name -> bits each. Known is not the same as loadable: `model.weights` decides."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """`nbytes` little-endian, row-major bytes at byte `offset` of the file `path`; `dtype` is a key of DTYPE_BITS."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def rows(self, start: int, stop: int) -> TensorRef:
        """Rows [start, stop) along dimension 0: shape [stop - start, *rest].

        Raises ValueError if there are no such rows, or if a row does not begin at a whole byte.
        """
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"{self.name} of shape {list(self.shape)} has no rows {start} to {stop}")
        row_bytes, rest = divmod(self.nbytes, self.shape[0]) if self.shape[0] else (0, 0)
        if rest:
            raise ValueError(f"a row of {self.name} is not a whole number of bytes")
        return replace(
            self,
            shape=(stop - start, *self.shape[1:]),
            offset=self.offset + start * row_bytes,
            nbytes=(stop - start) * row_bytes,
        )

    def row(self, index: int) -> TensorRef:
        """Row `index` along dimension 0, that dimension dropped: shape [*rest]. Raises ValueError as `rows`."""
        one = self.rows(index, index + 1)
        return replace(one, shape=one.shape[1:])
