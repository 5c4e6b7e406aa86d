"""ggml's block types, as data: what a block's numbers mean. How its bytes say them: `weights.stored.ggml`.

Sizes of blocks: `formats.tensor_ref.BLOCKS`. Source: the block structs of ggml-common.h and `dequantize_row_*` of
ggml-quants.c, github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import msgspec

from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.formats.tensor_ref import BLOCKS


def _half(columns: int) -> tuple[Shared]:
    return (Shared("float16", 1, columns),)


def _super(dtype: str, columns: int) -> tuple[Shared, Shared]:
    """Of a block of 256: whole numbers for each run of so many, a float16 for all of them."""
    return Shared(dtype, 1, columns), Shared("float16", 1, 256)


def _grid(kind: str, bits: int) -> MatrixFormat:
    return MatrixFormat("grid", bits, block=BLOCKS[kind], layout=kind.lower())


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""`kvalues_iq4nl`."""

GGML_FORMATS: dict[str, MatrixFormat] = {
    "Q1_0": MatrixFormat("table", 1, _half(128), table=(-1, 1)),
    "Q2_0": MatrixFormat("uint", 2, _half(64), offset=1),
    "Q4_0": MatrixFormat("uint", 4, _half(32), offset=8),
    "Q4_1": MatrixFormat("uint", 4, _half(32), _half(32), "values"),
    "Q5_0": MatrixFormat("uint", 5, _half(32), offset=16),
    "Q5_1": MatrixFormat("uint", 5, _half(32), _half(32), "values"),
    "Q8_0": MatrixFormat("int", 8, _half(32)),
    "Q2_K": MatrixFormat("uint", 2, _super("uint4", 16), _super("uint4", 16), "values"),
    "Q3_K": MatrixFormat("uint", 3, _super("int6", 16), offset=4),
    "Q4_K": MatrixFormat("uint", 4, _super("uint6", 32), _super("uint6", 32), "values"),
    "Q5_K": MatrixFormat("uint", 5, _super("uint6", 32), _super("uint6", 32), "values"),
    "Q6_K": MatrixFormat("uint", 6, _super("int8", 16), offset=32),
    "Q8_K": MatrixFormat("int", 8, (Shared("float32", 1, 256),)),
    "IQ4_NL": MatrixFormat("table", 4, _half(32), table=_IQ4),
    "IQ4_XS": MatrixFormat("table", 4, _super("int6", 32), table=_IQ4),
    "TQ2_0": MatrixFormat("uint", 2, _half(256), offset=1),
    "MXFP4": MatrixFormat("e2m1", 4, (Shared("e8m0", 1, 32),)),
    "NVFP4": MatrixFormat("e2m1", 4, (Shared("e4m3", 1, 16),)),
    "TQ1_0": _grid("TQ1_0", 2),
    "IQ1_S": _grid("IQ1_S", 1),
    "IQ1_M": _grid("IQ1_M", 1),
    "IQ2_XXS": _grid("IQ2_XXS", 2),
    "IQ2_XS": _grid("IQ2_XS", 2),
    "IQ2_S": _grid("IQ2_S", 2),
    "IQ3_XXS": _grid("IQ3_XXS", 3),
    "IQ3_S": _grid("IQ3_S", 3),
}
"""Type -> format, for every block type that can be read. Q8_K has sums of its codes besides, which nobody needs."""


def with_factor(format: MatrixFormat) -> MatrixFormat:
    """The same, and everything times one float32 that lies beside the matrix."""
    return msgspec.structs.replace(format, scales=(*format.scales, Shared("float32", 0, 0)))
