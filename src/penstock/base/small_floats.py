"""Floating-point numbers of 8 and 4 bits, by their codes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32


def _e4m3() -> F32:
    """All 256 values of F8_E4M3 (sign, 4 exponent bits of bias 7, 3 of mantissa; no infinity; 0x7F is NaN)."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3()
"""Source: Micikevicius et al., arXiv 2209.05433, section 3."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Source: OCP Microscaling Formats 1.0, section 5.3.3."""


def e8m0(codes: npt.NDArray[np.uint8]) -> F32:
    """2^(code - 127); 255 is NaN. Source: OCP Microscaling Formats 1.0, section 5.4.1."""
    out: F32 = np.ldexp(np.float32(1), codes.astype(np.int32) - 127)
    out[codes == 255] = np.nan
    return out
