"""A compiled model whose steps may have adapters.

Steps in which nobody has one run the plain program, so they cost what they cost without adapters; the others run one
with places for them, over the same matrices. It is made anew when an adapter comes that changes another product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.backends.native.forward import NativeForward
from penstock.base.bf16 import F32
from penstock.core.cache_spec import CacheGroup
from penstock.model.adapted import adapted
from penstock.model.graph import Graph
from penstock.ops.adapters import LowRank
from penstock.ops.native.adapters import NativeTable, Prepared
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
        self._table = NativeTable(count, max_rank)
        self._names: frozenset[str] = frozenset()
        self._inner: NativeForward | None = None
        self._ran: NativeForward = self

    def prepare(self, parts: Mapping[str, LowRank]) -> Prepared:
        """See `ops.adapters.AdapterTable`."""
        return self._table.prepare(parts)

    def put(self, number: int, prepared: Prepared) -> None:
        """See `ops.adapters.AdapterTable`."""
        if not self._names.issuperset(prepared):
            self._names = self._names.union(prepared)
            self._inner = NativeForward(
                adapted(self._graph, self._names), self._groups, self._pool, self.scheme, max_tokens=self._max_tokens,
                row_bits=self._row_bits, like=self, cascade=self._cascade, adapters=self._table,
            )  # fmt: skip
            self._inner.pause(self._pause)
        self._table.put(number, prepared)

    def drop(self, number: int) -> None:
        """See `ops.adapters.AdapterTable`."""
        self._table.drop(number)

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
        self._ran = self._inner
        self._table.begin(plan)
        return self._inner

    def pause(self, call: Callable[[int], None] | None) -> None:
        super().pause(call)
        if self._inner is not None:
            self._inner.pause(call)

    def queries(self, num_tokens: int) -> list[F32]:
        return super().queries(num_tokens) if self._ran is self else self._ran.queries(num_tokens)

    @property
    def tokens_read(self) -> tuple[int, int]:
        read, seen = super().tokens_read
        if self._inner is None:
            return read, seen
        more = self._inner.tokens_read
        return read + more[0], seen + more[1]
