"""What fills native panels: with stored codes, scales and zeros as they are, or with values.

Shape letters: N outputs, K inputs of a matrix, G groups of a panel's row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.core.matrix_format import Shared
from penstock.core.panels import Panels, shift_of
from penstock.ops.native.abi import PANEL, DType, Matrix
from penstock.ops.stored import StoredMatrix, Weight, product_of

Array = npt.NDArray[Any]
Packer = Callable[[int, int], int]
W = TypeVar("W", bound=Weight)
DTYPES = {np.dtype(np.float32): DType.F32, np.dtype(np.float16): DType.F16, np.dtype(np.uint16): DType.BF16}
_CHUNK_ELEMENTS = 1 << 20
"""Codes that a thread has in hand at a time."""
_TYPES: dict[str, npt.DTypeLike] = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "E4M3": np.uint8, "E8M0": np.uint8, "U8_F16": np.uint8,
    "I8_F16": np.int8, "U8": np.uint8, "F16_CODES": np.float16, "BF16_CODES": np.uint16,
}  # fmt: skip


def ordered_inputs(m: StoredMatrix) -> npt.NDArray[np.int32] | None:
    """[K] the inputs group by group, where groups are no runs; None where they are."""
    return None if m.order is None else np.argsort(m.order, kind="stable").astype(np.int32)


def has_even_groups(m: StoredMatrix) -> bool:
    """Whether groups are runs, or can be put in runs: each has as many inputs as its format says."""
    if m.order is None:
        return True
    counts = np.bincount(m.order, minlength=-(-m.shape[1] // m.format.group))
    return bool((counts == m.format.group).all())


def with_factor(panels: Panels, m: StoredMatrix) -> Panels:
    """Panels with the factor that this matrix has for all its scales, where it has one."""
    if not panels.has_factor:
        return panels
    (whole,) = m.scales(0, 1)[-1].reshape(-1)
    return msgspec.structs.replace(panels, factor=float(np.float32(panels.factor) * whole), has_factor=False)


def code_packer(
    library: Any, m: Matrix, panels: Panels, parts: Sequence[StoredMatrix], where: npt.NDArray[np.int64],
    order: npt.NDArray[np.int32] | None,
) -> Packer:  # fmt: skip
    """What fills panels first ... last - 1 of `m`, and says 0. `where`: see `matrix.order`; `order`: of its inputs."""

    def pack(pointers: Sequence[int | None], num_panels: int, data: int) -> int:
        failed: int = library.pst_pack_codes(m, *pointers, 0, num_panels, data)
        return failed

    def rows_of(part: StoredMatrix, low: int, high: int) -> tuple[Array | None, ...]:
        return parts_of(panels, part, low, high, order)

    return _in_chunks(library, m, parts, where, rows_of, pack)


def value_packer(library: Any, m: Matrix, parts: Sequence[Weight], where: npt.NDArray[np.int64]) -> Packer:
    """The same for values, which are held as they are or rounded, as the format of `m` says."""
    kinds = {np.dtype(np.float32) if isinstance(p, StoredMatrix) else p.dtype for p in parts}
    assert len(kinds) == 1, "parts of one matrix are of one type"
    dtype = DTYPES[kinds.pop()]

    def pack(pointers: Sequence[int | None], num_panels: int, data: int) -> int:
        failed: int = library.pst_pack(m, dtype, pointers[0], 0, num_panels, data)
        return failed

    def rows_of(part: Weight, low: int, high: int) -> tuple[Array]:
        return (part.values(low, high) if isinstance(part, StoredMatrix) else part[low:high],)

    return _in_chunks(library, m, parts, where, rows_of, pack)


def _in_chunks(
    library: Any, m: Matrix, parts: Sequence[W], where: npt.NDArray[np.int64],
    rows_of: Callable[[W, int, int], tuple[Array | None, ...]],
    pack: Callable[[Sequence[int | None], int, int], int],
) -> Packer:  # fmt: skip
    """A few panels at a time: `rows_of` gives arrays [n, ...] of rows of a part, `pack` takes their addresses."""
    starts = np.cumsum([0, *(p.shape[0] for p in parts)])
    data_bytes = library.pst_panel_bytes(m)
    step = max(1, _CHUNK_ELEMENTS // (PANEL * m.cols))

    def chunk(first: int, last: int) -> int:
        pointers = _Pointers(last - first)
        rows = where[first * PANEL : last * PANEL]
        for part, start, stop in zip(parts, starts, starts[1:], strict=False):
            (here,) = np.nonzero((rows >= start) & (rows < stop))
            if here.size:
                # Outputs of one part lie in their order, so they are one run of its rows.
                low, high = int(rows[here[0]] - start), int(rows[here[-1]] - start) + 1
                pointers.add(here, rows_of(part, low, high))
        return pack(pointers.addresses(), last - first, m.data + first * data_bytes)

    def some(first: int, last: int) -> int:
        return int(any(chunk(low, min(low + step, last)) for low in range(first, last, step)))

    return some


class _Pointers:
    """Where each output of some panels has its codes (or values), scales, scales of scales, zeros, scales of these."""

    def __init__(self, num_panels: int) -> None:
        self._tables: list[npt.NDArray[np.uint64] | None] = [None] * 5
        self._size = num_panels * PANEL
        self._kept: list[Array] = []

    def add(self, here: npt.NDArray[np.int64], arrays: Sequence[Array | None]) -> None:
        """`here`: which outputs the rows of the arrays are."""
        for i, array in enumerate(arrays):
            if array is None:
                continue
            rows = array if array.strides[1] == array.itemsize else np.ascontiguousarray(array)
            self._kept.append(rows)
            table = self._tables[i]
            if table is None:
                table = self._tables[i] = np.zeros(self._size, np.uint64)
            table[here] = rows.ctypes.data + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])

    def addresses(self) -> list[int | None]:
        return [None if t is None else t.ctypes.data for t in self._tables]


def parts_of(
    panels: Panels, m: StoredMatrix, first: int, last: int, order: npt.NDArray[np.int32] | None
) -> tuple[Array, Array | None, Array | None, Array | None, Array | None]:
    """Codes, scales, supers, zeros and super_zeros of rows, as `pst_pack_codes` takes them: [n, ...] each."""
    codes, format = m.codes(first, last), m.format
    if panels.block[0]:
        return codes.reshape(last - first, -1), None, None, None, None
    shift = shift_of(format)
    if shift:
        codes = codes.view(np.uint8) + np.uint8(shift)  # modulo 256
    if order is not None:
        codes = codes[:, order]
    scales = _shared(panels, panels.scale, format.scales, m.scales(first, last), m.shape[1])
    if panels.zero == "NONE":
        return codes, *scales, None, None
    zeros = m.zeros(first, last)
    if shift and format.zeros_are == "codes":
        zeros = (zeros[0] + np.int32(shift),)
    return codes, *scales, *_shared(panels, panels.zero, format.zeros, zeros, m.shape[1])


def _shared(
    panels: Panels, kind: str, levels: tuple[Shared, ...], stored: tuple[Array, ...], columns: int
) -> tuple[Array, Array | None]:
    """Scales (or zeros), and the halves that scale these, if they do; repeated where panels have more groups."""
    supers = stored[1] if kind.endswith("8_F16") else None
    found = product_of(levels, stored) if kind == "F32" else stored[0]
    if panels.group != levels[0].columns:
        num_groups = -(-columns // panels.group)
        times = levels[0].columns // panels.group if levels[0].columns else num_groups
        found = np.repeat(found, times, axis=1)[:, :num_groups]
    return found.astype(_TYPES[kind], copy=False), supers
