"""What a router of simulated engines is asked and told: the same as one of a server, on the virtual clock.

An engine that can tells after every step which blocks it holds (`engine.block_news`), by the engine's own names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.engine.block_news import BlockNews
from penstock.engine.placement import MOST_BLOCKS
from penstock.kv.block_names import BlockNames
from penstock.kv.events import EventSettings
from penstock.kv.store_index import hash_of, names_after
from penstock.plan.resolve import events_problem
from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy
from penstock.sim.driver import WorkloadRun
from penstock.sim.service import SimulatedService
from penstock.sim.workload import TimedRequest, prompt_ids

SECRET = bytes(32)
"""Nobody has anything to hide here, and runs are to be the same."""


def told_by(service: SimulatedService, router: RoutePolicy) -> EventSettings | None:
    """With what its engines record which blocks they hold, where the router wants to know and they have any."""
    wants = router.reads_blocks and not events_problem(service.config, service.plan.groups)
    return EventSettings(SECRET) if wants else None


class RoutedRuns:
    """`router` before `runs`. `follows`: the engines tell which blocks they hold."""

    def __init__(self, router: RoutePolicy, runs: list[WorkloadRun], *, follows: bool) -> None:
        self._router, self._follows = router, follows
        self._runs: list[WorkloadRun] = []
        self._news: list[BlockNews] = []
        self._open: list[dict[str, RoutedRequest]] = []
        for run in runs:
            self.add(run)

    def add(self, run: WorkloadRun) -> int:
        """One engine more: its number."""
        self._runs.append(run)
        self._open.append({})
        if self._follows:
            news = run.core.tell_events = BlockNews()
            run.core.publish()
            self._news.append(news)
        return len(self._runs) - 1

    def gone(self, number: int) -> None:
        """That engine has ended; it is never offered anything again."""
        self._hear()
        self._router.gone(number)

    def offer(self, request: TimedRequest, among: Sequence[int] | None = None) -> int:
        """Every engine has been brought up to the request's arrival: the number of the one that it goes to, one of
        `among` (None: any)."""
        self._hear()
        asked = self._asked(request)
        numbers = range(len(self._runs)) if among is None else among
        loads = [load_of(k, self._runs[k], request.arrival_s, self._router) for k in numbers]
        chosen = loads[self._router.choose(asked, loads)].number
        run = self._runs[chosen]
        name = str(len(run.columns.arrival_s))
        run.offer(request)
        if name in run.live:
            self._router.placed(asked, chosen)
            self._open[chosen][name] = asked
        return chosen

    def _hear(self) -> None:
        for number, news in enumerate(self._news):
            if (told := news.take()) is not None:
                self._router.told(number, told.stored, told.removed, cleared=told.cleared)
        for number, run in enumerate(self._runs):
            for name in [name for name in self._open[number] if name not in run.live]:
                self._router.ended(self._open[number].pop(name), number)

    def _asked(self, request: TimedRequest) -> RoutedRequest:
        workload, limits, kv = self._runs[0].workload, self._runs[0].limits, self._runs[0].core.kv
        if not self._follows:
            return routed(request)
        names = BlockNames(SECRET, "", kv.block_size)
        shared = min(len(request.blocks) * workload.block_tokens, request.num_prompt, MOST_BLOCKS * kv.block_size)
        if not shared:
            return RoutedRequest(request.num_prompt, (), request.session, request.priority, request.expected)
        part = replace(request, num_prompt=shared)
        ids = prompt_ids(part, 0, limits.vocab_size, workload.block_tokens).tobytes()
        blocks = [hash_of(name) for name in names_after(SECRET, names.root(b"", ""), ids, 4 * kv.block_size)]
        return RoutedRequest(request.num_prompt, blocks, request.session, request.priority, request.expected)


def routed(request: TimedRequest) -> RoutedRequest:
    """As far as routers that hear nothing of engines' blocks look at it."""
    blocks, before = [], 0
    for piece in request.blocks:  # ids of pieces say nothing of what is in front of them
        before = hash((before, piece))
        blocks.append(before)
    return RoutedRequest(request.num_prompt, blocks, request.session, request.priority, request.expected)


def load_of(number: int, run: WorkloadRun, now_s: float, router: RoutePolicy) -> EngineLoad:
    """What a router sees of a simulated engine that was brought up to `now_s`."""
    guesses = router.reads_blocks and run.core.kv.events is None
    size = max(1, run.workload.block_tokens) if guesses else run.core.kv.block_size
    load = EngineLoad(number, requests=run.num_unfinished(now_s), block_size=size)
    if router.reads_tokens:
        load.tokens, load.waiting_tokens, load.urgent = run.num_prompt_tokens()
        load.kv_blocks = run.limits.kv_capacity_tokens // load.block_size
        load.kv_used = sum(group.used for group in run.core.kv.stats().groups)
    return load
