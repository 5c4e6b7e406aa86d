"""Adapters on a device: who has which, and models whose steps may have some.

As natively, steps in which nobody has one run the plain program and its graphs; the others run one with places for
them, over the same matrices, made anew when an adapter comes that changes another product. `ops.adapters` has the
formula. What is added is of the type that the product has; matrices of adapters are of 16 bits where the model's are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.forward import TorchForward
from penstock.backends.gpu.step import HostRead, TorchStep
from penstock.backends.gpu.warm import capture_beside
from penstock.base.bf16 import widen
from penstock.model.forward import StepLimits
from penstock.model.graph import NO_LAYER, Graph
from penstock.ops.adapters import LowRank, Numbers
from penstock.ops.plan import StepPlan
from penstock.ops.stored import StoredMatrix

_RANK_STEP, _FIELDS = 16, 6
"""As `kernels.adapters` has them, which cannot be imported without Triton."""


class _Part(NamedTuple):
    """`LowRank` on the device: its matrices have the rank filled up with zeros."""

    a: Tensor
    b: Tensor
    factor: float
    gain: Tensor | None
    shift: Tensor | None


class _Slots:
    """What each adapter does to one product."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.parts: list[_Part | None] = [None] * count
        self.table = torch.zeros((count, _FIELDS), dtype=torch.int64, device=device)

    def put(self, number: int, part: _Part | None) -> None:
        self.parts[number] = part
        fields = [0] * _FIELDS
        if part is not None:
            tensors = (part.a, part.b, part.gain, part.shift)
            fields[:4] = [0 if t is None else t.data_ptr() for t in tensors]
            fields[4:] = [len(part.a), int(np.float32(part.factor).view(np.int32))]
        self.table[number] = torch.tensor(fields, dtype=torch.int64).to(self.table.device)


