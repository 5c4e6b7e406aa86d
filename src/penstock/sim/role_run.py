"""One engine of a cluster with roles: requests come to it with tokens already, or leave it with their first one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.base.clock import Clock
from penstock.core.output import EngineOutput
from penstock.core.request import Request
from penstock.engine.core import EngineCore
from penstock.sim.driver import SimLimits, WorkloadRun, _Live
from penstock.sim.workload import Workload


class RoleRun(WorkloadRun):
    """`prompts_only`: every request is given for the sake of its prompt alone; who has its first token is in `passed`,
    and stays here until somebody moves it (`sim.moving`)."""

    def __init__(
        self, core: EngineCore, clock: Clock, workload: Workload, limits: SimLimits, label: str, prompts_only: bool
    ) -> None:  # fmt: skip
        super().__init__(core, clock, workload, limits, label, False, False, None)
        self.moves = True
        self.prompts_only = prompts_only
        self.passed: list[str] = []
        self.came: set[int] = set()
        """Rows of requests that have come from another engine."""
        self.before_add: Callable[[Request], None] | None = None
        """Told of the next request before the engine is."""

    def sent(self, made: Request) -> Request:
        if self.before_add is not None:
            self.before_add(made)
            self.before_add = None
        return msgspec.structs.replace(made, max_tokens=1) if self.prompts_only else made

    def refuse(self, why: str) -> None:
        """A request that is not even offered to the engine."""
        self._refuse(why)

    def drop(self, name: str, why: str) -> None:
        """One that has its first token and will never have another: as if it had been refused."""
        live = self.live.pop(name)
        self.left.add(live.row)
        self._refuse(why)

    def _finish(self, out: EngineOutput, state: _Live, now_s: float) -> None:
        request, cached, preempted = state.request, self.columns.cached, self.columns.preemptions
        assert request is not None, "requests are kept where they move"
        if self.prompts_only and out.finish_reason == "length" and request.max_tokens > 1:
            cached[state.row], preempted[state.row] = out.num_cached_tokens, out.num_preemptions
            self.passed.append(out.request_id)
            return
        before = cached[state.row], preempted[state.row]
        super()._finish(out, state, now_s)
        if state.row in self.came:  # what its first engine found, and all times that it was preempted
            cached[state.row], preempted[state.row] = before[0], before[1] + out.num_preemptions
