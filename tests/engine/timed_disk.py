"""An engine whose time is counted: a link of so many bytes a second to its folder of blocks, and a model that takes so
long per token and per pair of query and key. Nothing sleeps, there are no threads, and every run is the same."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from penstock.base.clock import VirtualClock
from penstock.core.page_ops import DISK, STATE, FetchOp
from penstock.core.request import Request
from penstock.engine.core import EngineCore
from penstock.launch.assemble import connect
from penstock.launch.kv_store import open_store
from penstock.runner import block_files
from penstock.runner.block_files import OVERHEAD, BlockFiles
from tests.engine.fake_model import FakeForward
from tests.engine.fake_model import spec as fake_spec
from tests.engine.harness import Collector, Knobs, config_for, plan_for


@dataclass
class Costs:
    """`block_s`: of the link, for a block; `late_s`: until the first one. The model's are per step, token and pair."""

    block_s: float
    late_s: float = 0.0
    step_s: float = 0.002
    token_s: float = 0.001
    pair_s: float = 1e-6


class TimedForward(FakeForward):
    """As slow as it is told."""

    clock: VirtualClock
    costs: Costs

    def run(self, plan: Any, planes: Any) -> Any:
        costs = self.costs
        pairs = int(plan.positions.sum()) + len(plan.positions)
        self.clock.advance(costs.step_s + len(plan.token_ids) * costs.token_s + pairs * costs.pair_s)
        return super().run(plan, planes)


class TimedDisk:
    """In place of the threads of BlockFiles: one link, first come, first served."""

    def __init__(self, clock: VirtualClock, costs: Costs) -> None:
        self.clock, self.costs = clock, costs
        self._coming: deque[tuple[float, Any]] = deque()
        self._free_s = 0.0

    def monotonic(self) -> float:
        """What BlockFiles takes for the time."""
        return self.clock.now()

    def time(self) -> float:
        """Of files: what is written has no time until which it stays."""
        return time.time()

    def begin(self, files: BlockFiles) -> None:
        self._arrive(files)
        _begin(files)
        while not files._reads.empty():
            idle = not self._coming
            order = files._reads.get()[2]
            if not isinstance(order, FetchOp) and order[0].block in order[1].ahead:
                self._coming.appendleft((self.clock.now(), order))  # it is in memory
                continue
            self._free_s = max(self._free_s, self.clock.now()) + self.costs.block_s + self.costs.late_s * idle
            self._coming.append((self._free_s, order))

    def ended(self, files: BlockFiles, wait_s: float = 0.0) -> dict[int, bool]:
        self._arrive(files)
        if wait_s and not files._ended and self._coming:
            self.clock.advance_to(min(self.clock.now() + wait_s, self._coming[0][0]))
            self._arrive(files)
        return _ended(files)

    def _arrive(self, files: BlockFiles) -> None:
        while not files._writes.empty():
            files._write_one(files._writes.get())
        now_s = self.clock.now()
        while self._coming and self._coming[0][0] <= now_s:
            self.clock._now_s, order = self._coming.popleft()
            op = order if isinstance(order, FetchOp) else order[0]
            files._read_one(order, bytearray(files._bytes[op.path.endswith(STATE)] + OVERHEAD))
        self.clock._now_s = now_s

    def start(self, files: BlockFiles) -> None:
        """No threads."""


_begin, _ended = BlockFiles.begin, BlockFiles.ended


@contextmanager
def timed(
    folder: Path, costs: Costs, windows: Sequence[int | None] = (), **knobs: Any
) -> Iterator[tuple[EngineCore, TimedForward]]:
    """An engine over this folder; what it has written is there when this ends."""
    k = Knobs(**({"block_size": 4, "budget": 512, "num_blocks": 256, "kv_offload": f"disk:{folder},1GiB"} | knobs))
    clock = VirtualClock()
    disk = TimedDisk(clock, costs)
    methods = {
        "begin": lambda files: disk.begin(files),
        "ended": lambda files, wait_s=0.0: disk.ended(files, wait_s),
        "_start": lambda files: None,
    }
    with mock.patch.multiple(BlockFiles, **methods), mock.patch.object(block_files, "time", disk):
        spec = fake_spec(slots=False, windows=windows)
        plan = plan_for(spec, k)
        forward = TimedForward(plan.groups)
        forward.clock, forward.costs = clock, costs
        store = open_store(config_for(k), lambda: "fake", plan)
        core = connect(
            config_for(k), plan, forward, spec.vocab_size, clock=clock, check_invariants=True, poison=True, store=store
        )
        try:
            yield core, forward
        finally:
            files = core.executor._runner.storage.outside.tiers[DISK]  # type: ignore[attr-defined]
            disk._arrive(files)


def first_token_s(core: EngineCore, request: Request) -> tuple[float, list[int], int]:
    """(seconds to the first token, tokens, tokens that were found). Runs until nothing is left to do."""
    began, first, collector, out = core.clock.now(), 0.0, Collector(), request.request_id
    core.add(request)
    while core.has_work:
        collector.take(core.step())
        if not first and out in collector.requests and collector.requests[out].tokens.get(0):
            first = core.clock.now() - began
    got = collector.requests[out]
    return first, got.tokens[0], got.cached
