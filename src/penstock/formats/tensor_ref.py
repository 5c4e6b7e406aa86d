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
"""Element types by their safetensors name -> bits each. Known is not the same as loadable: `weights.load` decides."""

BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 36),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "Q8_K": (256, 292), "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36), "Q1_0": (128, 18), "Q2_0": (64, 18),
    "T2": (4, 1),
}  # fmt: skip
"""Types whose elements are coded together -> (elements, bytes) of a block; blocks lie along the last axis. T2: ternary,
four to a byte; the others by their ggml name.
Source: ggml-common.h of github.com/ggml-org/llama.cpp."""


def stored_bytes(dtype: str, count: int) -> int:
    """Bytes of `count` elements of a type of DTYPE_BITS or BLOCKS; a last part of a block counts whole."""
    if dtype in BLOCKS:
        elements, nbytes = BLOCKS[dtype]
        return -(-count // elements) * nbytes
    return -(-count * DTYPE_BITS[dtype] // 8)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """`nbytes` little-endian, row-major bytes at byte `offset` of the file `path`.

    `dtype` is a key of DTYPE_BITS or BLOCKS.
    """

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
