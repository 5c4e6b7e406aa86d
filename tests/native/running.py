"""One native operation, run on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32
from penstock.ops.native.abi import SELECTED, TOKENS
from penstock.ops.native.library import libraries, open_library, usable
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, Pool, StepMemory
from penstock.ops.plan import I32, GroupPlan, Planes, StepPlan

ISAS = sorted(usable(), key=usable().__getitem__) if libraries() else []
THREADS = (1, 2, 3)
pytestmark_native = pytest.mark.skipif(not ISAS, reason="no native library was built: no C++17 compiler")
each_isa = pytest.mark.parametrize("isa", ISAS or [pytest.param("none", marks=pytestmark_native)])
each_threads = pytest.mark.parametrize("threads", THREADS)


@cache
def pool(isa: str, threads: int) -> Pool:
    return Pool(open_library(libraries()[isa]), threads, spin_us=5)


def plan_of(
    bounds: Sequence[int], starts: Sequence[int], groups: Sequence[GroupPlan] = (), token_ids: I32 | None = None
) -> StepPlan:
    """Sequence b runs tokens bounds[b] ... bounds[b+1] of the step, the first at position starts[b]."""
    lens = np.diff(bounds)
    positions = np.concatenate([s + np.arange(n) for s, n in zip(starts, lens, strict=True)]).astype(np.int32)
    ids = np.zeros(len(positions), np.int32) if token_ids is None else token_ids
    ends = np.asarray(starts) + lens
    return StepPlan(
        ids, positions, np.asarray(bounds, np.int32), ends.astype(np.int32), np.zeros(0, np.int32), tuple(groups)
    )


def execute(
    isa: str, threads: int, inputs: Sequence[F32], out_width: int | None,
    make: Callable[[list[int], int], NativeOp | list[NativeOp]], *, plan: StepPlan | None = None,
    planes: Sequence[Planes] = (), rows: npt.NDArray[np.int32] | None = None, out_rows: int = TOKENS,
    on: Pool | None = None,
) -> F32:  # fmt: skip
    """The output register, copied, after `make(input registers, output register)` has run once.

    Every input [T, width] has a register; the output has one of its own, or (None) is the first input's: in place.
    Memory around each row of the output's buffer is checked to be left alone. `on`: other threads than `pool`'s.
    """
    num_tokens = len(inputs[0])
    plan = plan or plan_of([0, num_tokens], [0])
    rows = np.zeros(0, np.int32) if rows is None else rows
    layout = Layout()
    numbers = [layout.view(layout.buffer(x.shape[1] + 7), 3, x.shape[1]) for x in inputs]
    guard = 5
    out = numbers[0]
    if out_width is not None:
        out = layout.view(layout.buffer(out_width + 2 * guard, out_rows), guard, out_width)
    made = make(numbers, out)
    program = NativeProgram(
        on or pool(isa, threads), made if isinstance(made, list) else [made], layout, planes,
        max_tokens=num_tokens + 3, max_rows=max(1, len(rows)) + 2,
    )  # fmt: skip
    for array in program.arena:
        array[:] = np.float32(-77.25)
    for x, number in zip(inputs, numbers, strict=True):
        program.values(number, num_tokens)[:] = x
    memory = StepMemory(len(planes))
    program.run(memory.args(plan, rows))
    count = len(rows) if out_width is not None and out_rows == SELECTED else num_tokens
    view = layout.registers[out]
    whole = program.arena[view.buffer]
    assert np.all(whole[:, : view.start] == -77.25), "nothing before the register's columns is written"
    assert np.all(whole[:, view.start + view.width :] == -77.25), "nothing behind the register's columns is written"
    assert np.all(whole[count:] == -77.25), "no row beyond the step's is written"
    return program.values(out, count).copy()


def within(actual: npt.NDArray[Any], expected: npt.NDArray[Any], bound: npt.NDArray[Any] | float) -> None:
    """|actual - expected| <= bound, elementwise, in float64."""
    error = np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
    assert np.all(error <= bound), f"worst {error.max()} at {np.unravel_index(error.argmax(), error.shape)}"
