"""Adapters of codes: scales in place of a base's (PEQA), and the difference to a fine-tuned model in few bits.

Sources: PEQA (Kim et al., arXiv 2305.14152); GPT-Zip (Isik et al., "Deep Compression of Finetuned Large Language
Models", 2023); BitDelta (Liu et al., arXiv 2402.10193).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.core.panels import panels_of
from penstock.formats.files import quoted, read_exactly
from penstock.formats.peft import DELTA, PeftFolder, PeftModule
from penstock.formats.tensor_ref import TensorRef
from penstock.ops.adapters import LowRank, Rescaled
from penstock.ops.stored import Rows, StoredMatrix
from penstock.weights.stored.checks import scale_fault

Array = npt.NDArray[Any]
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}
_SCALES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Panels' types of plain scales."""


class DeltaMatrix(StoredMatrix):
    """[N, K] of a delta's folder: `codes` uint8 [N, ceil(K b / 8)], `scales` float16 or float32 [N, G]. Codes of one
    bit become two: 0 and 2, less 1."""

    def __init__(
        self, codes: Array, scales: Array, columns: int, bits: int, group: int,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        shape = (len(codes) if rows is None else len(rows), columns)
        super().__init__(delta_format(bits, group, scales.dtype.name), shape, np.dtype(np.float32), None, rows)
        self._bits, self._bytes, self._each = bits, codes, scales

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self._bytes, self._each

    def _codes(self, rows: Rows) -> npt.NDArray[np.uint8]:
        own = self._bytes[rows]
        shifts = np.arange(0, 8, self._bits, dtype=np.uint8)
        out = (own[:, :, None] >> shifts & np.uint8((1 << self._bits) - 1)).reshape(len(own), -1)[:, : self.shape[1]]
        return out << np.uint8(1) if self._bits == 1 else out

    def _scales(self, rows: Rows) -> tuple[Array]:
        return (self._each[rows],)

    def fault(self) -> str | None:
        return scale_fault(self, 2.0 ** (self._bits - 1))


class RescaledMatrix(StoredMatrix):
    """The codes of `base` with `scales` [N, G]."""

    def __init__(self, base: StoredMatrix, scales: Array, format: MatrixFormat) -> None:
        super().__init__(format, base.shape, base.dtype, base.order)
        self._base, self._each = base, scales

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (*self._base.arrays, self._each)

    def _of_base(self, rows: Rows) -> Rows:
        if isinstance(rows, slice):
            return self._base._span(rows.start, rows.stop)
        return rows if self._base._rows is None else self._base._rows[rows]

    def _codes(self, rows: Rows) -> Array:
        return self._base._codes(self._of_base(rows))

    def _zeros(self, rows: Rows) -> tuple[Array, ...]:
        return self._base._zeros(self._of_base(rows))

    def _scales(self, rows: Rows) -> tuple[Array]:
        return (self._each[rows],)

    def fault(self) -> str | None:
        return self._base.fault() or scale_fault(self, 2.0**self.format.bits)


def delta_format(bits: int, group: int, scale: str) -> MatrixFormat:
    return MatrixFormat("uint", max(2, bits), (Shared(scale, 1, group),), offset=1 if bits == 1 else 1 << bits - 1)


def rescaled_format(format: MatrixFormat, columns: int) -> MatrixFormat | None:
    """What codes of this format have in place of their scales; None: scales of theirs cannot be replaced."""
    panels = panels_of(format, columns)
    dtype = None if panels is None or panels.block[0] or panels.has_factor else _SCALES.get(panels.scale)
    if dtype is None:
        return None
    return msgspec.structs.replace(format, scales=(Shared(dtype, 1, format.scales[0].columns),))


def check_coded(found: PeftFolder, name: str, module: PeftModule, site: Any, other: str) -> None:
    """Raises: ModelError, UnsupportedError. `site`: `weights.adapters.Site`; `other`: what else the message says."""
    tensors, n, k = module.tensors, site.outputs, site.inputs
    if found.kind != DELTA:
        format = None if site.format is None else rescaled_format(site.format, k)
        if format is None:
            have = "numbers" if site.format is None else str(site.format)
            raise UnsupportedError(
                f"{quoted(found.path)} has scales for {quoted(name)}, which is held as {have} here: scale sets go with "
                f"bases of codes that have one float scale per group, stored so or by quantization{other}"
            )
        _check_shape(tensors["scales"], (n, -(-k // format.group) if format.group else 1), name, other)
        _scales_as(tensors["scales"], format.scales[0].dtype)
        return
    if found.group and k % found.group:
        raise UnsupportedError(
            f"{quoted(found.path)}: module {quoted(name)} has {k} inputs, which are no whole number of groups of "
            f"{found.group}; write the delta with group_size 0"
        )
    _check_shape(tensors["codes"], (n, -(-k * found.bits // 8)), name, other, "U8")
    _check_shape(tensors["scales"], (n, k // found.group if found.group else 1), name, other, "F16", "F32")
    if "bias" in tensors:
        _check_shape(tensors["bias"], (n,), name, other)


def _check_shape(t: TensorRef, wanted: tuple[int, ...], name: str, other: str, *dtypes: str) -> None:
    if t.shape != wanted:
        raise ModelError(
            f"tensor {quoted(t.name)} has the shape {list(t.shape)}, and this model's {name} needs {list(wanted)}: it "
            f"was made for another base{other}"
        )
    if t.dtype not in (dtypes or _SCALES):
        raise UnsupportedError(f"tensor {quoted(t.name)} is {t.dtype}; {' or '.join(dtypes or _SCALES)} is needed")


def _read(t: TensorRef) -> Array:
    return np.frombuffer(read_exactly(t.path, t.offset, t.nbytes), _TYPES[t.dtype]).reshape(t.shape)


def _wide(x: Array) -> F32:
    return widen(x) if x.dtype == np.uint16 else x.astype(np.float32)


def _scales_as(t: TensorRef, dtype: str) -> Array:
    """In the base's type. Raises: ModelError."""
    wide = _wide(_read(t))
    with np.errstate(over="ignore"):
        found = narrow(wide) if dtype == "bfloat16" else wide.astype(dtype)
    if not np.isfinite(_wide(found)).all():
        raise ModelError(
            f"tensor {quoted(t.name)} has scales that are NaN, infinity or too large for the base's {dtype}"
        )
    return found


def coded_part(
    found: PeftFolder, module: PeftModule, site: Any, base: Callable[[str], F32],
    codes: Callable[[str], StoredMatrix | None] | None,
) -> LowRank:  # fmt: skip
    """What a module of such a folder, which has been checked, does to one product. Raises: ModelError."""
    rows = site.rows
    outputs = site.outputs if rows is None else len(rows)
    nothing = np.zeros((0, site.inputs), np.float32), np.zeros((outputs, 0), np.float32)
    bias = bias_of(base, site.weight)
    if found.kind == DELTA:
        t = module.tensors
        delta = DeltaMatrix(_read(t["codes"]), _read(t["scales"]), site.inputs, found.bits, found.group, rows)
        if (fault := delta.fault()) is not None:
            raise ModelError(f"tensor {quoted(t['scales'].name)} of {quoted(found.path)} {fault}")
        shift = None
        if "bias" in t:
            if bias is None:
                raise ModelError(f"{quoted(t['bias'].name)} of {quoted(found.path)}: the model has no bias there")
            whole = _wide(_read(t["bias"]))
            shift = (whole if rows is None else whole[rows]) - bias
        return LowRank(*nothing, 1.0, None, shift, delta)
    format = rescaled_format(site.format, site.inputs)
    assert format is not None, "it has been checked"
    scales = _scales_as(module.tensors["scales"], format.scales[0].dtype)
    scales = np.ascontiguousarray(scales if rows is None else scales[rows])
    own = None if codes is None else codes(site.weight)
    matrix = None if own is None else RescaledMatrix(own, scales, format)
    return LowRank(*nothing, 1.0, None, None, Rescaled(scales, matrix, bias))


def bias_of(base: Callable[[str], F32], weight: str) -> F32 | None:
    """None: the product has none."""
    try:
        return base(weight + ".bias")
    except KeyError:
        return None
