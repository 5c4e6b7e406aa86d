"""bfloat16 as numpy knows it here: `uint16` holding the upper half of a float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]


def widen(x: npt.NDArray[Any]) -> F32:
    """uint16 bit patterns of bfloat16 -> float32, exact. Shapes: any."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(x: npt.NDArray[Any]) -> U16:
    """float32 -> bfloat16 bits, round to nearest even; NaN stays NaN. Shapes: any."""
    x32 = np.ascontiguousarray(x, dtype=np.float32)
    bits = x32.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    out = rounded.astype(np.uint16)
    nan = np.isnan(x32)
    if nan.any():
        out[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return out
