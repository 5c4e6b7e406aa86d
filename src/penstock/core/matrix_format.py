"""How the numbers of weights are held, as data: one description for files, memory, kernels and reports.

A value is (code - zero) * scale, or code * scale - zero where zeros are values. Scales and zeros are shared by
neighbours and may be codes with scales of their own. Shape letters: N outputs (rows), K inputs (columns) of a matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Literal

import msgspec

from penstock.base.errors import ConfigError
from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.model_spec import ModelSpec, weight_shapes

SHARED_BITS = {
    "float32": 32, "float16": 16, "bfloat16": 16, "e4m3": 8, "e8m0": 8, "uint8": 8, "int8": 8, "uint6": 6, "int6": 6,
    "uint4": 4,
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

    Examples: Q4_K is uint, 4 bits, scales (uint6 per 32, float16 per 256) and zeros of the same, which are values;
    NVFP4 is e2m1 with scales (e4m3 per 16, one float32); FP8 of DeepSeek is e4m3 with one float32 per 128 x 128.
    """

    code: Literal["float32", "float16", "bfloat16", "int", "uint", "e4m3", "e2m1", "table"]
    bits: int
    scales: tuple[Shared, ...] = ()
    zeros: tuple[Shared, ...] = ()
    zeros_are: Literal["codes", "values"] = "codes"
    offset: int = 0
    ordered: bool = False

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
        shared = sum(part.num_bytes(shape) for part in (*self.scales, *self.zeros))
        return -(-prod(shape) * self.bits // 8) + shared + (4 * shape[1] if self.ordered else 0)

    @property
    def bytes_each(self) -> float:
        """Bytes of one number with its part of what blocks share; what a whole row shares counts nothing."""
        blocks = [part for part in (*self.scales, *self.zeros) if part.rows and part.columns]
        return self.bits / 8 + sum(SHARED_BITS[b.dtype] / 8 / (b.rows * b.columns) for b in blocks)

    def __str__(self) -> str:
        """For people: `4-bit codes, a float16 scale per 128 inputs, zero points, inputs in an order of their own`."""
        if self.is_plain:
            return self.code
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
"""Inputs that may share a scale in panels of 4 bits."""
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

    def takes(self, format: MatrixFormat, columns: int) -> bool:
        """Whether codes of this format go into the scheme's panels as they are."""
        return self.weight_bits == 4 and panel_group(format, columns) == self.group


NONE = Scheme("none")


def parse_scheme(text: str) -> Scheme:
    """`none`, `int8-w8a8`, `int8-wo`, `int4-w4a8`, `int4-wo`; the last two may say a group: `int4-wo:32`.

    Raises ConfigError naming the choices.
    """
    match = re.fullmatch(r"([a-z0-9-]+)(?::([0-9]{1,4}))?", text)
    base, group = (match[1], match[2]) if match is not None else ("", None)
    if base not in _NAMES:
        raise ConfigError(f"quantization: {text!r} is none of {SCHEMES}", field="quantization")
    if group is not None and (not base.startswith("int4") or int(group) not in GROUPS):
        sizes = "|".join(map(str, GROUPS))
        raise ConfigError(f"quantization: {text!r} does not exist; groups: int4-w4a8:{sizes}", field="quantization")
    if base == "none":
        return NONE
    row_bits = 8 if base.endswith("a8") else 0
    if base.startswith("int8"):
        return Scheme(base, 8, 0, row_bits)
    size = int(group or _GROUP)
    return Scheme(base if size == _GROUP else f"{base}:{size}", 4, size, row_bits)


# --- which matrices of a model

_KEPT = ("router", "shared_gate")
"""Matrices that no scheme rounds: tiny, and a wrong choice of expert costs more than bits."""
_ELEMENTWISE = ("conv", "a_log", "q_norm", "k_norm", "bias")
_LATENT = ("kv_b", "k_b", "v_b")
"""Multiplied by, but not with rows (`model.attention.latent`)."""
TABLES = ("embed", "positions")
"""Weights that are looked up in, so that they are never codes, though a tied one is multiplied with, too."""


def is_product(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight, by its logical name, is the matrix of a product, and not one that is applied elementwise or
    looked up in."""
    return len(shape) == 2 and name not in TABLES and name.rsplit(".", 1)[-1] not in _ELEMENTWISE


def row_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Logical name -> shape of every matrix that rows are multiplied with: these alone may be held as codes.

    A tied table is one of them; it is looked up in its own type besides.
    """
    shapes = weight_shapes(spec)
    tied = {"embed"} if spec.tie_embeddings else set()
    found = (n for n, s in shapes.items() if n in tied or (is_product(n, s) and n.rsplit(".", 1)[-1] not in _LATENT))
    return {name: (shapes[name][0], shapes[name][1]) for name in found}


def rounded_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Those of `row_matrices` that a scheme rounds."""
    return {name: shape for name, shape in row_matrices(spec).items() if not name.endswith(_KEPT)}


class HeldWeights(msgspec.Struct, frozen=True):
    """How all weights of a model are held: `matrices` by logical name, everything else as `dtype`."""

    dtype: str = "float32"
    matrices: Mapping[str, MatrixFormat] = {}

    def of(self, name: str) -> MatrixFormat:
        return self.matrices.get(name) or plain(self.dtype)

    def __str__(self) -> str:
        """For people: `14 matrices of 4-bit codes, a float16 scale per 32 inputs; the rest float16`."""
        counts = Counter(map(str, self.matrices.values()))
        return "; ".join([*(f"{n} matrices of {name}" for name, n in sorted(counts.items())), f"the rest {self.dtype}"])

    def bytes_each(self, spec: ModelSpec) -> float | None:
        """Bytes of a number in the matrices that rows are multiplied with, on the mean; None if all are plain."""
        if not self.matrices:
            return None
        shapes = row_matrices(spec)
        total = sum(self.of(name).bytes_each * prod(shape) for name, shape in shapes.items())
        return total / sum(map(prod, shapes.values()))

    def num_bytes(self, spec: ModelSpec) -> int:
        """Bytes of all weights in memory."""
        size = DTYPE_BYTES[self.dtype]
        if not self.matrices:
            return spec.num_params * size
        total = 0
        for name, shape in weight_shapes(spec).items():
            held = self.matrices.get(name)
            if held is not None:
                total += held.num_bytes((shape[0], shape[1]))
                if held.code == "int" and held.group:  # about what panels of a scheme pad
                    total += 4 * shape[0]
            if held is None or name in TABLES:  # rows of a table are looked up in its own type
                total += prod(shape) * size
        return total


def panel_group(format: MatrixFormat, columns: int) -> int | None:
    """The group of the native panels of 4 bits that hold a matrix of this format exactly; None: there are none.

    They take codes -8 ... 7 with one half for every 32, 64 or 128 inputs in a run; a scale may be repeated.
    """
    offset = {"uint": 8, "int": 0}.get(format.code)
    if format.bits != 4 or offset != format.offset or format.zeros or format.ordered or len(format.scales) != 1:
        return None
    (scale,) = format.scales
    if scale.dtype != "float16" or scale.rows != 1:
        return None
    # A scale of a whole row is repeated in whatever groups pad the row least.
    per, least = (scale.columns, None) if scale.columns else (columns, GROUPS[0])
    return next((g for g in reversed(GROUPS) if per % g == 0), least)
