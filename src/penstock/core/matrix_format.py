"""How the numbers of weights are held, as data: one description for files, memory, kernels and reports.

A value is (code - zero) * scale, or code * scale - zero where zeros are values. Scales and zeros are shared by
neighbours and may be codes with scales of their own. Shape letters: N outputs (rows), K inputs (columns) of a matrix.
"""

from __future__ import annotations

import re
from math import prod
from typing import Literal

import msgspec

from penstock.base.errors import ConfigError
from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.model_spec import ModelSpec, weight_shapes

SHARED_BITS = {
    "float32": 32, "float16": 16, "bfloat16": 16, "e4m3": 8, "e8m0": 8, "uint8": 8, "int8": 8, "uint7": 7,
    "uint6": 6, "int6": 6, "uint5": 5, "uint4": 4, "uint3": 3, "uint2": 2,
}  # fmt: skip
"""Types of scales and zero points -> bits of one."""


class Shared(msgspec.Struct, frozen=True):
    """One number of type `dtype` for each block of `rows` x `columns` neighbours; 0: all rows, all columns."""

    dtype: str
    rows: int = 1
    columns: int = 0

    def count(self, shape: tuple[int, int]) -> int:
        """How many a matrix of this shape has; last blocks may be short."""
        blocks = zip(shape, (self.rows, self.columns), strict=True)
        return prod(-(-size // block) if block else 1 for size, block in blocks)

    def num_bytes(self, shape: tuple[int, int]) -> int:
        return -(-self.count(shape) * SHARED_BITS[self.dtype] // 8)


class MatrixFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one matrix [N, K] is held.

    `code`: what a code is: a float type (then the value itself, unless there are scales), a signed or unsigned integer,
    or an index into a table. `scales`: what multiplies codes, then the scales of these scales, and so on. `zeros`: what
    is subtracted, in the same way, in units of codes or as values; without any, `offset` is the code of zero.
    `ordered`: inputs are in groups by an order that the matrix brings along, not in runs (GPTQ's act-order).
    `table`: of the code "table", the value of each code. `block`: of the code "grid", (numbers, bytes) of one of its
    blocks, and `layout` who can read them: numbers that are coded together, by a grid or in another base, with whatever
    scales lie between them.

    Examples: Q4_K is uint, 4 bits, scales (uint6 per 32, float16 per 256) and zeros of the same, which are values;
    NVFP4 is e2m1 with scales (e4m3 per 16, one float32); FP8 of DeepSeek is e4m3 with one float32 per 128 x 128.
    """

    code: Literal["float32", "float16", "bfloat16", "int", "uint", "e4m3", "e2m1", "table", "grid"]
    bits: int
    scales: tuple[Shared, ...] = ()
    zeros: tuple[Shared, ...] = ()
    zeros_are: Literal["codes", "values"] = "codes"
    offset: int = 0
    ordered: bool = False
    table: tuple[float, ...] = ()
    block: tuple[int, int] = (0, 0)
    layout: str = ""

    @property
    def is_plain(self) -> bool:
        """Numbers of a float type as they are."""
        return self.code in DTYPE_BYTES and not self.scales

    @property
    def group(self) -> int:
        """Inputs of an output that share a scale; 0: all."""
        return self.scales[0].columns if self.scales else 0

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """Bytes of codes, scales, zeros and the order of a matrix of this shape, without any padding."""
        if self.code == "grid":
            numbers, size = self.block
            return shape[0] * -(-shape[1] // numbers) * size
        shared = sum(part.num_bytes(shape) for part in (*self.scales, *self.zeros))
        return -(-prod(shape) * self.bits // 8) + shared + (4 * shape[1] if self.ordered else 0)

    @property
    def bytes_each(self) -> float:
        """Bytes of one number with its part of what blocks share; what a whole row shares counts nothing."""
        if self.code == "grid":
            return self.block[1] / self.block[0]
        blocks = [part for part in (*self.scales, *self.zeros) if part.rows and part.columns]
        return self.bits / 8 + sum(SHARED_BITS[b.dtype] / 8 / (b.rows * b.columns) for b in blocks)

    def __str__(self) -> str:
        """For people: `4-bit codes, a float16 scale per 128 inputs, zero points, inputs in an order of their own`."""
        if self.is_plain:
            return self.code
        if self.code == "grid":
            return f"{self.layout} blocks"
        kind = "" if self.code in ("int", "uint") else f" ({self.code})"
        shared = [f"a {one.dtype} scale per {_extent(one)}" for one in self.scales]
        zeros = ["zero points"] if self.zeros else []
        order = ["inputs in an order of their own"] if self.ordered else []
        return ", ".join([f"{self.bits}-bit codes{kind}", *shared, *zeros, *order])


def _extent(shared: Shared) -> str:
    if shared.rows == 1:
        return f"{shared.columns} inputs" if shared.columns else "output"
    return f"{shared.rows} x {shared.columns}" if shared.rows else "matrix"


def plain(dtype: str) -> MatrixFormat:
    """float32, float16 or bfloat16."""
    return MatrixFormat(dtype, 8 * DTYPE_BYTES[dtype])  # type: ignore[arg-type]


# --- the setting `quantization`

GROUPS = (32, 64, 128)
"""Inputs that may share a scale where weights are rounded."""
_GROUP = 64
_NAMES = ("none", "int8-w8a8", "int4-w4a8", "int8-wo", "int4-wo")
SCHEMES = ", ".join(_NAMES)


class Scheme(msgspec.Struct, frozen=True):
    """How matrices, and the rows they meet, are rounded.

    `weight_bits` 0: as the model has them. `group`: inputs that share a scale, 0 for one scale per output.
    `row_bits` 0: rows stay float32.
    """

    name: str
    weight_bits: int = 0
    group: int = 0
    row_bits: int = 0

    @property
    def format(self) -> MatrixFormat:
        """What matrices become. Not of the scheme `none`."""
        assert self.weight_bits, "none is no format"
        return MatrixFormat("int", self.weight_bits, (Shared("float16" if self.group else "float32", 1, self.group),))


NONE = Scheme("none")


def parse_scheme(text: str) -> Scheme:
    """`none`, `int8-w8a8`, `int8-wo`, `int4-w4a8`, `int4-wo`; all but the first may say a group: `int4-wo:32`.

    Without one 8 bits have a scale per output, 4 bits one per 64 inputs.

    Raises ConfigError naming the choices.
    """
    match = re.fullmatch(r"([a-z0-9-]+)(?::([0-9]{1,4}))?", text)
    base, group = (match[1], match[2]) if match is not None else ("", None)
    if base not in _NAMES:
        raise ConfigError(f"quantization: {text!r} is none of {SCHEMES}", field="quantization")
    if group is not None and (base == "none" or int(group) not in GROUPS):
        sizes = "|".join(map(str, GROUPS))
        raise ConfigError(f"quantization: {text!r} does not exist; groups: int4-w4a8:{sizes}", field="quantization")
    if base == "none":
        return NONE
    row_bits = 8 if base.endswith("a8") else 0
    bits = int(base[3])
    usual = 0 if bits == 8 else _GROUP
    size = usual if group is None else int(group)
    return Scheme(base if size == usual else f"{base}:{size}", bits, size, row_bits)


# --- which matrices of a model

_KEPT = ("router", "shared_gate", "altup_predict", "altup_correct", "_streams")
"""Matrices that no scheme rounds: tiny, and a wrong choice of expert costs more than bits."""
_ELEMENTWISE = ("conv", "a_log", "a_im", "c_re", "c_im", "q_norm", "k_norm", "bias", "router_table",
                "router_tasks")  # fmt: skip
_LATENT = ("kv_b", "k_b", "v_b", "o_a")
"""Multiplied by, but not with rows (`model.attention.latent`, `model.compressed`)."""
TABLES = ("embed", "positions", "ple_embed", "token_types")
"""Weights that are looked up in; a tied one is multiplied with, too."""


def is_product(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight, by its logical name, is the matrix of a product, and not one that is applied elementwise or
    looked up in."""
    return len(shape) == 2 and name not in TABLES and name.rsplit(".", 1)[-1] not in _ELEMENTWISE


def row_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Logical name -> shape of every matrix that rows are multiplied with; a tied table is one of them."""
    shapes = weight_shapes(spec)
    tied = {"embed"} if spec.tie_embeddings else set()
    found = (n for n, s in shapes.items() if n in tied or (is_product(n, s) and n.rsplit(".", 1)[-1] not in _LATENT))
    return {name: (shapes[name][0], shapes[name][1]) for name in found}


def codes_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Those of `row_matrices`, and the tables of embeddings, tied or not: what may be held as codes."""
    shapes = weight_shapes(spec)
    tables = {name: shapes[name] for name in ("embed", "ple_embed") if name in shapes}
    return {name: (shape[0], shape[1]) for name, shape in tables.items()} | row_matrices(spec)


def rounded_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Those of `row_matrices` that a scheme rounds."""
    return {name: shape for name, shape in row_matrices(spec).items() if not is_kept(name)}


def is_kept(name: str) -> bool:
    """Whether a matrix, by its logical name, is one that no scheme rounds, and whose rows are not rounded either."""
    return name.endswith(_KEPT)
