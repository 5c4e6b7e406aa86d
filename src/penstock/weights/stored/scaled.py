"""Formats whose scales lie in a tensor of their own: codes and scales -> values, float32.

Exactness: a value is the float32 product of the exact value of the code and its scale, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.small_floats import E2M1, E4M3

U8 = npt.NDArray[np.uint8]
FP8_BLOCK = 128
"""Rows and columns that share a scale."""


def fp8(codes: U8, shape: tuple[int, ...], scales: F32, chunk: int) -> Iterator[F32]:
    """F8_E4M3 [R, C] with a scale per block of 128 x 128, scales [ceil(R/128), ceil(C/128)].

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2 (there called `weight_scale_inv`; it multiplies).
    """
    rows, columns = shape
    stored = codes.reshape(shape)
    step = max(1, chunk // max(columns, 1))
    for start in range(0, rows, step):
        part = stored[start : start + step]
        of_row = np.arange(start, start + len(part)) // FP8_BLOCK
        wide = np.repeat(scales[of_row], FP8_BLOCK, axis=1)[:, :columns]
        yield (E4M3[part] * wide).reshape(-1)


def mxfp4(codes: U8, scales: U8, chunk: int) -> Iterator[F32]:
    """Blocks of 32 elements: 16 bytes of two FP4 E2M1 (the lower half first) and one exponent of bias 127.

    Source: OCP Microscaling Formats 1.0, sections 5.3 and 6.3; exponent 255 is NaN.
    """
    stored, exponents = codes.reshape(-1, 16), scales.reshape(-1)
    step = max(1, chunk // 32)
    for start in range(0, len(stored), step):
        part = stored[start : start + step]
        power = exponents[start : start + step].astype(np.int32)
        values = E2M1[np.stack([part & 15, part >> 4], axis=2).reshape(-1, 32)]
        out: F32 = np.ldexp(values, (power - 127)[:, None])
        out[power == 255] = np.nan
        yield out.reshape(-1)


def int8(codes: U8, scales: F32, chunk: int) -> Iterator[F32]:
    """int8 with one scale for as many consecutive elements as there are elements per scale.

    Source: `quantize_q80` in export.py of github.com/karpathy/llama2.c.
    """
    stored = codes.view(np.int8).reshape(scales.size, -1)
    flat = scales.reshape(-1, 1)
    step = max(1, chunk // stored.shape[1])
    for start in range(0, len(stored), step):
        yield (stored[start : start + step] * flat[start : start + step]).reshape(-1)
