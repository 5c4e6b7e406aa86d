"""Weights packed for the native products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.panels import Panels
from penstock.ops.native.abi import PANEL, Act, Code, Format, Matrix, Scale, Zero
from penstock.ops.native.packers import Packer, code_packer, ordered_inputs, value_packer, with_factor
from penstock.ops.stored import StoredMatrix, Weight

if TYPE_CHECKING:
    from penstock.ops.native.filed import FiledStack

Array = npt.NDArray[Any]
ALIGNMENT = 64


def aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that begins on a cache line. Not touched yet."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def described(format: int, act: int, rows: int, cols: int, pair: bool = False, panels: Panels | None = None) -> Matrix:
    """`pst_matrix` without a pointer: what sizes are asked of. `panels`: of PST_M_BLOCK."""
    if panels is None:
        return Matrix(format=format, act=act, rows=rows, cols=cols, pair=int(pair))
    return Matrix(
        format=format, act=act, rows=rows, cols=cols, group=panels.group, pair=int(pair), code=Code[panels.code],
        scale=Scale[panels.scale], zero=Zero[panels.zero], offset=panels.offset, factor=panels.factor,
    )  # fmt: skip


class Packed:
    """One matrix [N, K] in panels, or a stack of X matrices of one shape and format, one behind the other.

    Attributes:
        structs: `pst_matrix` [X], which describe them to the library; `address` is that of the first, which is
            `struct`. They point into `data`, `bias`, `order` and a table.
        num_rows: N of one matrix without padding; of a pair, gate and up together.
        panels: of PST_M_BLOCK, `factor` being that of one matrix; else None.
        filed: where a stack's matrices are, if they are not in memory: whoever runs them has to fetch them (`leave`).
        factors: those of a stack's matrices of PST_M_BLOCK, in place of that one.
        bias: [padded N], of a stack one behind the other.
        order: [K], which component of a row each input of the panels is, or None: they are in their order. Of a stack
            one behind the other.
        home: what has to be in memory while it is read (`resident.Segment`); None: it always is.
    """

    home: Any = None

    def __init__(
        self, format: Format, act: Act, num_rows: int, num_cols: int, pair: bool, data: Array, bias: F32 | None = None,
        *, panels: Panels | None = None, order: npt.NDArray[np.int32] | None = None, count: int = 1,
        factors: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self.num_rows, self.num_cols, self.count = num_rows, num_cols, count
        self.data, self.bias, self.panels, self.order = data, bias, panels, order
        self.factors = tuple(factors)
        self.filed: FiledStack | None = None
        self._table = None if panels is None or not panels.table else np.array(panels.table, np.float32)
        one = described(format, act, num_rows, num_cols, pair, panels)
        if self._table is not None:
            one.table = self._table.ctypes.data
        self.structs = (Matrix * count)(*[one] * count)
        arrays = [(n, a.ctypes.data, a.nbytes // count) for n, a in self._each() if a is not None]
        for i, struct in enumerate(self.structs):
            for name, start, num_bytes in arrays:
                setattr(struct, name, start + i * num_bytes)
            if self.factors:
                struct.factor = self.factors[i]
        self.struct = self.structs[0]

    def leave(self, filed: FiledStack) -> None:
        """Its matrices stay in their file. Until they are moved (`NativeProgram.move`) all are zeros."""
        self.filed, self._zeros = filed, filed.zeros()
        for struct in self.structs:
            struct.data = self._zeros.ctypes.data

    def _each(self) -> tuple[tuple[str, Array | None], ...]:
        return ("data", self.data), ("bias", self.bias), ("order", self.order)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structs)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def part(self, first: int, num_rows: int) -> Packed:
        """Outputs from `first`, which begins a panel, on, in this one's memory; of one matrix that is no pair."""
        assert self.count == 1, "a stack has no part"
        assert first % PANEL == 0, f"output {first} begins no panel"
        m, padded = self.struct, -(-self.num_rows // PANEL) * PANEL
        last = first + -(-num_rows // PANEL) * PANEL
        data = self.data[len(self.data) * first // padded : len(self.data) * last // padded]
        bias = None if self.bias is None else self.bias[first:last]
        found = Packed(
            Format(m.format), Act(m.act), num_rows, self.num_cols, False, data, bias, panels=self.panels,
            order=self.order,
        )  # fmt: skip
        found.home = self.home
        return found

    def values(self, library: Any) -> F32:
        """What the panels of a matrix (of a stack: the first) stand for, [padded N, K], in the order of the panels;
        inputs in that of rows."""
        num_panels = self.data.nbytes // self.count // library.pst_panel_bytes(self.struct)
        out = np.empty((num_panels, PANEL, self.num_cols), np.float32)
        for p in range(num_panels):
            assert library.pst_unpack(self.struct, p, out[p].ctypes.data) == 0
        return out.reshape(-1, self.num_cols)


class Segments:
    """Matrices whose outputs lie one after the other, as one product takes them; or all of some stacks."""

    def __init__(self, matrices: Sequence[Packed]) -> None:
        self.matrices = list(matrices)
        structs = [struct for m in self.matrices for struct in m.structs]
        self._structs = (Matrix * len(structs))(*structs)

    def __len__(self) -> int:
        return len(self._structs)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._structs)


def matrices_at(pointer: Any) -> Sequence[Packed]:
    """Those that a pointer of an operation leads to."""
    if isinstance(pointer, Segments):
        return pointer.matrices
    return (pointer,) if isinstance(pointer, Packed) else ()


def order(num_rows: Sequence[int], pair: bool, heads: int = 0) -> npt.NDArray[np.int64]:
    """Which row of the stacked parts each output of the panels is, -1 for padding: [panels * 64].

    Parts lie one after the other; of a pair, each panel takes 32 rows of the first part, then the same of the second.
    `heads`: equal runs of rows that begin with a panel each.
    """
    if heads:
        (total,) = num_rows
        each = total // heads
        padded: npt.NDArray[np.int64] = np.full((heads, -(-each // PANEL) * PANEL), -1, np.int64)
        padded[:, :each] = np.arange(total).reshape(heads, each)
        return padded.reshape(-1)
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
    library: Any, parts: Sequence[Weight], format: Format, act: Act, *, pair: bool = False,
    panels: Panels | None = None, as_stored: bool = False, biases: Sequence[Array | None] | None = None,
    heads: int = 0, num_threads: int = 1,
) -> Packed:  # fmt: skip
    """Pack matrices [N_i, K] of float32, float16 or bfloat16 bits, one below the other, or as a pair.

    `panels`: of Format.BLOCK. `as_stored`: all parts are codes that such panels hold as they are; else their values are
    packed, rounded to what the format holds. `biases`: one float32 vector [N_i] or None per part. `heads`: of the only
    part, which then has a matrix for each, with panels of its own (PST_LATENT); N counts what fills them up. Panels are
    shared out over `num_threads` threads.
    """
    where = order([p.shape[0] for p in parts], pair, heads)
    bias = _bias(where, parts, biases)
    rows, cols = len(where) if heads else sum(p.shape[0] for p in parts), parts[0].shape[1]
    inputs = None
    if as_stored:
        stored = [p for p in parts if isinstance(p, StoredMatrix)]
        assert panels is not None, "codes lie in panels of codes"
        inputs, panels = ordered_inputs(stored[0]), with_factor(panels, stored[0])
    num_panels = len(where) // PANEL
    data_bytes = library.pst_panel_bytes(described(format, act, rows, cols, pair, panels))
    assert data_bytes > 0, f"{format!r} as {panels} does not exist"
    found = Packed(
        format, act, rows, cols, pair, aligned(num_panels * data_bytes), bias, panels=panels, order=inputs
    )  # fmt: skip
    if as_stored and panels is not None:
        work = code_packer(library, found.struct, panels, stored, where, inputs)
    else:
        work = value_packer(library, found.struct, parts, where)
    _in_threads(work, num_panels, num_threads)
    return found


def _bias(where: npt.NDArray[np.int64], parts: Sequence[Weight], biases: Sequence[Array | None] | None) -> F32 | None:
    """Of all outputs in the order of the panels."""
    if biases is None or all(b is None for b in biases):
        return None
    whole = np.concatenate(
        [np.zeros(p.shape[0], np.float32) if b is None else b for p, b in zip(parts, biases, strict=True)]
    )
    return np.where(where < 0, np.float32(0), whole[where]).astype(np.float32)


def _in_threads(work: Packer, num_panels: int, num_threads: int) -> None:
    num_threads = min(num_threads, num_panels)
    if num_threads == 1:
        assert work(0, num_panels) == 0, "the library can pack this"
        return
    cuts = [num_panels * i // num_threads for i in range(num_threads + 1)]
    with ThreadPoolExecutor(num_threads) as threads:  # the library works without Python's lock
        assert not any(threads.map(work, cuts[:-1], cuts[1:])), "the library can pack this"
