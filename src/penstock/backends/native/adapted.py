"""A compiled model whose steps may have adapters.

Steps in which nobody has one run the plain program, so they cost what they cost without adapters; the others run one
with places for them, over the same matrices. It is made anew when an adapter comes that changes another product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.backends.native.forward import NativeForward, packed_alone
from penstock.base.bf16 import F32
from penstock.core.cache_spec import CacheGroup
from penstock.model.adapted import adapted
from penstock.model.graph import Graph
from penstock.ops.adapter_units import UnitMemory
from penstock.ops.adapters import LowRank
from penstock.ops.native.abi import Format
from penstock.ops.native.adapters import AdaptedBase, NativeTable, Prepared
from penstock.ops.native.merged import with_adapter
from penstock.ops.plan import Planes, StepPlan


class AdaptedNative(NativeForward):
    """See `model.forward.AdaptingForward`."""

    def __init__(
        self, graph: Graph, groups: Sequence[CacheGroup], *args: Any, max_tokens: int, row_bits: int, cascade: bool,
        count: int, max_rank: int, **more: Any,
    ) -> None:  # fmt: skip
        """`count`: adapters that a step may have, of rank `max_rank` at most. Else as NativeForward."""
        super().__init__(graph, groups, *args, max_tokens=max_tokens, row_bits=row_bits, cascade=cascade, **more)
        self._graph, self._groups, self._row_bits = graph, groups, row_bits
        self._table = NativeTable(count, max_rank, self._pool.library, self._base)
        self._names: frozenset[str] = frozenset()
        self._inner: NativeForward | None = None
        self._ran: NativeForward = self
        self._merged: tuple[int, NativeForward] | None = None

    def prepare(self, parts: Mapping[str, LowRank]) -> Prepared:
        """See `ops.adapters.AdapterTable`."""
        return self._table.prepare(parts)

    def lay(self, prepared: Prepared, memory: UnitMemory) -> Prepared:
        """See `model.forward.PlacingForward`."""
        return self._table.lay(prepared, memory)

    def put(self, number: int, prepared: Prepared) -> None:
        """See `ops.adapters.AdapterTable`."""
        if self._table.needs(prepared) or not self._names.issuperset(prepared):
            self._names = self._names.union(prepared)
            self._inner = NativeForward(
                adapted(self._graph, self._names), self._groups, self._pool, self.scheme, max_tokens=self._max_tokens,
                row_bits=self._row_bits, like=self, cascade=self._cascade, adapters=self._table,
            )  # fmt: skip
            self._inner.pause(self._pause)
        self._table.put(number, prepared)

    def _base(self, name: str) -> AdaptedBase:
        """The panels of a weight: its own in those of the plain program, or packed once more where they begin within a
        panel."""
        for run, rows in self._rows.items():
            names = [own for own, _ in rows]
            if name in names and self.matrices[run].struct.pair:
                return AdaptedBase(self.matrices[run], 1 + names.index(name))
        count = next(n for rows in self._rows.values() for own, n in rows if own == name)
        found = self.part([(name, count)])
        if found is None:
            found = packed_alone(self._graph, name, self._pool, self.scheme, self._row_bits)
        return AdaptedBase(found, 0)

    def drop(self, number: int) -> None:
        """See `ops.adapters.AdapterTable`."""
        self._table.drop(number)
        if self._merged is not None and self._merged[0] == number:
            self._merged = None

    @property
    def merges(self) -> bool:
        """See `model.forward.MergingForward`."""
        return all(self.matrices[run].struct.format == Format.F32 for run in self._rows)

    def merge(self, number: int, parts: Mapping[str, LowRank]) -> None:
        """See `model.forward.MergingForward`. Matrices that the adapter does not change are shared."""
        self._merged = None
        if number < 0:
            return
        changed = {
            run: with_adapter(self._pool.library, self.matrices[run], rows, parts, self._pool.num_threads)
            for run, rows in self._rows.items() if any(name in parts for name, _ in rows)
        }  # fmt: skip
        program = NativeForward(
            self._graph, self._groups, self._pool, self.scheme, max_tokens=self._max_tokens, row_bits=self._row_bits,
            matrices={**self.matrices, **changed}, cascade=self._cascade,
        )  # fmt: skip
        program.pause(self._pause)
        self._merged = number, program

    def run(self, plan: StepPlan, planes: Sequence[Planes]) -> F32:
        inner = self._of(plan)
        return super().run(plan, planes) if inner is None else inner.run(plan, planes)

    def run_greedy(self, plan: StepPlan, planes: Sequence[Planes]) -> list[int] | F32:
        inner = self._of(plan)
        return super().run_greedy(plan, planes) if inner is None else inner.run_greedy(plan, planes)

    def run_pooling(self, plan: StepPlan, planes: Sequence[Planes]) -> tuple[F32, F32]:
        inner = self._of(plan)
        return super().run_pooling(plan, planes) if inner is None else inner.run_pooling(plan, planes)

    def _of(self, plan: StepPlan) -> NativeForward | None:
        """The program with adapters, if the step has any."""
        self._ran = self
        if plan.adapters is None or self._inner is None:
            return None
        if self._merged is not None and (plan.adapters == self._merged[0]).all():
            self._ran = self._merged[1]
            return self._ran
        self._ran = self._inner
        self._table.begin(plan)
        return self._inner

    def pause(self, call: Callable[[int], None] | None) -> None:
        super().pause(call)
        if self._inner is not None:
            self._inner.pause(call)
        if self._merged is not None:
            self._merged[1].pause(call)

    def run_head(self, hidden: F32, planes: Sequence[Planes]) -> F32:
        """See `NativeForward`: of the program that ran last, which alone knows the step's sequences."""
        return super().run_head(hidden, planes) if self._ran is self else self._ran.run_head(hidden, planes)

    def queries(self, num_tokens: int) -> list[F32]:
        return super().queries(num_tokens) if self._ran is self else self._ran.queries(num_tokens)

    @property
    def tokens_read(self) -> tuple[int, int]:
        read, seen = super().tokens_read
        if self._inner is None:
            return read, seen
        more = self._inner.tokens_read
        return read + more[0], seen + more[1]
