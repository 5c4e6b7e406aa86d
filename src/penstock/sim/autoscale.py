"""Simulated engines that are added and removed while a workload runs, by the scaler of a server.

An engine costs from its order to its end: while it starts, and while it is drained. It is given requests once it is
ready; one that is drained finishes what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from penstock.base.clock import MonotonicClock
from penstock.base.errors import ConfigError
from penstock.route import ROUTERS
from penstock.route.router import RoutePolicy
from penstock.route.scale import make_scaler
from penstock.route.scale.scaler import FleetView
from penstock.sim.driver import Progress, WorkloadRun
from penstock.sim.replicas import MAX_REPLICAS, merged, open_run
from penstock.sim.result import SimResult
from penstock.sim.routed import RoutedRuns, told_by
from penstock.sim.service import SimulatedService
from penstock.sim.workload import TimedRequest, Workload

_US = 1_000_000


@dataclass(frozen=True)
class ScaleStep:
    """At `at_s` the scaler wanted `wanted` engines where `had` were ready or starting."""

    at_s: float
    had: int
    wanted: int
    why: str


@dataclass(frozen=True)
class ScaledRun:
    """What came of it. `replica_s`: engines times seconds, from each one's order to its end, or to the run's."""

    result: SimResult
    replica_s: float
    steps: tuple[ScaleStep, ...]
    most: int
    """Engines at one time."""


@dataclass
class _Engine:
    number: int
    run: WorkloadRun
    ordered_s: float
    ready_s: float
    draining: bool = False
    ended_s: float | None = None


@dataclass(frozen=True)
class ScaledReplicas:
    """`service` from `least` to `most` times; `scaler`: of `route.scale`, looks every `look_s`; an engine takes
    `start_s` from its order to ready, but those that the run begins with, which are there."""

    service: SimulatedService
    scaler: str
    least: int
    most: int
    start_s: float = 20.0
    look_s: float = 1.0
    router: str = "least-requests"

    def check(self) -> None:
        """Raises ConfigError."""
        if not 1 <= self.least <= self.most <= MAX_REPLICAS:
            raise ConfigError(
                f"replicas: {self.least}..{self.most} must be from 1 to {MAX_REPLICAS}, the smaller number first",
                field="replicas",
            )
        make_scaler(self.scaler)

    def run(
        self, workload: Workload, *, truncate: bool = False, progress: Callable[[Progress], None] | None = None
    ) -> ScaledRun:  # fmt: skip
        """The whole workload. Raises ConfigError as `check`, and as `simulate`."""
        self.check()
        clock = MonotonicClock()
        began_s = clock.now()
        with ExitStack() as stack:
            fleet = _Fleet(self, ROUTERS.get(self.router)(), workload, truncate, stack)
            for number, request in enumerate(workload):
                fleet.look_until(request.arrival_s)
                fleet.offer(request)
                if progress is not None and number % 512 == 0:
                    progress(Progress(number + 1, fleet.num_done, 0, request.arrival_s, clock.now() - began_s))
            fleet.finish()
        results = [engine.run.result() for engine in fleet.engines]
        result = replace(merged(results, self.service.label), wall_s=clock.now() - began_s)
        return ScaledRun(result, fleet.replica_s(), tuple(fleet.steps), fleet.most)


@dataclass
class _Fleet:
    """The engines of one run; `engines` has those that have ended, too."""

    of: ScaledReplicas
    router: RoutePolicy
    workload: Workload
    truncate: bool
    stack: ExitStack
    engines: list[_Engine] = field(default_factory=list)
    steps: list[ScaleStep] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self._scaler = make_scaler(self.of.scaler)
        self._told = told_by(self.of.service, self.router)
        self._routed = RoutedRuns(self.router, [], follows=self._told is not None)
        self._look = self._arrivals = 0
        self._now_s = 0.0
        first = self._scaler.decide(FleetView(0, self.of.least, least=self.of.least, most=self.of.most)).engines
        for _ in range(first):
            self._order(0.0, 0.0)

    @property
    def num_done(self) -> int:
        return sum(engine.run.done for engine in self.engines)

    @property
    def living(self) -> list[_Engine]:
        return [engine for engine in self.engines if engine.ended_s is None]

    def look_until(self, to_s: float) -> None:
        """All looks that are due, and every engine brought up to `to_s`."""
        while (at_s := (self._look + 1) * self.of.look_s) <= to_s:
            self._look += 1
            self._advance(at_s)
            self._decide(at_s)
        self._advance(to_s)

    def offer(self, request: TimedRequest) -> None:
        there = [e.number for e in self.living if e.ready_s <= request.arrival_s and not e.draining]
        self._routed.offer(request, there)
        self._arrivals += 1

    def finish(self) -> None:
        """Looks go on until nothing is left to do."""
        while any(engine.run.core.has_work for engine in self.living):
            self.look_until((self._look + 1) * self.of.look_s)

    def replica_s(self) -> float:
        ended_s = max([self._now_s, *(engine.run.clock.now() for engine in self.engines)])
        return sum((ended_s if e.ended_s is None else e.ended_s) - e.ordered_s for e in self.engines)

    def _advance(self, to_s: float) -> None:
        self._now_s = to_s
        for engine in self.living:
            if engine.ready_s <= to_s:
                engine.run.advance(to_s)
            if engine.draining and not engine.run.core.has_work:
                engine.ended_s = engine.run.clock.now()
                self._routed.gone(engine.number)

    def _decide(self, now_s: float) -> None:
        living = self.living
        ready = [e for e in living if not e.draining and e.ready_s <= now_s]
        starting = [e for e in living if not e.draining and e.ready_s > now_s]
        view = FleetView(
            round(now_s * _US), len(ready), len(starting), sum(e.run.num_unfinished(now_s) for e in living),
            self._arrivals, round(self.of.start_s * _US), self.of.least, self.of.most,
        )  # fmt: skip
        self._arrivals = 0
        size = self._scaler.decide(view)
        if size.engines == view.engines:
            return
        self.steps.append(ScaleStep(now_s, view.engines, size.engines, size.why))
        for _ in range(size.engines - view.engines):
            self._order(now_s, now_s + self.of.start_s)
        # Those that start are told to stop first, the last one first; of others those with least to do.
        for engine in sorted(starting, key=lambda e: -e.number)[: max(0, view.engines - size.engines)]:
            engine.ended_s = now_s
        leaving = view.engines - size.engines - len(starting)
        for engine in sorted(ready, key=lambda e: (e.run.num_unfinished(now_s), -e.number))[: max(0, leaving)]:
            engine.draining = True

    def _order(self, now_s: float, ready_s: float) -> None:
        run = open_run(self.of.service, self.workload, self.truncate, self._told)
        self.stack.enter_context(run.listening())
        self.engines.append(_Engine(self._routed.add(run), run, now_s, ready_s))
        self.most = max(self.most, len(self.living))
