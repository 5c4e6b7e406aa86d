"""Weights packed for the native products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.matrix_format import panel_group
from penstock.ops.native.abi import PANEL, Act, DType, Format, Matrix
from penstock.ops.stored import StoredMatrix, Weight

Array = npt.NDArray[Any]
DTYPES = {np.dtype(np.float32): DType.F32, np.dtype(np.float16): DType.F16, np.dtype(np.uint16): DType.BF16}
ALIGNMENT = 64
_CHUNK_ELEMENTS = 1 << 20
"""Codes in hand at a time."""


def aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that begins on a cache line. Not touched yet."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


class Packed:
    """One matrix [N, K] in panels, and the struct that describes it to the library.

    Attributes:
        struct: `pst_matrix`; its address is `address`. It points into `data`, `scales` and `bias`.
        num_rows: N without padding; of a pair, gate and up together.
    """

    def __init__(
        self, format: Format, act: Act, num_rows: int, num_cols: int, group: int, pair: bool, data: Array,
        scales: Array | None, bias: F32 | None,
    ) -> None:  # fmt: skip
        self.num_rows, self.num_cols = num_rows, num_cols
        self.data, self.scales, self.bias = data, scales, bias
        self.struct = Matrix(
            format=format, act=act, rows=num_rows, cols=num_cols, group=group, pair=int(pair), data=data.ctypes.data,
            scales=None if scales is None else scales.ctypes.data, bias=None if bias is None else bias.ctypes.data,
        )  # fmt: skip

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def values(self, library: Any) -> F32:
        """What the panels stand for, [padded N, K], in the order of the panels."""
        panels = -(-self.num_rows // PANEL) if not self.struct.pair else self.data.nbytes // panel_bytes(library, self)
        out = np.empty((panels, PANEL, self.num_cols), np.float32)
        for p in range(panels):
            assert library.pst_unpack(self.struct, p, out[p].ctypes.data) == 0
        return out.reshape(-1, self.num_cols)


def panel_bytes(library: Any, m: Packed) -> int:
    return int(library.pst_panel_bytes(m.struct))


def order(num_rows: Sequence[int], pair: bool) -> npt.NDArray[np.int64]:
    """Which row of the stacked parts each output of the panels is, -1 for padding: [panels * 64].

    Parts lie one after the other; of a pair, each panel takes 32 rows of the first part, then the same of the second.
    """
    if not pair:
        total = sum(num_rows)
        out = np.full(-(-total // PANEL) * PANEL, -1, np.int64)
        out[:total] = np.arange(total)
        return out
    half = PANEL // 2
    (width, other) = num_rows
    assert width == other, "gate and up are equally wide"
    own = np.full(-(-width // half) * half, -1, np.int64)
    own[:width] = np.arange(width)
    blocks = own.reshape(-1, half)
    return np.concatenate([blocks, np.where(blocks < 0, -1, blocks + width)], axis=1).reshape(-1)


def pack(
    library: Any, parts: Sequence[Weight], format: Format, act: Act, *, group: int = 0, pair: bool = False,
    biases: Sequence[Array | None] | None = None, num_threads: int = 1,
) -> Packed:  # fmt: skip
    """Pack matrices [N_i, K] of float32, float16 or bfloat16 bits, one below the other, or as a pair.

    Matrices of codes become panels of the same codes, if `format` has panels of 4 bits that hold them
    (`core.matrix_format.panel_group` is `group`); otherwise they are rounded as their values are.
    `biases`: one float32 vector [N_i] or None per part. Panels are shared out over `num_threads` threads.
    """
    where = order([p.shape[0] for p in parts], pair)
    stored = [p for p in parts if isinstance(p, StoredMatrix)]
    assert len(stored) in (0, len(parts)), "what differs in kind shares no matrix"
    bias = _bias(where, parts, biases)
    rows, cols = sum(p.shape[0] for p in parts), parts[0].shape[1]
    if stored and format == Format.I4 and all(panel_group(p.format, cols) == group for p in stored):
        panels = _code_panels(library, stored, group, where)
    else:
        arrays = [p.values() if isinstance(p, StoredMatrix) else p for p in parts]
        panels = _rounded_panels(library, arrays, format, group, where, num_threads)
    return Packed(format, act, rows, cols, group, pair, *panels, bias)


def _bias(where: npt.NDArray[np.int64], parts: Sequence[Weight], biases: Sequence[Array | None] | None) -> F32 | None:
    """Of all outputs in the order of the panels."""
    if biases is None or all(b is None for b in biases):
        return None
    whole = np.concatenate(
        [np.zeros(p.shape[0], np.float32) if b is None else b for p, b in zip(parts, biases, strict=True)]
    )
    return np.where(where < 0, np.float32(0), whole[where]).astype(np.float32)


def _code_panels(
    library: Any, parts: Sequence[StoredMatrix], group: int, where: npt.NDArray[np.int64]
) -> tuple[Array, Array | None]:
    """Panels of 4 bits (`csrc/include/penstock.h`) of codes as they are stored, a few at a time."""
    cols = parts[0].shape[1]
    num_groups = -(-cols // group)
    width = num_groups * group
    shape = Matrix(format=Format.I4, cols=cols, group=group)
    data = aligned(len(where) // PANEL * library.pst_panel_bytes(shape))
    scales = aligned(len(where) // PANEL * library.pst_panel_scale_bytes(shape))
    panels, halves = data.reshape(-1, width // 8, PANEL, 4), scales.view(np.float16).reshape(-1, num_groups, PANEL)
    starts = np.cumsum([0, *(p.shape[0] for p in parts)])
    step = max(1, _CHUNK_ELEMENTS // (PANEL * width))
    for first in range(0, len(panels), step):
        rows = where[first * PANEL : (first + step) * PANEL]
        codes = np.full((len(rows), width), 8, np.uint8)  # byte 8 is the value 0
        found = np.zeros((len(rows), num_groups), np.float16)
        for part, start, stop in zip(parts, starts, starts[1:], strict=False):
            (here,) = np.nonzero((rows >= start) & (rows < stop))
            if not here.size:
                continue
            # Outputs of one part lie in their order, so they are one run of its rows.
            low, high = int(rows[here[0]] - start), int(rows[here[-1]] - start) + 1
            codes[here, :cols] = part.codes(low, high) + np.uint8(8 - part.format.offset)
            (one,) = part.scales(low, high)
            found[here] = np.repeat(one, -(-num_groups // one.shape[1]), axis=1)[:, :num_groups]
        split = codes.reshape(-1, PANEL, width // 8, 2, 4).transpose(0, 2, 3, 1, 4)
        panels[first : first + step] = split[:, :, 0] | split[:, :, 1] << 4
        halves[first : first + step] = found.reshape(-1, PANEL, num_groups).transpose(0, 2, 1)
    return data, scales


def _rounded_panels(
    library: Any, parts: Sequence[Array], format: Format, group: int, where: npt.NDArray[np.int64], num_threads: int
) -> tuple[Array, Array | None]:
    """Panels that the library makes of plain numbers."""
    cols, dtype = parts[0].shape[1], parts[0].dtype
    assert all(p.shape[1] == cols and p.dtype == dtype and p.strides[1] == dtype.itemsize for p in parts)
    addresses = np.concatenate(
        [p.ctypes.data + np.arange(len(p), dtype=np.uint64) * np.uint64(p.strides[0]) for p in parts]
    )
    sources = np.where(where < 0, np.uint64(0), addresses[where])
    num_panels = len(where) // PANEL
    shape = Matrix(format=format, cols=cols, group=group)
    data_bytes, scale_bytes = library.pst_panel_bytes(shape), library.pst_panel_scale_bytes(shape)
    assert data_bytes > 0, f"{format!r} with groups of {group} does not exist"
    data = aligned(num_panels * data_bytes)
    scales = aligned(num_panels * scale_bytes) if scale_bytes else None
    scales_at = None if scales is None else scales.ctypes.data
    num_threads = min(num_threads, num_panels)

    def some(i: int) -> int:
        first, last = num_panels * i // num_threads, num_panels * (i + 1) // num_threads
        failed: int = library.pst_pack(
            shape, DTYPES[dtype], sources.ctypes.data, first, last, data.ctypes.data, scales_at
        )
        return failed

    if num_threads == 1:
        assert some(0) == 0, "the library can pack this"
    else:
        with ThreadPoolExecutor(num_threads) as threads:  # the library works without Python's lock
            assert not any(threads.map(some, range(num_threads))), "the library can pack this"
    return data, scales
