"""Codes of one byte each, FP8 (E4M3) or int8, that lie [N, K] as their matrix does, and scales for blocks of it.

W[n, k] = code * scale of its block: of the matrix, the output, 128 x 128 (last blocks may be short), 32 inputs (MXFP8).
DeepSeek calls its scales `weight_scale_inv`; they multiply. Exactness: the product, rounded once to float32. The int8
of bitsandbytes has no scales but the largest value SCB of every output: (code * SCB) * (1 / 127), rounded after each,
as bitsandbytes does it. Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2; `naive_quantized/base.py` of github.com/
vllm-project/compressed-tensors; OCP Microscaling Formats 1.0; `int8_vectorwise_dequant` of github.com/
bitsandbytes-foundation/bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.families.checkpoint import Codes
from penstock.ops.stored import Rows, StoredMatrix, row_numbers
from penstock.weights.stored.checks import scale_fault

_CHUNK = 1 << 22
_PER_CODE = np.float32(7.874015718698502e-3)
"""1 / 127 as bitsandbytes writes it."""


class ByteMatrix(StoredMatrix):
    """See the module."""

    _most = 256.0
    """What a code less its zero point stays below, of integers."""

    def __init__(
        self, codes: Codes, arrays: Mapping[str, npt.NDArray[Any]], shape: tuple[int, int], dtype: np.dtype[Any],
        rows: npt.NDArray[np.int64] | None,
    ) -> None:  # fmt: skip
        """See `weights.stored.StoredLayout`. Parts: scales [R, C] of the format's blocks, zeros? of the same."""
        super().__init__(codes.format, shape, dtype, None, rows)
        stored = arrays["codes"].reshape(-1, shape[1])
        self._bytes = stored.view(np.int8) if codes.format.code == "int" else stored
        (shared,) = codes.format.scales
        blocks = -(-shape[1] // shared.columns) if shared.columns else 1
        self._blocks = arrays["scales"].reshape(-1, blocks)
        zeros = arrays.get("zeros")
        self._zero_blocks = None if zeros is None else zeros.reshape(-1, blocks)
        self._per = shared.rows or len(self._bytes)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return tuple(a for a in (self._bytes, self._blocks, self._zero_blocks) if a is not None)

    def _codes(self, rows: Rows) -> npt.NDArray[Any]:
        return self._bytes[rows]

    def _block_rows(self, rows: Rows) -> npt.NDArray[np.int64]:
        which = row_numbers(rows)
        return which // self._per

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        return (self._blocks[self._block_rows(rows)],)

    def _zeros(self, rows: Rows) -> tuple[npt.NDArray[np.int32]]:
        assert self._zero_blocks is not None
        return (self._zero_blocks[self._block_rows(rows)].astype(np.int32),)

    def fault(self) -> str | None:
        """See `StoredMatrix.fault`. Of E4M3 one code is NaN, so all codes are looked at."""
        is_int = self.format.code == "int"
        found = scale_fault(self, self._most if is_int else 448.0)
        if found or is_int:
            return found
        step = max(1, _CHUNK // max(1, self.shape[1]))
        for first in range(0, self.shape[0], step):
            part = self._codes(self._span(first, min(first + step, self.shape[0])))
            if ((part & np.uint8(0x7F)) == 0x7F).any():
                return "holds NaN or infinity"
        return None


class ScbMatrix(ByteMatrix):
    """The int8 of bitsandbytes. `scales` are SCB / 127, rounded; `values` are in the order of its own operations."""

    _most = 128.0 * 128.0  # the product comes before the division

    def _scales(self, rows: Rows) -> tuple[npt.NDArray[Any]]:
        (most,) = super()._scales(rows)
        return (most * _PER_CODE,)

    def _values(self, rows: Rows) -> F32:
        (most,) = super()._scales(rows)
        out: F32 = self._bytes[rows].astype(np.float32)
        out *= most
        out *= _PER_CODE
        return out
