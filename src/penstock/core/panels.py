"""Which native panels hold a stored matrix exactly: from a `MatrixFormat`, without looking at a number of it.

Names are those of `csrc/include/penstock.h` without their prefixes: "U4" is PST_C_U4, "U8_F16" PST_S_U8_F16. Shape
letters: N outputs, K inputs of a matrix, G groups along a row.
"""

from __future__ import annotations

import msgspec

from penstock.core.matrix_format import MatrixFormat, Scheme, Shared

PANEL_ROWS = 64
"""Outputs of a panel; a matrix is padded to whole ones."""
GROUPS = (256, 128, 64, 32, 16)
"""Inputs that may share a scale, if not all of a row do."""
SUPER = 256
"""Inputs that share a half where scales are integers."""
GRIDS = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "TQ1_0")
"""Layouts whose blocks lie in panels as they lie in the file."""
_UINTS = (8, 6, 5, 4, 3, 2)
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "e4m3": "E4M3", "e8m0": "E8M0"}
_CODE_BITS = {"T4": 4, "F4": 4, "E4M3": 8} | {f"U{bits}": bits for bits in _UINTS}
_SHARED_BYTES = {"NONE": 0, "F32": 4, "E4M3": 1, "E8M0": 1, "U8": 1}
_SHARED_BYTES |= dict.fromkeys(("F16", "BF16", "F16_CODES", "BF16_CODES"), 2)
_TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_MOST_POINT = 255
ROW_BLOCKS = (32, 64, 128)
"""Inputs of a row that may share a scale."""


class Panels(msgspec.Struct, frozen=True):
    """How panels hold a matrix: what a code is, its scale and its zero (the enums' names), `offset` the code of zero.

    `group`: inputs that share a scale, 0 for all of a row. Every scale is multiplied by `factor`, and, if `has_factor`,
    by the one float32 of its matrix. `table`: of the codes T4 and F4. `block`: of grids, (numbers, bytes)
    of one.
    """

    code: str
    group: int = 0
    scale: str = "F32"
    zero: str = "NONE"
    offset: int = 0
    factor: float = 1.0
    has_factor: bool = False
    table: tuple[float, ...] = ()
    block: tuple[int, int] = (0, 0)

    @property
    def row_block(self) -> int:
        """Inputs of a row that share a scale if rows become 8 bits; 0 where products take them as floats only."""
        if self.code in ("F4", "E4M3"):
            return 0
        return self.group if self.group in ROW_BLOCKS else ROW_BLOCKS[0]

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """About the bytes of a matrix [N, K]; inner layouts may pad some more."""
        rows, columns = -(-shape[0] // PANEL_ROWS) * PANEL_ROWS, shape[1]
        if self.block[0]:
            return rows * -(-columns // self.block[0]) * self.block[1]
        groups = -(-columns // self.group) if self.group else 1
        wide = groups * self.group or columns
        each = -(-wide * _CODE_BITS[self.code] // 8)
        for shared in (self.scale, self.zero):
            supers = -(-columns // SUPER) * 2 if shared.endswith("8_F16") else 0
            each += groups * _SHARED_BYTES.get(shared, 1) + supers
        if (self.code, self.scale, self.zero) == ("U2", "U8_F16", "U8_F16"):
            each -= groups  # of 2-bit codes both have 4 bits (Q2_K)
        return rows * each


def panels_of(format: MatrixFormat, columns: int) -> Panels | None:
    """The panels that hold every value of a matrix with so many inputs; None: there are none, or it is no codes."""
    if format.code == "grid":
        name = format.layout.upper()
        return Panels(name, block=format.block) if name in GRIDS else None
    code = _code(format)
    group = _group(format)
    if code is None or group is None:
        return None
    scale = _scale(format)
    zero = _zero(format, scale)
    if zero is None or (format.ordered and (not group or group != format.group or columns % group)):
        return None
    panels = msgspec.structs.replace(code, group=group, scale=scale, zero=zero, has_factor=_is_whole(format.scales))
    return panels if panels.offset <= _MOST_POINT else None


def shift_of(format: MatrixFormat) -> int:
    """What makes signed codes, and their zero points, unsigned."""
    return 1 << format.bits - 1 if format.code == "int" else 0


def takes(scheme: Scheme, format: MatrixFormat, columns: int) -> bool:
    """Whether codes of this format go into the panels of a scheme as they are."""
    if not scheme.weight_bits or format.ordered:
        return False
    return panels_of(format, columns) == panels_of(scheme.format, columns)


def _code(format: MatrixFormat) -> Panels | None:
    """The code, with what belongs to it alone."""
    bits = format.bits
    if format.code in ("int", "uint") and bits <= _UINTS[0]:
        room = next(most for most in reversed(_UINTS) if most >= bits)
        return Panels(f"U{room}", offset=0 if format.zeros else format.offset + shift_of(format))
    if format.code == "e2m1":
        return Panels("T4", factor=0.5, table=_TWICE_E2M1)
    if format.code == "e4m3":
        return Panels("E4M3")
    if format.code == "table" and bits == 4 and len(format.table) == 16:
        whole = all(v == int(v) and -128 <= v <= 127 for v in format.table)
        return Panels("T4" if whole else "F4", table=format.table)
    return None


def _group(format: MatrixFormat) -> int | None:
    """The largest group that its scales fall into; they are repeated if it is less than their own."""
    if not format.scales:
        return None
    per = format.scales[0].columns
    return next((g for g in GROUPS if per % g == 0), None) if per else 0


def _is_whole(scales: tuple[Shared, ...]) -> bool:
    """Small floats times one float32 of the whole matrix."""
    return len(scales) == 2 and scales[0].dtype == "e4m3" and scales[1] == Shared("float32", 0, 0)


def _is_super(scales: tuple[Shared, ...]) -> bool:
    """Integers, each times a half per 256 inputs."""
    return (
        len(scales) == 2
        and scales[0].dtype.startswith(("uint", "int"))
        and scales[0].columns in GROUPS
        and scales[1] == Shared("float16", 1, SUPER)
    )


def _scale(format: MatrixFormat) -> str:
    first = format.scales[0]
    if _is_super(format.scales):
        return "U8_F16" if first.dtype.startswith("uint") else "I8_F16"
    if len(format.scales) == 1 or _is_whole(format.scales):
        return _FLOATS.get(first.dtype, "F32")
    return "F32"  # the product of all levels


def _zero(format: MatrixFormat, scale: str) -> str | None:
    """None: what no panels subtract."""
    if not format.zeros:
        return "NONE"
    first = format.zeros[0]
    if first.columns != format.scales[0].columns or first.rows != 1 or format.code not in ("int", "uint"):
        return None
    if format.zeros_are == "values":
        if format.code == "int":
            return None
        if _is_super(format.zeros):
            return "U8_F16" if scale == "U8_F16" and first.dtype.startswith("uint") else None
        return "F16" if len(format.zeros) == 1 and first.dtype == "float16" else None
    if len(format.zeros) > 1:
        return None
    if first.dtype in ("float16", "bfloat16"):
        return f"{_FLOATS[first.dtype]}_CODES"
    # A zero point may be one more than the largest code.
    return None if first.dtype in _FLOATS else "U8" if 1 << format.bits <= _MOST_POINT else "F16_CODES"
