"""What is looked at before stored numbers are believed, whatever their layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.ops.stored import StoredMatrix, as_numbers

_CHUNK = 1 << 18
"""Numbers beside the codes looked at at a time."""
NO_SCALES = "has scales that are NaN or infinity, or make weights that are"


def scale_fault(matrix: StoredMatrix, most: float) -> str | None:
    """What is wrong with the scales of a matrix whose codes, less their zero points, are at most `most`."""
    n, k = matrix.shape
    per = max(1, -(-k // (matrix.format.group or k)))
    step = max(1, _CHUNK // per)
    with np.errstate(all="ignore"):
        for first in range(0, n, step):
            largest = np.float32(most)
            for level, part in zip(matrix.format.scales, matrix.scales(first, min(first + step, n)), strict=True):
                largest = largest * np.abs(as_numbers(level.dtype, part)).max(axis=1)
            if not np.isfinite(largest).all():
                return NO_SCALES
    return None


def order_fault(matrix: StoredMatrix, order: npt.NDArray[np.int32] | None, groups: int, undo: str) -> str | None:
    """What is wrong with the group of every input [K]. `undo`: what to change where a file has an order of its own
    that its configuration does not say."""
    if order is None:
        return None
    lowest, highest = int(order.min()), int(order.max())
    if not 0 <= lowest <= highest < groups:
        return f"has inputs in groups {lowest} to {highest} (g_idx), but scales for {groups} groups"
    k = matrix.shape[1]
    runs = np.arange(k) // (matrix.format.group or k)
    if not matrix.format.ordered and groups > 1 and not np.array_equal(order, runs):
        return f"has inputs in an order of their own (g_idx); {undo}"
    return None
