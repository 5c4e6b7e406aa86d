"""Adapters of a rank that lie in blocks of the KV pool. Which are there, and where, the scheduler says
(`kv.adapter_pages`); a thread reads them, and whoever runs before one has come waits for it.

Source: Sheng et al., S-LoRA, arXiv 2311.03285, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from penstock.base.clock import Clock
from penstock.base.errors import PenstockError
from penstock.core.adapter import UNIT_BYTES, AdapterRef
from penstock.core.batch import ScheduledRow
from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import AdapterOp
from penstock.model.forward import PlacingForward
from penstock.ops.adapter_units import UnitMemory, Units, shape_of
from penstock.ops.plan import Planes, StepPlan
from penstock.runner.adapters import Load, RankAdapters, failed
from penstock.runner.memory import give_back, slab_parts

Block = tuple[int, ...]


@dataclass
class _Placed:
    """One that has `blocks`; with `number` -1 it is not in the model's table. Nobody writes once it is `gone`."""

    ref: AdapterRef
    blocks: Sequence[Block]
    coming: Future[Any] | None = None
    number: int = -1
    gone: bool = False
    lock: Lock = field(default_factory=Lock)


def unit_pieces(planes: Sequence[Planes], groups: Sequence[CacheGroup], blocks: Sequence[Block]) -> list[Units]:
    """Whole units of the slabs of `blocks`, which name one of each full group: views [n, 1024] of the planes."""
    full = [g for g in groups if g.spec.kind == "paged"]
    found = []
    for block in blocks:
        for group, slab in zip(full, block, strict=True):
            first, last = slab * group.pages_per_slab, (slab + 1) * group.pages_per_slab
            for plane in group.spec.planes:
                raw = planes[group.index][plane.name][first:last].reshape(-1).view(np.uint8)
                found.append(raw[: len(raw) // UNIT_BYTES * UNIT_BYTES].reshape(-1, UNIT_BYTES))
    return found


class PagedAdapters(RankAdapters):
    """See `RankAdapters`. `planes`, `groups`: of the rank's storage; `before`: those of the rank that this one follows,
    whose blocks it has."""

    def __init__(
        self, forward: PlacingForward, load: Load, count: int, clock: Clock, planes: Sequence[Planes],
        groups: Sequence[CacheGroup], before: RankAdapters | None = None,
    ) -> None:  # fmt: skip
        super().__init__(forward, load, count, 0, clock)
        self._placing, self._planes, self._groups = forward, planes, groups
        self._held: dict[bytes, _Placed] = {}  # type: ignore[assignment]
        self._wanted: list[AdapterRef] = []
        if isinstance(before, PagedAdapters):
            for key, placed in before._held.items():
                _stop(placed)
                self._held[key] = _Placed(placed.ref, placed.blocks)

    def order(self, op: AdapterOp) -> None:
        """At this place of the list. Mutates: self, the blocks."""
        if op.blocks is None:
            super().order(op)
        elif op.blocks:
            self._pool = self._pool or ThreadPoolExecutor(1, "penstock-adapters")
            placed = self._held[op.adapter.hash] = _Placed(op.adapter, op.blocks)
            placed.coming = self._pool.submit(self._bring, placed)
        else:
            self._give_up(self._held.pop(op.adapter.hash))

    def _bring(self, placed: _Placed) -> Any:
        """Read it into its blocks. None: they are somebody else's now."""
        parts = self._load(placed.ref)
        prepared = self._placing.prepare(parts)
        used = sum(shape_of(part).num_units for part in parts.values())
        with placed.lock:
            if placed.gone:
                return None
            memory = UnitMemory(unit_pieces(self._planes, self._groups, placed.blocks))
            found = self._placing.lay(prepared, memory)
            if any(part.codes is not None for part in parts.values()):
                self._swap(placed.blocks, used)
        return found

    def _swap(self, blocks: Sequence[Block], used: int) -> None:
        """Codes lie beside the blocks, of which all but the first `used` units stand for them: while they do, the
        system has the memory of those."""
        full = [g for g in self._groups if g.spec.kind == "paged"]
        each = sum(map(len, unit_pieces(self._planes, self._groups, blocks[:1])))
        for block in blocks[-(-used // each) :]:
            for g, slab in zip(full, block, strict=True):
                pages = range(slab * g.pages_per_slab, (slab + 1) * g.pages_per_slab)
                give_back(slab_parts(self._planes[g.index], pages))

    def _give_up(self, placed: _Placed) -> None:
        _stop(placed)
        if placed.number >= 0:
            self._forward.drop(placed.number)
            self._free.append(placed.number)
        asked, there, gone, waited_s = self.counts
        self.counts = (asked, there, gone + 1, waited_s)

    def on(self, plan: StepPlan, scheduled: Sequence[ScheduledRow]) -> StepPlan:
        """As there; those that are wanted have been given blocks by now."""
        wanted, self._wanted = self._wanted, []
        for ref in wanted:
            if (placed := self._held.get(ref.hash)) is not None:
                self._enter(placed)
        return super().on(plan, scheduled)

    def _want(self, ref: AdapterRef) -> None:
        self._wanted.append(ref)

    def _enter(self, placed: _Placed) -> None:
        """A row has it: into the model's table, if it is not there. Mutates: self, the table."""
        asked, there, gone, waited_s = self.counts
        coming, key = placed.coming, placed.ref.hash
        is_there = placed.number >= 0 or (coming is not None and coming.done() and not failed(coming))
        start_s = self._clock.now()
        if placed.number < 0:
            try:
                ready = self._bring(placed) if coming is None or failed(coming) else coming.result()
            except (PenstockError, OSError) as error:
                self._failed[key] = f"its adapter cannot be read: {error}"
            else:
                placed.number, placed.coming = self._free.pop(), None
                self._forward.put(placed.number, ready)
                self._failed.pop(key, None)
        waited_s += 0.0 if is_there else self._clock.now() - start_s
        self.counts = (asked + 1, there + is_there, gone, waited_s)


def _stop(placed: _Placed) -> None:
    """From here on nobody writes into its blocks. A thread that does finishes first."""
    if placed.coming is not None:
        placed.coming.cancel()
    with placed.lock:
        placed.gone = True