class TorchTable:
    """See `ops.adapters.AdapterTable`. `adapt`: the operation on it; `counts`: of its calls."""

    def __init__(
        self, device: torch.device, count: int, max_rank: int, kind: torch.dtype, *, kernels: bool, exact: bool,
        counts: Counter[str],
    ) -> None:  # fmt: skip
        """`exact`: without kernels, rows are computed by themselves."""
        self._device, self._count, self._max_rank, self._exact = device, count, max_rank, exact
        self._like = torch.zeros(1, dtype=kind, device=device)
        self._slots: dict[str, _Slots] = {}
        self._counts = counts
        self.adapt: Callable[..., Tensor] = _by_kernels(self._like, max_rank, counts) if kernels else self._plainly

    def of(self, name: str) -> _Slots:
        """Of the product of a weight."""
        if name not in self._slots:
            self._slots[name] = _Slots(self._count, self._device)
        return self._slots[name]

    def prepare(self, parts: Mapping[str, LowRank]) -> Mapping[str, _Part]:
        return {name: self._placed(part) for name, part in parts.items()}

    def put(self, number: int, prepared: Mapping[str, _Part]) -> None:
        self.drop(number)
        for name, part in prepared.items():
            self.of(name).put(number, part)

    def drop(self, number: int) -> None:
        for slots in self._slots.values():
            if slots.parts[number] is not None:
                slots.put(number, None)

    def _placed(self, part: LowRank) -> _Part:
        rank, cols = part.a.shape
        filled = -(-rank // _RANK_STEP) * _RANK_STEP
        a = torch.zeros((filled, cols), dtype=self._like.dtype)
        b = torch.zeros((len(part.b), filled), dtype=self._like.dtype)
        a[:rank], b[:, :rank] = _floats(part.a), _floats(part.b)
        gain, shift = (None if v is None else _floats(v).to(self._device) for v in (part.gain, part.shift))
        return _Part(a.to(self._device), b.to(self._device), part.factor, gain, shift)

    def _plainly(self, x: Tensor, y: Tensor, step: TorchStep, slots: _Slots) -> Tensor:
        """Mutates: y."""
        if step.static is not None:
            raise HostRead("which row has which adapter is read")
        numbers = step.plan.adapters
        for b, number in enumerate(() if numbers is None else numbers.tolist()):
            part = None if number < 0 else slots.parts[number]
            if part is None:
                continue
            self._counts["torch adapt"] += 1
            lo, hi = step.bounds[b], step.bounds[b + 1]
            rows = [(t, t + 1) for t in range(lo, hi)] if self._exact else [(lo, hi)]
            for first, last in rows:
                y[first:last] = _adapted(x[first:last].clone(), y[first:last].clone(), part)
        return y


def _by_kernels(like: Tensor, max_rank: int, counts: Counter[str]) -> Callable[..., Tensor]:
    from penstock.backends.gpu.kernels import adapters

    def adapt(x: Tensor, y: Tensor, step: TorchStep, slots: _Slots) -> Tensor:
        """Mutates: y."""
        counts["adapt"] += 1
        at = adapters.AdapterSlots(slots.table, like, max_rank)
        rows = x if x.stride(-1) == 1 else x.contiguous()
        return adapters.adapt(rows, y, step.memo["adapter_order"], step.memo["adapter_tiles"], at)

    adapt.capture_safe = True  # type: ignore[attr-defined]  # see `graphs.why_not`
    return adapt


def _adapted(x: Tensor, y: Tensor, part: _Part) -> Tensor:
    out = y.float()
    if part.gain is not None:
        out = out * part.gain
    if part.shift is not None:
        out = out + part.shift
    if len(part.a):
        u = part.factor * (x.float() @ part.a.float().t())
        out = out + u @ part.b.float().t()
    return out.to(y.dtype)


def _floats(x: Numbers) -> Tensor:
    wide = widen(x) if x.dtype == np.uint16 else x
    return torch.from_numpy(np.array(wide, wide.dtype.newbyteorder("=")))


def kind_of(graph: Graph, *, kernels: bool) -> torch.dtype:
    """The type in which matrices of adapters are held: that which products multiply."""
    for node in graph.nodes:
        if kernels and node.op == "linear" and node.layer != NO_LAYER:
            weight: Any = node.bound[0]
            if isinstance(weight, StoredMatrix) or weight.dtype == np.uint16:
                return torch.bfloat16
            return torch.float16 if weight.dtype == np.float16 else torch.float32
    return torch.float32


class AdaptedTorch(TorchForward):
    """See `model.forward.AdaptingForward`."""

    def __init__(
        self, *args: Any, table: TorchTable, again: Callable[[frozenset[str]], TorchForward], **more: Any
    ) -> None:  # fmt: skip
        """`again`: makes the program in which products of the weights with these names are adapted. Else as
        TorchForward."""
        super().__init__(*args, **more)
        self._table, self._again = table, again
        self._names: frozenset[str] = frozenset()
        self._inner: TorchForward | None = None
        self._warmed: tuple[Sequence[Any], StepLimits] | None = None

    def prepare(self, parts: Mapping[str, LowRank]) -> Mapping[str, _Part]:
        """See `ops.adapters.AdapterTable`."""
        return self._table.prepare(parts)

    def put(self, number: int, prepared: Mapping[str, _Part]) -> None:
        """See `ops.adapters.AdapterTable`. Captures graphs anew where another product is adapted than before."""
        if not self._names.issuperset(prepared):
            self._names = self._names.union(prepared)
            self._inner = self._again(self._names)
            if self._warmed is not None:
                capture_beside(self._inner, self.graphs, *self._warmed)
        self._table.put(number, prepared)

    def drop(self, number: int) -> None:
        """See `ops.adapters.AdapterTable`."""
        self._table.drop(number)

    def warm(self, planes: Sequence[Any], limits: StepLimits, report: Callable[[int, int], None]) -> None:
        """See `model.forward.WarmedForward`. Graphs of steps with adapters are captured when one comes."""
        super().warm(planes, limits, report)
        self._warmed = planes, limits

    @torch.no_grad()
    def _run(self, plan: StepPlan, planes: Sequence[Any]) -> tuple[Tensor, Tensor]:
        inner = self._inner
        if plan.adapters is None or inner is None:
            return super()._run(plan, planes)
        inner._progress = self._progress
        found = inner._run(plan, planes)
        self._queries = inner._queries
        return found
