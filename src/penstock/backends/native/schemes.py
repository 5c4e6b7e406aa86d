"""What a scheme of quantisation means for the native products."""

from __future__ import annotations

import numpy as np

from penstock.core.matrix_format import Scheme, panel_group
from penstock.ops.native.abi import Act, Format
from penstock.ops.stored import StoredMatrix, Weight

_EXACT = {np.dtype(np.float32): Format.F32, np.dtype(np.float16): Format.F16, np.dtype(np.uint16): Format.BF16}


def packing(scheme: Scheme, weight: Weight, isa: str) -> tuple[Format, Act, int]:
    """What a weight is packed as, what rows become before its products, and the size of groups (or 0)."""
    dtype = weight.dtype
    # Without instructions for bfloat16, rounding the rows would cost accuracy and win nothing.
    short = Act.BF16 if isa == "avx512bf16" else Act.F32
    if isinstance(weight, StoredMatrix) and not scheme.weight_bits:
        group = panel_group(weight.format, weight.shape[1])
        assert group is not None, "`plan.weights` holds other codes as values"
        return Format.I4, short if dtype == np.uint16 else Act.F32, group
    if not scheme.weight_bits:
        format = _EXACT[dtype]
        return format, short if format == Format.BF16 else Act.F32, 0
    format = Format.I8 if scheme.weight_bits == 8 else Format.I4
    return format, Act.I8 if scheme.row_bits else short, scheme.group
