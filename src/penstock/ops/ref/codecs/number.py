"""Types that models compute with: numbers as they are, rounded to the type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, narrow
from penstock.ops.ref.product import as_float32


def to_storage(x: F32, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """x rounded to a plane's dtype. float16 turns what is too large into infinity. Shapes: any."""
    if dtype == np.uint16:
        return narrow(x)
    with np.errstate(over="ignore"):
        return x.astype(dtype, copy=False)


@dataclass(frozen=True)
class Number:
    """A codec without scales; `dtype` as numpy has it (uint16: bits of a bfloat16)."""

    dtype: np.dtype[Any]

    def encode(self, x: F32) -> tuple[npt.NDArray[Any], None]:
        return to_storage(x, self.dtype), None

    def decode(self, elements: npt.NDArray[Any], scales: npt.NDArray[Any] | None) -> F32:
        return as_float32(elements)


FLOAT32, FLOAT16, BFLOAT16 = (Number(np.dtype(name)) for name in (np.float32, np.float16, np.uint16))
