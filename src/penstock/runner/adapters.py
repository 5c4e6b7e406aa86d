"""Adapters of a rank: in memory as long as there is room, read by a thread ahead of the rows that have them.

What is in memory never changes a token, so nobody above needs to know: a row whose adapter is not there waits for it.
Source: Sheng et al., S-LoRA, arXiv 2311.03285.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec.structs import replace as replaced

from penstock.base.clock import Clock
from penstock.base.errors import EngineError, PenstockError
from penstock.core.adapter import AdapterRef
from penstock.core.batch import RowError, ScheduledRow, SchedulerOutput, StepOutput
from penstock.core.page_ops import AdapterOp
from penstock.model.forward import AdaptingForward, MergingForward
from penstock.ops.adapters import LowRank
from penstock.ops.plan import StepPlan

Load = Callable[[AdapterRef], Mapping[str, LowRank]]


@dataclass
class _Held:
    """One in memory, at place `number` of the model's table; or, with -1, on its way (`coming`, a Future)."""

    ref: AdapterRef
    coming: Future[Any] | None = None
    number: int = -1
    used: int = 0


def failed(coming: Future[Any]) -> bool:
    """It has come to nothing, perhaps long ago: worth another look."""
    return coming.done() and coming.exception() is not None


class RankAdapters:
    """`count` adapters at most have places in the model, all together `max_bytes` of numbers, but for those that rows
    have, which the scheduler bounds.
    """

    def __init__(self, forward: AdaptingForward, load: Load, count: int, max_bytes: int, clock: Clock) -> None:
        self._forward, self._load, self._max_bytes, self._clock = forward, load, max_bytes, clock
        self._count, self._free = count, list(range(count))[::-1]
        self._held: dict[bytes, _Held] = {}
        self._rows: dict[int, bytes] = {}
        self._failed: dict[bytes, str] = {}
        self._errors: list[RowError] = []
        self._tick = 0
        self._pool: ThreadPoolExecutor | None = None
        self.counts = (0, 0, 0, 0.0)
        """Asked for by rows; of those, in memory already; given up; seconds that steps waited for the others."""

    def order(self, op: AdapterOp) -> None:
        """What a step orders. Mutates: self, the model."""
        if op.merge is None:
            self.fetch(op.adapter)
        else:
            self.merge(op.adapter if op.merge else None)

    def fetch(self, ref: AdapterRef) -> None:
        """Somebody who waits in the queue has it: read it in a thread, if there is room beside those that rows have."""
        if ref.hash in self._held or not self._make_room(ref.num_bytes):
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "penstock-adapters")
        self._held[ref.hash] = _Held(ref, self._pool.submit(self._read, ref), used=self._tick)

    def merge(self, ref: AdapterRef | None) -> None:
        """Steps in which everybody has this one run on weights with it; None: no steps do. One that cannot be read, or
        leaves memory, is not merged. Mutates: the model."""
        assert isinstance(self._forward, MergingForward), "the plan has looked"
        held = None if ref is None else self._held.get(ref.hash)
        if ref is None or held is None or held.number < 0:
            self._forward.merge(-1, {})
            return
        try:
            self._forward.merge(held.number, self._load(ref))
        except (PenstockError, OSError):
            self._forward.merge(-1, {})

    def begin(self, output: SchedulerOutput) -> None:
        """The rows of the step are there: so are their adapters. Mutates: self, the model's table."""
        self._tick += 1
        for fork in output.forked:
            if fork.parent_id in self._rows:
                self._rows[fork.child_id] = self._rows[fork.parent_id]
        for seq_id in output.removed:
            self._rows.pop(seq_id, None)
        for row in output.added:
            if row.rules.adapter is not None:
                self._rows[row.seq_id] = row.rules.adapter.hash
                self._want(row.rules.adapter)

    def on(self, plan: StepPlan, scheduled: Sequence[ScheduledRow]) -> StepPlan:
        """The step with the adapters of its rows. Rows whose adapter cannot be read become errors."""
        numbers = []
        for row in scheduled:
            key = self._rows.get(row.seq_id)
            if key is not None and key in self._failed:
                self._errors.append(RowError(row.seq_id, self._failed[key]))
                key = None
            numbers.append(-1 if key is None else self._held[key].number)
        if max(numbers, default=-1) < 0:
            return plan
        return replace(plan, adapters=np.array(numbers, np.int32))

    def told(self, result: StepOutput) -> StepOutput:
        """The result with what became of rows without their adapter, and the counts."""
        errors, self._errors = self._errors, []
        rows = {error.seq_id for error in result.errors}
        errors = [error for error in errors if error.seq_id not in rows]
        return replaced(result, errors=[*result.errors, *errors], adapters=self.counts)

    # -- what is in memory ---------------------------------------------------------------------------------------

    def _want(self, ref: AdapterRef) -> None:
        """A row has it. Mutates: self, the model's table."""
        asked, there, gone, waited_s = self.counts
        held = self._held.get(ref.hash)
        if held is not None and held.number >= 0:
            held.used = self._tick
            self.counts = (asked + 1, there + 1, gone, waited_s)
            return
        start_s = self._clock.now()
        try:
            ready = (
                self._read(ref) if held is None or held.coming is None or failed(held.coming) else held.coming.result()
            )
        except (PenstockError, OSError) as error:
            self._held.pop(ref.hash, None)
            self._failed[ref.hash] = f"its adapter cannot be read: {error}"
        else:
            self._held.pop(ref.hash, None)
            self._make_room(ref.num_bytes)
            if not self._free:
                raise EngineError("more adapters run at once than there are places for")
            self._held[ref.hash] = held = _Held(ref, number=self._free.pop(), used=self._tick)
            self._forward.put(held.number, ready)
            self._failed.pop(ref.hash, None)
        self.counts = (asked + 1, there, self.counts[2], waited_s + self._clock.now() - start_s)

    def _read(self, ref: AdapterRef) -> Any:
        return self._forward.prepare(self._load(ref))

    def _make_room(self, num_bytes: int) -> bool:
        """Whether there is a place and room for so many bytes more, others given up if need be."""
        while len(self._held) >= self._count or self._bytes() + num_bytes > self._max_bytes:
            if not self._evict():
                return False
        return True

    def _bytes(self) -> int:
        return sum(held.ref.num_bytes for held in self._held.values())

    def _evict(self) -> bool:
        """Give up the one that was used longest ago of those that no row has; False if there is none."""
        used = set(self._rows.values())
        free = [
            held for key, held in self._held.items()
            if key not in used and (held.coming is None or held.coming.done())
        ]  # fmt: skip
        if not free:
            return False
        oldest = min(free, key=lambda held: held.used)
        del self._held[oldest.ref.hash]
        if oldest.number >= 0:
            self._forward.drop(oldest.number)
            self._free.append(oldest.number)
        asked, there, gone, waited_s = self.counts
        self.counts = (asked, there, gone + 1, waited_s)
        return True
