"""Adapters as PST_ADAPT reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.adapters import LowRank, Numbers, tokens_of
from penstock.ops.native.abi import PANEL, Adapter, TokenAdapters
from penstock.ops.native.packers import DTYPES
from penstock.ops.plan import StepPlan

_LANES, _CHAINS = 16, 4
Prepared = Mapping[str, tuple[Adapter, tuple[Numbers | None, ...]]]
"""By weight: `pst_adapter`, and what it points into."""


class _Slots:
    """`pst_adapter` [count] of one product, and the arrays that they point into."""

    def __init__(self, count: int) -> None:
        self.structs = (Adapter * count)()
        self.held: list[tuple[Numbers | None, ...]] = [()] * count

    @property
    def address(self) -> int:
        return ctypes.addressof(self.structs)


class _StepAdapters:
    def __init__(self) -> None:
        self.struct = TokenAdapters(None, None, 0)
        self.held: tuple[npt.NDArray[np.int32], ...] = ()

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


class NativeTable:
    """See `ops.adapters.AdapterTable`. Changed between two runs only, by the thread that runs.

    `step`: which adapter each token of the step has. `largest`: the largest rank there has been, filled up.
    """

    def __init__(self, count: int, max_rank: int) -> None:
        self._count = count
        self.largest = _filled(max_rank, _CHAINS)
        self.step = _StepAdapters()
        self._slots: dict[str, _Slots] = {}

    def of(self, name: str) -> _Slots:
        """Of the product of a weight."""
        return self._slots.setdefault(name, _Slots(self._count))

    def prepare(self, parts: Mapping[str, LowRank]) -> Prepared:
        return {name: packed(part) for name, part in parts.items()}

    def put(self, number: int, prepared: Prepared) -> None:
        self.drop(number)
        for name, (struct, held) in prepared.items():
            slots = self.of(name)
            slots.structs[number], slots.held[number] = struct, held

    def drop(self, number: int) -> None:
        for slots in self._slots.values():
            slots.structs[number], slots.held[number] = Adapter(), ()

    def begin(self, plan: StepPlan) -> None:
        """The run that follows is of this plan, which has adapters."""
        assert plan.adapters is not None, "a step without adapters needs no table"
        of_token = np.ascontiguousarray(tokens_of(plan.adapters, plan.query_start_loc), np.int32)
        order = np.argsort(of_token, kind="stable").astype(np.int32)
        order = order[np.count_nonzero(of_token < 0) :]
        self.step.held = (of_token, order)
        self.step.struct.of_token, self.step.struct.order = of_token.ctypes.data, order.ctypes.data
        self.step.struct.count = len(order)


def packed(part: LowRank) -> tuple[Adapter, tuple[Numbers | None, ...]]:
    """`pst_adapter`, and what it points into."""
    rank, cols = part.a.shape
    rows = len(part.b)
    ranks = _filled(rank, _CHAINS)
    a = np.zeros((ranks, _filled(cols, _LANES)), part.a.dtype)
    a[:rank, :cols] = part.a
    b = np.zeros((-(-rows // PANEL), ranks, PANEL), part.b.dtype)
    whole = np.zeros((len(b) * PANEL, rank), part.b.dtype)
    whole[:rows] = part.b
    b[:, :rank] = whole.reshape(len(b), PANEL, rank).transpose(0, 2, 1)
    gain, shift = (None if v is None else _vector(v) for v in (part.gain, part.shift))
    held = (a, b, gain, shift)
    pointers = [None if v is None else v.ctypes.data for v in held]
    return Adapter(*pointers, int(DTYPES[a.dtype]), ranks, part.factor), held


def _vector(v: F32) -> F32:
    out = np.zeros(_filled(len(v), _LANES), np.float32)
    out[: len(v)] = v
    return out


def _filled(n: int, to: int) -> int:
    return -(-n // to) * to
