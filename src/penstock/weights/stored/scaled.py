"""Formats whose scales lie in a tensor of their own: codes and scales -> values, float32.

Exactness: a value is the float32 product of the exact value of the code and its scale, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32

U8 = npt.NDArray[np.uint8]


def int8(codes: U8, scales: F32, chunk: int) -> Iterator[F32]:
    """int8 with one scale for as many consecutive elements as there are elements per scale.

    Source: `quantize_q80` in export.py of github.com/karpathy/llama2.c.
    """
    stored = codes.view(np.int8).reshape(scales.size, -1)
    flat = scales.reshape(-1, 1)
    step = max(1, chunk // stored.shape[1])
    for start in range(0, len(stored), step):
        yield (stored[start : start + step] * flat[start : start + step]).reshape(-1)
