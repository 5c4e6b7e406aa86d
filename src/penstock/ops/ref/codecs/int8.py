"""Numbers of 8 bits: a head of a token stands for its scale times them. Source: ZeroQuant, arXiv 2206.01861."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32


def quantise(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """x [..., D] in 8 bits and one scale [..., 1] per vector: max |x| / 127, to the nearest, ties to even.

    The scale is 0 if all of a vector is 0, and NaN if one number of it is not finite, so that what is read back is no
    number either. Source: ZeroQuant, arXiv 2206.01861, section 4.1 (token-wise).
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)
    scale: F32 = largest / np.float32(127)
    scale[~np.isfinite(largest)] = np.nan
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # The quotient is beyond 127 where the scale is so small that it has lost digits.
        whole = np.clip(np.rint(x / scale), -127, 127)
    return np.where(scale > 0, whole, np.float32(0)).astype(np.int8), scale


class Int8:
    """See `quantise`."""

    def encode(self, x: F32) -> tuple[npt.NDArray[np.int8], F32]:
        return quantise(x)

    def decode(self, elements: npt.NDArray[Any], scales: npt.NDArray[Any] | None) -> F32:
        assert scales is not None, "int8 without its scales"
        x: F32 = elements.astype(np.float32)
        x *= scales
        return x


INT8 = Int8()
