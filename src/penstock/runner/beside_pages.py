"""Host memory whose late loads are copied by threads beside the steps (`kv.fast_switch`)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import LoadOp
from penstock.ops.plan import Planes
from penstock.runner.host_pages import HostPages

NUM_THREADS = 2
"""A copy lets other threads run; more than two only wait for the same memory."""


class BesidePages(HostPages):
    """A `PageStore`. What a late load reads and writes is nobody else's until it is reported, so no thread waits.

    A load is one piece of work, begun when its step is about to compute: handing it over takes longer than copying a
    block. Planes that are not in this process's memory (an accelerator's) are copied within the step.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *, checked: bool = False
    ) -> None:
        super().__init__(groups, num_slabs, block_size, checked=checked)
        self._threads: ThreadPoolExecutor | None = None
        self._planned: dict[int, list[tuple[LoadOp, Planes]]] = {}
        self._moves: dict[int, Future[bool]] = {}

    def load(self, op: LoadOp, planes: Planes) -> bool | None:
        if not op.late or not all(isinstance(plane, np.ndarray) for plane in planes.values()):
            return super().load(op, planes)
        self._planned.setdefault(op.move, []).append((op, planes))
        return None

    def begin(self) -> None:
        if self._planned and self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, "penstock-swap")
        for move, parts in self._planned.items():
            assert self._threads is not None
            self._moves[move] = self._threads.submit(self._copy, parts)
        self._planned = {}

    def _copy(self, parts: Sequence[tuple[LoadOp, Planes]]) -> bool:
        return all(super(BesidePages, self).load(op, planes) for op, planes in parts)

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        if wait_s and self._moves:
            wait(self._moves.values(), wait_s, "FIRST_COMPLETED")
        done = [move for move, work in self._moves.items() if work.done()]
        return {move: self._moves.pop(move).result() for move in done}
