"""What a scheme of quantisation, and codes as they are stored, mean for the native products."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.core.matrix_format import NONE, Scheme
from penstock.core.panels import Panels, panels_of, takes
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.packers import has_even_groups
from penstock.ops.stored import StoredMatrix, Weight, alike

WITH_BF16 = ("avx512bf16", "neon-bf16")
"""Instruction sets that multiply bfloat16."""
_EXACT = {np.dtype(np.float32): Format.F32, np.dtype(np.float16): Format.F16, np.dtype(np.uint16): Format.BF16}


class Packing(NamedTuple):
    """What a weight is packed as, and what rows become before its products. `panels`, `as_stored`: see `pack`."""

    format: Format
    act: Act
    panels: Panels | None = None
    as_stored: bool = False


def alike_under(scheme: Scheme, a: Weight, b: Weight) -> bool:
    """Whether two weights can be rows of one matrix once they are packed."""
    if not scheme.weight_bits:
        return alike(a, b)
    stored = [w for w in (a, b) if isinstance(w, StoredMatrix)]
    as_stored = [w.format for w in stored if takes(scheme, w.format, w.shape[1])]
    if as_stored:
        return len(as_stored) == 2
    return len(stored) == 2 or (not stored and bool(a.dtype == b.dtype))


def packing(scheme: Scheme, weight: Weight, isa: str, row_bits: int = 8, *, kept: bool = False) -> Packing:
    """`row_bits`: of rows where codes stay as they are stored, as far as products with such codes take 8 bits; 0:
    rows stay floats. A scheme says itself. `kept`: see `core.matrix_format.is_kept`: rows are float32."""
    if kept:
        found = packing(NONE, weight, isa, 0)
        return found._replace(act=Act.F32)
    dtype = weight.dtype
    # Without instructions for bfloat16, rounding the rows would cost accuracy and win nothing.
    short = Act.BF16 if isa in WITH_BF16 else Act.F32
    if scheme.weight_bits:
        columns = weight.shape[1]
        stays = isinstance(weight, StoredMatrix) and takes(scheme, weight.format, columns)
        panels = panels_of(scheme.format, columns)
        return Packing(Format.BLOCK, Act.I8 if scheme.row_bits else short, panels, stays)
    if not isinstance(weight, StoredMatrix):
        return Packing(_EXACT[dtype], short if dtype == np.uint16 else Act.F32)
    panels = panels_of(weight.format, weight.shape[1])
    assert panels is not None, "`plan.weights` holds other codes as values"
    if not has_even_groups(weight):
        return Packing(Format.F32, Act.F32)
    if row_bits and panels.row_block:
        return Packing(Format.BLOCK, Act.I8, panels, True)
    return Packing(Format.BLOCK, short if dtype == np.uint16 else Act.F32, panels, True)
