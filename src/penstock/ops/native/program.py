"""A list of native operations over registers, run by one call per step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.core.kv_codec import scales_name
from penstock.core.selection import PageReads, TokenReads
from penstock.ops.native.abi import (
    SELECTED,
    TOKENS,
    DType,
    Group,
    Kind,
    Pages,
    Plane,
    Register,
    Rotation,
    SharedExperts,
    StepArgs,
)
from penstock.ops.native.abi import Op as OpStruct
from penstock.ops.native.packers import DTYPES
from penstock.ops.plan import GroupPlan, Planes, StepPlan

_ERROR_BYTES = 400
_LINE = 16  # numbers of a cache line


class Pool:
    """Threads of one library. `num_threads` counts the caller's."""

    def __init__(self, library: Any, num_threads: int, *, spin_us: int = 20, pin: bool = False) -> None:
        self.library = library
        self.num_threads = num_threads
        self.handle = library.pst_pool_new(num_threads, spin_us, int(pin))
        if not self.handle:
            raise EngineError(f"{num_threads} compute threads could not be started")

    def watch(self, progress: int) -> None:
        """Count finished operations in the 64-bit word at this address, which must outlive the pool."""
        self.library.pst_pool_watch(self.handle, progress)

    def close(self) -> None:
        """End the threads. Nothing may run."""
        if self.handle:
            self.library.pst_pool_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class NativeOp:
    """One operation: `pst_op` with names. `keep` are the objects that `pointers` point into."""

    kind: Kind
    inputs: tuple[int, ...] = ()
    out: int = -1
    n: tuple[int, ...] = ()
    f: tuple[float, ...] = ()
    pointers: tuple[Any, ...] = ()
    """Arrays, objects with an `address`, or None."""


class RawKeys:
    """The third pointer of a PST_ATTEND whose plane holds raw keys: they are rotated when read.

    `table`: cosines and sines [2, num_positions, half], as PST_ROPE has them; components first ... first + 2 * half
    of a key turn. The table must be C-contiguous float32; it is kept.
    """

    def __init__(self, table: F32, *, first: int = 0, interleaved: bool = False) -> None:
        assert table.dtype == np.float32, "a table is float32"
        assert table.shape[:-2] == (2,), "a table is [2, positions, half]"
        assert table.flags.c_contiguous, "a table has no gaps"
        self._table = table
        self.struct = Rotation(table.ctypes.data, table.shape[1], first, table.shape[2], int(interleaved))

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


class ChosenPages:
    """The fourth pointer of a PST_ATTEND whose single tokens read some pages only, by the bounds in planes number `low`
    and `high` of the group, or tokens that PST_REHEARSE chose. No sequence has more than `max_tokens` tokens.
    """

    def __init__(self, reads: PageReads | TokenReads, low: int, high: int, max_tokens: int) -> None:
        self.struct = Pages(reads.share, low, high, reads.tokens or 0, reads.recent, max_tokens)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


class ExpertShare:
    """The fourth pointer of a PST_EXPERTS that ranks share out, `exchange` being where they do. One of both: `widths`,
    of every rank's columns between the products; `starts` [ranks + 1], where each rank's experts begin."""

    def __init__(self, exchange: Any, widths: Sequence[int] = (), starts: Sequence[int] = ()) -> None:
        self._keep = exchange, np.array(widths, np.int32), np.array(starts, np.int32)
        _, columns, experts = self._keep
        self.struct = SharedExperts(exchange.address, *(_address(x) if len(x) else None for x in (columns, experts)))

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


def _address(x: Any) -> int | None:
    if x is None:
        return None
    if isinstance(x, np.ndarray):
        assert x.flags.c_contiguous
        return int(x.ctypes.data)
    return int(x.address)


def _struct(op: NativeOp) -> OpStruct:
    def filled(values: Sequence[Any], size: int, rest: Any) -> list[Any]:
        assert len(values) <= size
        return [*values, *[rest] * (size - len(values))]

    return OpStruct(
        int(op.kind), (ctypes.c_int32 * 6)(*filled(op.inputs, 6, -1)), op.out,
        (ctypes.c_int32 * 12)(*filled(op.n, 12, 0)), (ctypes.c_float * 4)(*filled(op.f, 4, 0.0)),
        (ctypes.c_void_p * 4)(*filled([_address(p) for p in op.pointers], 4, None)),
    )  # fmt: skip


@dataclass(frozen=True)
class View:
    """A register: columns start ... start+width of a buffer [rows, its width]."""

    buffer: int
    start: int
    width: int


