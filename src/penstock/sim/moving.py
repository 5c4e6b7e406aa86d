"""Requests that move between simulated engines: with their text, what is known of them, and their blocks, which the
target reads from the folder that all share. That read is waited for, and counted; copies ahead of it are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.request import Abort, Resume
from penstock.route.rescheduling import Movable, Rescheduler
from penstock.route.router import EngineLoad
from penstock.sim.driver import WorkloadRun
from penstock.sim.store import SimStore


def movable(run: WorkloadRun) -> list[Movable]:
    """What an engine has, in order of arrival."""
    out = []
    for name, live in run.live.items():
        assert live.request is not None, "the run keeps requests"
        known = len(live.request.prompt_token_ids) + len(live.token_ids)
        out.append(Movable(name, known, not live.token_ids, live.request.priority))
    return out


class Ticks:
    """Moments at which requests move, every `every_s` seconds of the clock that all have; 0: never."""

    def __init__(self, runs: Sequence[WorkloadRun], every_s: float) -> None:
        self._runs, self._every_s, self._next_s = runs, every_s, every_s
        self._policy = Rescheduler()
        self.num_moves = 0

    def until(self, time_s: float | None) -> None:
        """All that are due before then, or until nobody has anything left to do."""
        while self._every_s and (any(r.core.has_work for r in self._runs) if time_s is None else self._next_s < time_s):
            for run in self._runs:
                run.advance(self._next_s)
            self._tick()
            self._next_s += self._every_s

    def _tick(self) -> None:
        loads = []
        for number, run in enumerate(self._runs):
            size = run.core.kv.block_size
            loads.append(EngineLoad(number, kv_blocks=run.limits.kv_capacity_tokens // size, block_size=size))
        for one in self._policy.moves(loads, {n: movable(run) for n, run in enumerate(self._runs)}):
            move(self._runs[one.source], one.name, self._runs[one.target])
            self.num_moves += 1


def move(source: WorkloadRun, name: str, target: WorkloadRun, *, ended: bool = False) -> None:
    """`ended`: the source's engine has done what it was to do of it. Mutates both."""
    live = source.live.pop(name)
    assert live.request is not None, "the run keeps requests"
    if not ended:
        source.core.add(Abort(request_id=name))
    source.left.add(live.row)
    theirs, ours = source.columns, target.columns
    row = live.row
    label = next(label for label, number in source.tenants.items() if number == theirs.tenant[row])
    new = ours.copy(theirs, row, target.tenants.setdefault(label, len(target.tenants)))
    resume = Resume([(0, live.token_ids)]) if live.token_ids else None
    request = msgspec.structs.replace(live.request, request_id=str(new), resume=resume)
    live.row = new
    live.request = msgspec.structs.replace(request, resume=None)
    target.live[str(new)] = live
    store = getattr(target.core.store_news, "__self__", None)
    if isinstance(store, SimStore) and not store.asked_only:
        store.look_soon()
    target.core.add(request)
