"""Stored matrices made of random numbers in memory: one of every format that files have.

A value is worked out here element by element from the parts, independently of `StoredMatrix.values`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import narrow
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.ops.stored import Rows, StoredMatrix

Array = npt.NDArray[Any]
_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NF4 = tuple(float(np.float32(v)) for v in np.linspace(-1, 1, 16) ** 3)


def per(dtype: str, columns: int, rows: int = 1) -> Shared:
    return Shared(dtype, rows, columns)


_F16 = "float16"
FORMATS: dict[str, MatrixFormat] = {
    "Q8_0": MatrixFormat("int", 8, (per(_F16, 32),)),
    "Q4_0": MatrixFormat("uint", 4, (per(_F16, 32),), offset=8),
    "Q4_1": MatrixFormat("uint", 4, (per(_F16, 32),), (per(_F16, 32),), "values"),
    "Q5_0": MatrixFormat("uint", 5, (per(_F16, 32),), offset=16),
    "Q5_1": MatrixFormat("uint", 5, (per(_F16, 32),), (per(_F16, 32),), "values"),
    "Q2_K": MatrixFormat("uint", 2, (per("uint4", 16), per(_F16, 256)), (per("uint4", 16), per(_F16, 256)), "values"),
    "Q3_K": MatrixFormat("uint", 3, (per("int6", 16), per(_F16, 256)), offset=4),
    "Q4_K": MatrixFormat("uint", 4, (per("uint6", 32), per(_F16, 256)), (per("uint6", 32), per(_F16, 256)), "values"),
    "Q5_K": MatrixFormat("uint", 5, (per("uint6", 32), per(_F16, 256)), (per("uint6", 32), per(_F16, 256)), "values"),
    "Q6_K": MatrixFormat("uint", 6, (per("int8", 16), per(_F16, 256)), offset=32),
    "Q8_K": MatrixFormat("int", 8, (per("float32", 256),)),
    "IQ4_NL": MatrixFormat("table", 4, (per(_F16, 32),), table=_NL),
    "IQ4_XS": MatrixFormat("table", 4, (per("int6", 32), per(_F16, 256)), table=_NL),
    "TQ2_0": MatrixFormat("uint", 2, (per(_F16, 256),), offset=1),
    "MXFP4": MatrixFormat("e2m1", 4, (per("e8m0", 32),)),
    "NVFP4": MatrixFormat("e2m1", 4, (per("e4m3", 16), per("float32", 0, 0))),
    "NVFP4 of ggml": MatrixFormat("e2m1", 4, (per("e4m3", 16),)),
    "GPTQ": MatrixFormat("uint", 4, (per(_F16, 128),), (per("uint4", 128),)),
    "GPTQ symmetric": MatrixFormat("uint", 4, (per(_F16, 64),), offset=8),
    "GPTQ 2 bits": MatrixFormat("uint", 2, (per(_F16, 64),), (per("uint2", 64),)),
    "GPTQ 3 bits": MatrixFormat("uint", 3, (per(_F16, 32),), (per("uint3", 32),)),
    "GPTQ 8 bits": MatrixFormat("uint", 8, (per(_F16, 32),), (per("uint8", 32),)),
    "GPTQ act-order": MatrixFormat("uint", 4, (per(_F16, 32),), (per("uint4", 32),), ordered=True),
    "GPTQ groups of 512": MatrixFormat("uint", 4, (per(_F16, 512),), (per("uint4", 512),)),
    "GPTQ whole rows": MatrixFormat("uint", 4, (per(_F16, 0),), offset=8),
    "compressed-tensors int8": MatrixFormat("int", 8, (per("bfloat16", 0),)),
    "compressed-tensors int4": MatrixFormat("int", 4, (per("bfloat16", 128),), (per("int8", 128),)),
    "FP8 tensor": MatrixFormat("e4m3", 8, (per("float32", 0, 0),)),
    "FP8 row": MatrixFormat("e4m3", 8, (per("bfloat16", 0),)),
    "FP8 block": MatrixFormat("e4m3", 8, (per("float32", 128, 128),)),
    "bnb nf4": MatrixFormat("table", 4, (per("float32", 64),), table=_NF4),
    "bnb nf4 twice": MatrixFormat("table", 4, (per("float32", 64), per("float32", 256)), table=_NF4),
    "bnb int8": MatrixFormat("int", 8, (per("float32", 0),)),
    "HQQ": MatrixFormat("uint", 4, (per(_F16, 64),), (per(_F16, 64),)),
    "HQQ of bfloat16": MatrixFormat("uint", 4, (per("bfloat16", 64),), (per("bfloat16", 64),)),
}  # fmt: skip
"""What readers say of each: MatrixFormat of a matrix [N, K], K a multiple of 512."""


class InMemory(StoredMatrix):
    """Parts as arrays. `scales` and `zeros`: [N, G] each, whatever rows share."""

    def __init__(
        self, format: MatrixFormat, codes: Array, scales: tuple[Array, ...], zeros: tuple[Array, ...] = (),
        order: npt.NDArray[np.int32] | None = None, dtype: str = "float32",
    ) -> None:  # fmt: skip
        super().__init__(format, (codes.shape[0], codes.shape[1]), np.dtype(dtype), order)
        self._parts = codes, scales, zeros

    def _codes(self, rows: Rows) -> Array:
        found: Array = self._parts[0][rows]
        return found

    def _scales(self, rows: Rows) -> tuple[Array, ...]:
        return tuple(part[rows] for part in self._parts[1])

    def _zeros(self, rows: Rows) -> tuple[Array, ...]:
        return tuple(part[rows] for part in self._parts[2])

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self._parts[0], *self._parts[1], *self._parts[2])

    def fault(self) -> str | None:
        return None


def random_stored(name: str, n: int, k: int, seed: int = 0, dtype: str = "float32") -> InMemory:
    """A matrix [n, k] of one of `FORMATS`, with values of about 1."""
    format, rng = FORMATS[name], np.random.default_rng([seed, n, k])
    low = -(1 << format.bits - 1) if format.code == "int" else 0
    codes = rng.integers(low, low + (1 << format.bits), (n, k))
    if format.code == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    widest = {"int": 1 << format.bits, "uint": 1 << format.bits, "table": 100, "e2m1": 6, "e4m3": 448}[format.code]
    scales = _parts(rng, format.scales, n, k, 2.0 / widest)
    zeros: tuple[Array, ...] = ()
    if format.zeros and format.zeros_are == "codes" and format.zeros[0].dtype != _F16:
        zeros = (rng.integers(low, low + (1 << format.bits) + 1, scales[0].shape).astype(np.int32),)
    elif format.zeros:
        zeros = _parts(rng, format.zeros, n, k, 8.0 if format.zeros_are == "codes" else 1.0)
    order = None
    if format.ordered:
        order = rng.permutation(np.arange(k, dtype=np.int32) // format.group).astype(np.int32)
    return InMemory(format, codes.astype(np.int8 if low else np.uint8), scales, zeros, order, dtype)


def _parts(rng: np.random.Generator, levels: tuple[Shared, ...], n: int, k: int, size: float) -> tuple[Array, ...]:
    shapes = [(n, -(-k // level.columns) if level.columns else 1) for level in levels]
    if len(levels) == 2 and "int" in levels[0].dtype:
        bits = int(levels[0].dtype[-1])
        low = -(1 << bits - 1) if levels[0].dtype.startswith("int") else 0
        inner = rng.integers(low, low + (1 << bits), shapes[0])
        halves = (size / (1 << bits - 1) * rng.uniform(0.5, 1, shapes[1])).astype(np.float16)
        return inner.astype(np.int8 if low else np.uint8), halves
    sizes = [size, *(1.0 for _ in levels[1:])]
    return tuple(_floats(rng, *each) for each in zip(levels, shapes, sizes, strict=True))


def _floats(rng: np.random.Generator, level: Shared, shape: tuple[int, int], size: float) -> Array:
    values = (size * rng.uniform(0.5, 1, shape)).astype(np.float32)
    if not level.rows:
        values[:] = values[0]
    elif level.rows > 1:
        values = np.repeat(values[:: level.rows], level.rows, axis=0)[: shape[0]]
    if level.dtype == "e8m0":
        return rng.integers(122, 127, shape).astype(np.uint8)
    if level.dtype == "e4m3":
        return rng.integers(0x20, 0x50, shape).astype(np.uint8)
    if level.dtype == "bfloat16":
        return narrow(values)
    return values.astype(level.dtype)
