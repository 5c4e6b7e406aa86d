"""Several simulated engines behind a router, on one virtual clock or, where the router needs no news of them, in
several processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.base.clock import MonotonicClock, VirtualClock
from penstock.base.errors import ConfigError, PenstockError
from penstock.executor.sim_files import DiskRates, SimFolder
from penstock.kv.events import EventSettings
from penstock.route import ROUTERS
from penstock.route.router import EngineLoad, RoutePolicy
from penstock.sim.driver import Progress, WorkloadRun
from penstock.sim.moving import Ticks
from penstock.sim.result import RequestColumns, SimResult
from penstock.sim.routed import RoutedRuns, routed, told_by
from penstock.sim.service import SimulatedService
from penstock.sim.timeline import Series
from penstock.sim.workload import Workload

MAX_REPLICAS = 1024
_SAID = 512
"""Requests between two news of a process."""


@dataclass(frozen=True)
class Replicas:
    """What is run: `service` so many times. `router`: of `route.ROUTERS`. `processes`: at most so many, if the router
    looks at no loads. `reschedule_s`: so often requests move from engine to engine (`route.rescheduling`), whose
    blocks then lie in a folder that all have, at `rates` (or usual ones); 0: none does."""

    service: SimulatedService
    num_replicas: int
    router: str = "round-robin"
    processes: int = 1
    reschedule_s: float = 0.0
    rates: DiskRates | None = None

    def run(
        self, workload: Workload, *, truncate: bool = False, progress: Callable[[Progress], None] | None = None
    ) -> SimResult:  # fmt: skip
        """The whole workload; everybody's requests as one result, whose series count from the same start.

        Raises ConfigError for an unknown router or a senseless number, and as `simulate`.
        """
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas: {self.num_replicas} must be from 1 to {MAX_REPLICAS}", field="replicas")
        began = MonotonicClock()
        began_s = began.now()
        router = ROUTERS.get(self.router)()
        if self.reschedule_s and self.service.config.cache.kv_offload == "none":
            raise ConfigError("reschedule: keys and values go by a store; give kv_offload, too", field="kv_offload")
        if router.reads_loads or self.reschedule_s:
            results = self._together(router, workload, truncate, progress)
        else:
            results = self._apart(router, workload, truncate, progress)
        return replace(merged(results, self.service.label), wall_s=began.now() - began_s)

    def _together(
        self, router: RoutePolicy, workload: Workload, truncate: bool, progress: Callable[[Progress], None] | None
    ) -> list[SimResult]:
        """All of them in this process, each brought up to every arrival: the router sees them as they are then."""
        told = told_by(self.service, router)
        folder = SimFolder(self.rates) if self.reschedule_s else None
        runs = [open_run(self.service, workload, truncate, told, folder) for _ in range(self.num_replicas)]
        group = RoutedRuns(router, runs, follows=told is not None)
        for number, run in enumerate(runs if self.reschedule_s else ()):
            run.beside, run.number = len(runs), number
        ticks = Ticks(runs, self.reschedule_s)
        with ExitStack() as stack:
            for run in runs:
                stack.enter_context(run.listening())
            began_s, clock = MonotonicClock().now(), MonotonicClock()
            for number, request in enumerate(workload):
                ticks.until(request.arrival_s)
                for run in runs:
                    run.advance(request.arrival_s)
                group.offer(request)
                if progress is not None and number % _SAID == 0:
                    done = sum(run.done for run in runs)
                    progress(Progress(number + 1, done, 0, request.arrival_s, clock.now() - began_s))
            ticks.until(None)
            for run in runs:
                run.advance(None)
        return [run.result() for run in runs]

    def _apart(
        self, router: RoutePolicy, workload: Workload, truncate: bool, progress: Callable[[Progress], None] | None
    ) -> list[SimResult]:
        """Each by itself; replicas are dealt out to processes, which read the workload themselves."""
        n = min(self.processes, self.num_replicas)
        if n < 2 or "fork" not in multiprocessing.get_all_start_methods():
            return self._some(router, range(self.num_replicas), workload, truncate, progress)
        context = multiprocessing.get_context("fork")  # a workload is code, which cannot be sent
        pipes, children = [], []
        for k in range(n):
            ours, theirs = context.Pipe(duplex=False)
            mine = range(k, self.num_replicas, n)
            child = context.Process(target=self._child, args=(theirs, router, mine, workload, truncate), daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        try:
            parts = _listen(pipes, progress)
        finally:
            for child in children:
                child.terminate()
                child.join()
        return [result for part in parts for result in part]

    def _child(self, pipe: Any, router: RoutePolicy, mine: range, workload: Workload, truncate: bool) -> None:
        try:
            pipe.send(self._some(router, mine, workload, truncate, pipe.send))
        except PenstockError as error:
            pipe.send(error)
        pipe.close()

    def _some(
        self, router: RoutePolicy, mine: range, workload: Workload, truncate: bool,
        progress: Callable[[Progress], None] | None,
    ) -> list[SimResult]:  # fmt: skip
        """These replicas, each brought up to the arrivals of its own requests."""
        runs = {k: open_run(self.service, workload, truncate) for k in mine}
        clock, none = MonotonicClock(), [EngineLoad(k) for k in range(self.num_replicas)]
        began_s, arrived = clock.now(), 0
        with ExitStack() as stack:
            for run in runs.values():
                stack.enter_context(run.listening())
            for request in workload:
                chosen = router.choose(routed(request), none)
                if chosen not in runs:
                    continue
                run = runs[chosen]
                run.advance(request.arrival_s)
                run.offer(request)
                arrived += 1
                if progress is not None and arrived % _SAID == 0:
                    done = sum(run.done for run in runs.values())
                    progress(Progress(arrived, done, 0, request.arrival_s, clock.now() - began_s))
            for run in runs.values():
                run.advance(None)
        return [run.result() for run in runs.values()]


def open_run(
    service: SimulatedService, workload: Workload, truncate: bool, told: EventSettings | None = None,
    folder: SimFolder | None = None,
) -> WorkloadRun:  # fmt: skip
    """An engine of its own, which nobody has asked anything yet, on a clock that stands at 0. `folder`: requests may be
    moved from it, with blocks that lie there."""
    clock = VirtualClock()
    limits = service.limits(truncate=truncate)
    core = service.core(clock, folder, events=told)
    run = WorkloadRun(core, clock, workload, limits, service.label, False, False, None)
    run.moves = folder is not None
    return run


def _listen(pipes: list[Any], progress: Callable[[Progress], None] | None) -> list[list[SimResult]]:
    """What every process comes to, in their order. Raises what one of them raised, or EOFError if one died."""
    from multiprocessing.connection import wait

    latest: dict[Any, Progress] = {}
    found: dict[Any, list[SimResult]] = {}
    while len(found) < len(pipes):
        ready: list[Any] = wait([pipe for pipe in pipes if pipe not in found])
        for pipe in ready:
            news = pipe.recv()
            if isinstance(news, PenstockError):
                raise news
            if isinstance(news, list):
                found[pipe] = news
                continue
            latest[pipe] = news
            if progress is not None:
                every = latest.values()
                progress(Progress(
                    sum(p.arrived for p in every), sum(p.done for p in every), 0, min(p.now_s for p in every),
                    max(p.wall_s for p in every),
                ))  # fmt: skip
    return [found[pipe] for pipe in pipes]


def merged(results: Sequence[SimResult], label: str) -> SimResult:
    """One result of several that ran side by side from the same moment: requests in order of arrival, sequences in
    queues and counts added up, shares of pools averaged."""
    columns = [r.requests for r in results]
    names = tuple(dict.fromkeys(name for r in results for name in r.tenants))
    order = np.argsort(np.concatenate([c.arrival_s for c in columns]), kind="stable")
    places = [np.array([names.index(name) for name in r.tenants] or [0], np.int64) for r in results]
    joined = {
        name: np.concatenate([getattr(c, name) for c in columns])[order]
        for name in RequestColumns.__dataclass_fields__
        if name != "tenant"
    }
    tenant = np.concatenate([place[c.tenant] for place, c in zip(places, columns, strict=True)])[order]
    requests = RequestColumns(**joined, tenant=tenant)
    first = results[0]
    finish_s = requests.finish_s
    return replace(
        first,
        label=label,
        requests=requests,
        tenants=names,
        gaps_s=np.concatenate([r.gaps_s for r in results]),
        gap_counts=np.concatenate([r.gap_counts for r in results]),
        series=_merged_series([r.series for r in results], first.levels),
        memory={name: _mean(r.memory[name] for r in results) for name in first.memory},
        kv_peak=max(r.kv_peak for r in results),
        kv_tokens=sum(r.kv_tokens for r in results),
        refused=_added([r.refused for r in results]),
        truncated=sum(r.truncated for r in results),
        failed=sum(r.failed for r in results),
        stats=replace(first.stats, **_added([_counts(r.stats) for r in results])),
        span_s=float(np.nanmax(finish_s) - requests.arrival_s[0]) if len(requests) else 0.0,
        busy_s=_mean(r.busy_s for r in results),
        hits=_added([r.hits for r in results]),
        tokens=(),
    )


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))


def _added(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: sum(c.get(name, 0) for c in counts) for name in dict.fromkeys(n for c in counts for n in c)}


def _counts(stats: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(stats).items() if isinstance(value, int | float)}


def _merged_series(series: Sequence[Series], levels: tuple[str, ...]) -> Series:
    """Widths are powers of two of each other, so the narrower ones' buckets go whole into the widest one's."""
    width_s = max(s.width_s for s in series)
    wide = [_widened(s, round(width_s / s.width_s)) for s in series]
    rows = max(len(s.levels) for s in wide)
    sums = sum(_padded(s.levels, rows) for s in wide)
    counts = sum(_padded(s.counts, rows) for s in wide)
    assert isinstance(sums, np.ndarray)
    assert isinstance(counts, np.ndarray)
    shares = [k for k, name in enumerate(levels) if name not in ("running", "waiting")]
    sums[:, shares] /= len(series)
    return Series(width_s, sums, counts)


def _widened(series: Series, factor: int) -> Series:
    rows = -(-len(series.levels) // factor) * factor
    levels, counts = _padded(series.levels, rows), _padded(series.counts, rows)
    return Series(
        series.width_s * factor,
        levels.reshape(-1, factor, levels.shape[1]).mean(axis=1),
        counts.reshape(-1, factor, counts.shape[1]).sum(axis=1),
    )


def _padded(values: Any, rows: int) -> Any:
    return np.pad(values, ((0, rows - len(values)), (0, 0)))