@dataclass
class Layout:
    """Buffers and the registers that look at them."""

    buffers: list[tuple[int, int]] = field(default_factory=list)
    """Width, and TOKENS or SELECTED."""
    registers: list[View] = field(default_factory=list)

    def buffer(self, width: int, rows: int = TOKENS) -> int:
        self.buffers.append((width, rows))
        return len(self.buffers) - 1

    def view(self, buffer: int, start: int = 0, width: int | None = None) -> int:
        whole, _ = self.buffers[buffer]
        self.registers.append(View(buffer, start, whole - start if width is None else width))
        return len(self.registers) - 1

    def register(self, width: int, rows: int = TOKENS) -> int:
        """A buffer and a register for all of it."""
        return self.view(self.buffer(width, rows))


class NativeProgram:
    """The C program, its arena and its planes.

    `planes[g]` maps plane name -> storage, as `runner.storage` holds it; operations name planes by their place in that
    mapping. Raises: EngineError, with the library's sentence, for operations that do not fit.
    """

    def __init__(
        self, pool: Pool, ops: Sequence[NativeOp], layout: Layout, planes: Sequence[Planes], *, max_tokens: int,
        max_rows: int,
    ) -> None:  # fmt: skip
        self._pool, self._library = pool, pool.library
        self.num_ops = len(ops)
        self._keep = (list(ops), list(planes))
        self.arena: list[F32] = [
            _on_lines(max_tokens if rows == TOKENS else max_rows, width) for width, rows in layout.buffers
        ]
        self._layout = layout
        registers = (Register * len(layout.registers))()
        for i, v in enumerate(layout.registers):
            base, rows = self.arena[v.buffer], layout.buffers[v.buffer][1]
            registers[i] = Register(base.ctypes.data + 4 * v.start, base.strides[0] // 4, v.width, rows)
        structs = (OpStruct * len(ops))(*[_struct(op) for op in ops])
        flat = [_plane(name, group) for group in planes for name in group]
        starts = np.cumsum([0, *(len(group) for group in planes)]).astype(np.int32)
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.handle = self._library.pst_program_new(
            structs, len(ops), registers, len(layout.registers), (Plane * len(flat))(*flat), starts.ctypes.data,
            len(planes), max_tokens, max_rows, pool.num_threads, error, _ERROR_BYTES,
        )  # fmt: skip
        if not self.handle:
            raise EngineError(f"the native program could not be made: {error.value.decode()}")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.pst_program_free(self.handle)
            self.handle = None

    def values(self, register: int, num_rows: int) -> F32:
        """What a register holds: a view [num_rows, width] of the arena."""
        v = self._layout.registers[register]
        return self.arena[v.buffer][:num_rows, v.start : v.start + v.width]

    def run(self, args: StepArgs, first: int = 0, last: int | None = None) -> None:
        """Operations first ... last-1 of a step that `step_args` made."""
        end = self.num_ops if last is None else last
        failed = self._library.pst_program_run(self.handle, self._pool.handle, args, first, end)
        assert failed == 0, "the step fits the program"

    def share_prefixes(self, shares: bool) -> None:
        """Whether attention reads pages that sequences of a step have in common once for all of them, as at first."""
        self._library.pst_program_share(self.handle, shares)

    def move(self, op: int, pointer: int, index: int, address: int) -> None:
        """Between runs: the panels of a matrix of a PST_EXPERTS lie at `address` from now on."""
        failed = self._library.pst_program_move(self.handle, op, pointer, index, address)
        assert failed == 0, "operation, pointer and index name a matrix of experts"

    def keys_read(self) -> int:
        """Keys of one kv head that softmax attention has looked up so far, as many values with them."""
        return int(self._library.pst_program_keys_read(self.handle))

    def keys_shared(self) -> int:
        """How many more it would have looked up, had it read for each what several sequences have in common."""
        return int(self._library.pst_program_keys_shared(self.handle))

    def profile(self) -> npt.NDArray[np.int64]:
        """Nanoseconds of each operation in the runs since the first call of this: [num_ops]."""
        out = np.zeros(self.num_ops, np.int64)
        self._library.pst_program_profile(self.handle, out.ctypes.data)
        return out


def _on_lines(num_rows: int, width: int) -> F32:
    """Zeros [num_rows, width]. Every row begins on a cache line: else each vector of 16 lies on two."""
    stride = -(-width // _LINE) * _LINE
    raw = np.zeros(num_rows * stride + _LINE, np.float32)
    start = -raw.ctypes.data % (4 * _LINE) // 4
    return raw[start : start + num_rows * stride].reshape(num_rows, stride)[:, :width]


def _plane(name: str, group: Planes) -> Plane:
    """Paged [num_pages, S, heads, dim]; bfloat16 as uint16; int8 with a plane of scales in the same group. Of a slot
    group [num_pages, heads, dim]."""
    array = group[name] if group[name].ndim == 4 else group[name][:, None]
    dtype, scales = DType.I8, -1
    if array.dtype == np.int8:
        scales = list(group).index(scales_name(name, "int8"))
    else:
        dtype = DTYPES[array.dtype]
    page, token, head, _ = (s // array.dtype.itemsize for s in array.strides)
    return Plane(array.ctypes.data, dtype, array.shape[2], array.shape[3], scales, page, token, head)


class StepMemory:
    """Turns plans into `pst_step`, in memory that the next step uses again."""

    def __init__(self, num_groups: int, max_seqs: int = 256, ranks: Sequence[int] = ()) -> None:
        """`ranks`: over how many the tokens of each group are shared out; nothing: one."""
        self._ranks = list(ranks) or [1] * num_groups
        self._groups = (Group * max(1, num_groups))()
        self._num_groups = num_groups
        self._reserve(max_seqs)

    def _reserve(self, num_seqs: int) -> None:
        shape = (self._num_groups, num_seqs)
        self._size = num_seqs
        self._tables = np.zeros(shape, np.uint64)
        self._shared = np.zeros(shape, np.int32)
        self._strides = np.zeros(shape, np.int32)
        self._filled: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(self._num_groups)]
        """The tables whose addresses are in `_tables`: whoever made them keeps their memory where it is."""
        self._dropped = np.zeros(shape, np.uint64)
        self._forgotten: list[tuple[npt.NDArray[np.int32] | None, ...] | None] = [None] * self._num_groups
        """What the addresses in `_dropped` are of."""
        for group in self._groups:
            group.dropped = group.held = None
        self._held = np.zeros(shape, np.uint64)
        self._last: tuple[StepPlan, npt.NDArray[np.int32], StepArgs] | None = None

    def args(self, plan: StepPlan, rows: npt.NDArray[np.int32]) -> StepArgs:
        """The plan's arrays, and this object, must outlive the run; `rows` int32 [R]."""
        last = self._last
        if last is not None and last[0] is plan and last[1] is rows:
            return last[2]
        num_seqs = len(plan.query_start_loc) - 1
        if num_seqs > self._size:
            self._reserve(2 * num_seqs)
        for g, group in enumerate(plan.groups):
            self._fill(g, group)
            self._forget(g, group.dropped)
        for g in range(len(plan.groups), self._num_groups):  # of a step that looks at no cache
            self._forget(g, None)
        last = self._last  # `_reserve` forgets it
        if (
            last is not None and last[1] is rows and last[0].token_ids is plan.token_ids
            and last[0].positions is plan.positions and last[0].query_start_loc is plan.query_start_loc
            and last[0].mask is plan.mask and last[0].choose_from is plan.choose_from
        ):  # fmt: skip
            self._last = (plan, rows, last[2])
            return last[2]
        made = StepArgs(
            len(plan.token_ids), num_seqs, len(rows), self._num_groups, plan.token_ids.ctypes.data,
            plan.positions.ctypes.data, plan.query_start_loc.ctypes.data, rows.ctypes.data,
            ctypes.addressof(self._groups), None if plan.mask is None else plan.mask.ctypes.data,
            None if plan.choose_from is None else plan.choose_from.ctypes.data,
        )  # fmt: skip
        self._last = (plan, rows, made)
        return made

    def _fill(self, g: int, group: GroupPlan) -> None:
        filled = self._filled[g]
        if len(filled) == len(group.tables) and all(map(is_, filled, group.tables)):
            return
        tables, shared, strides = self._tables[g], self._shared[g], self._strides[g]
        for b, table in enumerate(group.tables):
            if group.held is not None:
                self._held[g][b] = group.held[b].ctypes.data
            if b < len(filled) and table is filled[b]:
                continue
            tables[b] = table.__array_interface__["data"][0]
            shared[b], strides[b] = table.shape[0] == 1, table.strides[0] // table.itemsize
        self._filled[g] = list(group.tables)
        self._groups[g] = Group(
            group.num_layers, group.block_size // self._ranks[g], tables.ctypes.data, shared.ctypes.data,
            strides.ctypes.data, self._groups[g].dropped,
            None if group.held is None else self._held[g].ctypes.data,
        )  # fmt: skip

    def _forget(self, g: int, dropped: tuple[npt.NDArray[np.int32] | None, ...] | None) -> None:
        if dropped is self._forgotten[g]:
            return
        self._forgotten[g] = dropped
        if dropped is None or all(lines is None for lines in dropped):
            self._groups[g].dropped = None
            return
        addresses = self._dropped[g]
        for b, lines in enumerate(dropped):
            assert lines is None or (lines.dtype == np.int32 and lines.flags.c_contiguous), "int32, without gaps"
            addresses[b] = 0 if lines is None else lines.ctypes.data
        self._groups[g].dropped = addresses.ctypes.data


__all__ = [
    "SELECTED",
    "TOKENS",
    "ChosenPages",
    "Layout",
    "NativeOp",
    "NativeProgram",
    "Pool",
    "RawKeys",
    "StepMemory",
    "View",
]
