"""Probabilities as whole numbers: what sampling and log-probabilities add up.

A token weighs 2^((logit - peak) * scale), rounded to a multiple of 2^-42 of the likeliest's weight and kept as that
many units. Sums of whole numbers are exact, so no order of addition can show in a result. The steps below, each
rounded once in float64, are those of `csrc/src/weight.h`, which gives the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

UNIT_BITS = 42
UNIT = 1 << UNIT_BITS
"""The likeliest token's weight."""
MAX_VOCAB = (1 << (63 - UNIT_BITS)) - 1
"""More tokens could add up to more than 63 bits hold."""
LOG2_E = math.log2(math.e)

LOWEST = -64.0
EVEN = (
    float.fromhex("0x1.62e42fefa39efp-1"),
    float.fromhex("0x1.c6b08d7047e52p-5"),
    float.fromhex("0x1.5d87fe86fe88ep-10"),
    float.fromhex("0x1.ffcb9515a8016p-17"),
    float.fromhex("0x1.b63880a30e9ffp-24"),
)
ODD = (
    float.fromhex("0x1.ebfbdff823cedp-3"),
    float.fromhex("0x1.3b2ab7181b755p-7"),
    float.fromhex("0x1.4308ac85aa947p-13"),
    float.fromhex("0x1.63d136366db24p-20"),
)
_CHUNK = 16_384  # numbers that stay in the cache from one step to the next


def scale_of(temperature: float) -> float:
    """Doublings of probability per logit."""
    return LOG2_E / temperature


def weigh(logits: npt.NDArray[Any], scale: float) -> I64:
    """Units of each token. Shapes: logits [V], float32, at least one finite, no NaN, no +inf; result [V].

    2^f = 1 + f P(f) for -0.5 <= f <= 0.5: P interpolates at the nine Chebyshev nodes, relative error below 4e-14.
    """
    out = np.empty(len(logits), np.int64)
    peak = float(logits.max())
    for first in range(0, len(logits), _CHUNK):
        y = logits[first : first + _CHUNK].astype(np.float64)
        y -= peak
        y *= scale
        np.maximum(y, LOWEST, out=y)
        n = np.rint(y)
        y -= n
        square = y * y
        p, odd = square * EVEN[-1], square * ODD[-1]
        for c in EVEN[-2:0:-1]:
            p += c
            p *= square
        p += EVEN[0]
        for c in ODD[-2:0:-1]:
            odd += c
            odd *= square
        odd += ODD[0]
        odd *= y
        p += odd
        p *= y
        p += 1.0
        exponents = (n.astype(np.int64) + UNIT_BITS) << 52
        scaled = (p.view(np.int64) + exponents).view(np.float64)  # p * 2^(n + UNIT_BITS): no number here is tiny
        out[first : first + _CHUNK] = np.rint(scaled)
    return out
