"""Ternary weights: two bits each (0: -1, 1: 0, 2: +1), four to a byte with the lowest bits first, one scale.

Exactness: a value is the scale, its negative, or zero. The code 3 stands for nothing; it becomes NaN, which is refused
by name where values are checked. Source: `scripts/export_checkpoint.py` of
github.com/adesgautam/esp32-llm; the weights of Ma et al., arXiv 2402.17764.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32

_UNITS = np.array([-1, 0, 1, np.nan], np.float32)
_QUARTERS = _UNITS[(np.arange(256)[:, None] >> np.array([0, 2, 4, 6])) & 3]
"""The four units of every byte."""


def ternary(codes: npt.NDArray[np.uint8], scale: F32, chunk: int) -> Iterator[F32]:
    """Codes [N] bytes, scale of one element -> 4N values in parts of about `chunk`."""
    step = max(1, chunk // 4)
    for start in range(0, len(codes), step):
        yield (_QUARTERS[codes[start : start + step]] * scale.reshape(())).reshape(-1)
