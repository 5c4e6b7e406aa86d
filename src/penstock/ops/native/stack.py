"""Stacks of packed matrices: the experts of a layer, all of one shape and format, in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.core.panels import Panels
from penstock.ops.native.abi import PANEL, Act, Format
from penstock.ops.native.matrix import Array, Packed, aligned, described, order
from penstock.ops.native.packers import Packer, code_packer, ordered_inputs, value_packer, with_factor
from penstock.ops.stored import StoredMatrix, Weight

if TYPE_CHECKING:
    from penstock.ops.native.filed import SpillFile

_TASKS = 4
"""Of each thread: few, because they cost something; more than one, because threads are not equally fast."""


def stackable(a: Weight, b: Weight) -> bool:
    """Whether two weights of one shape can be matrices of one stack: of one type; codes of one format. Each may have an
    order of inputs of its own, but one that has none goes with those that have none."""
    if isinstance(a, StoredMatrix) and isinstance(b, StoredMatrix):
        return a.format == b.format and (a.order is None) == (b.order is None)
    return isinstance(a, StoredMatrix) == isinstance(b, StoredMatrix) and bool(a.dtype == b.dtype)


def pack_stack(
    library: Any, matrices: Sequence[Sequence[Weight]], format: Format, act: Act, *, pair: bool = False,
    panels: Panels | None = None, as_stored: bool = False, biases: Sequence[Sequence[Array | None]],
    num_threads: int = 1, spill: SpillFile | None = None,
) -> Packed:  # fmt: skip
    """Pack X matrices of one shape, each of one part or a pair of gate and up. The rest is as in `matrix.pack`; what is
    shared out over threads are the matrices. `spill`: where they stay, instead of in memory."""
    first = matrices[0]
    rows, cols = sum(p.shape[0] for p in first), first[0].shape[1]
    where = order([p.shape[0] for p in first], pair)
    num_panels = len(where) // PANEL
    orders: npt.NDArray[np.int32] | None = None
    factors: list[float] = []
    whole = panels
    if as_stored:
        assert panels is not None, "codes lie in panels of codes"
        stored = [m[0] for m in matrices if isinstance(m[0], StoredMatrix)]
        found = [ordered_inputs(m) for m in stored]
        if found[0] is not None:
            orders = np.stack([o for o in found if o is not None])
        if panels.has_factor:
            factors = [with_factor(panels, m).factor for m in stored]
            whole = msgspec.structs.replace(panels, factor=factors[0], has_factor=False)
    data_bytes = library.pst_panel_bytes(described(format, act, rows, cols, pair, whole))
    assert data_bytes > 0, f"{format!r} as {panels} does not exist"
    num_bytes = len(matrices) * num_panels * data_bytes
    offset, room = (0, aligned(num_bytes)) if spill is None else spill.room(num_bytes)
    packed = Packed(
        format, act, rows, cols, pair, room, _bias(where, biases),
        panels=whole, order=orders, count=len(matrices), factors=factors,
    )  # fmt: skip

    def some(numbers: range) -> bool:
        return any(one(i) for i in numbers)

    def one(i: int) -> int:
        parts, struct = matrices[i], packed.structs[i]
        work: Packer
        if as_stored and panels is not None:
            codes = [p for p in parts if isinstance(p, StoredMatrix)]
            inputs = None if orders is None else orders[i]
            work = code_packer(library, struct, panels, codes, where, inputs)
        else:
            work = value_packer(library, struct, parts, where)
        return work(0, num_panels)

    tasks = min(len(matrices), _TASKS * num_threads)
    cuts = [len(matrices) * i // tasks for i in range(tasks + 1)]
    with ThreadPoolExecutor(num_threads) as threads:  # the library works without Python's lock
        assert not any(threads.map(some, map(range, cuts, cuts[1:]))), "the library can pack this"
    if spill is not None:
        packed.leave(spill.put(room, offset, len(matrices)))
    return packed


def _bias(where: npt.NDArray[np.int64], biases: Sequence[Sequence[Array | None]]) -> F32 | None:
    """Of all outputs of all matrices in the order of the panels, one matrix behind the other."""
    if all(b is None for own in biases for b in own):
        return None
    whole = [np.concatenate([np.asarray(b, np.float32) for b in own if b is not None]) for own in biases]
    return np.where(where < 0, np.float32(0), np.stack(whole)[:, where]).astype(np.float32).reshape(-1)
