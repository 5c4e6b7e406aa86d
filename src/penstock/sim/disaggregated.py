"""Simulated engines for prompts, for tokens and for both, on one virtual clock: what a server with roles does.

Each engine is a whole one. An engine for prompts makes one token of each request, and writes the blocks of a prompt as
its chunks end; when the last whole one is there, the router chooses an engine that decodes, which reads them and goes
on (`engine.handover`). Blocks lie in a memory that all have in common; every engine has a link to it, on which its
writes stand in one queue and its reads in another (`executor.sim_files`). Who has nothing due earlier steps first, so
nobody sees what happens later.

Sources: Splitwise, arXiv 2311.18677 (pools of prompts, of tokens and mixed); DistServe, arXiv 2401.09670; Mooncake,
arXiv 2407.00079 (a memory in common; early rejection).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import inf, isnan

from penstock.base.clock import MonotonicClock, VirtualClock
from penstock.base.errors import ConfigError
from penstock.core.replica_roles import DECODE, MIXED, PREFILL, problem_of
from penstock.core.request import Request
from penstock.core.step_shape import StepShape
from penstock.executor.sim_files import DiskRates, SimFolder
from penstock.kv.stored import paths_of
from penstock.route import ROUTERS
from penstock.route.early import MODES, PoolForecast, PoolRequest, PoolSpeed
from penstock.route.router import EngineLoad, RoutedRequest
from penstock.sim.metrics import Slo
from penstock.sim.moving import move
from penstock.sim.replicas import MAX_REPLICAS, merged
from penstock.sim.result import SimResult
from penstock.sim.role_run import RoleRun
from penstock.sim.routed import load_of, routed
from penstock.sim.service import SimulatedService
from penstock.sim.store import SimStore
from penstock.sim.workload import TimedRequest, Workload

STORE = "disk:/common,1000000GiB"
"""`kv_offload` of services with roles: the memory that all have in common never forgets."""
LATE = "late"
"""The load of engines that decode is looked at when a prompt has been computed, and not before."""
EARLY, WASTED = "early rejection", "no place to decode after its prompt"
"""Why requests are refused."""


@dataclass(frozen=True)
class EngineLink:
    """Between an engine and the common memory, each way. `block_s`: what a block costs besides its bytes."""

    bytes_per_s: float = 25e9
    block_s: float = 0.0

    @property
    def rates(self) -> DiskRates:
        """As of a disk, which gives nothing up."""
        rate, block_s = self.bytes_per_s, self.block_s
        return DiskRates(rate, rate, block_s, block_s, patience_s=1e6, most_waiting_bytes=1 << 50)


@dataclass(frozen=True)
class EnginePool:
    """`size` engines of one role; `service` has a store (`STORE`) unless all engines of the cluster are mixed.
    `price`: of one engine, per hour."""

    role: str
    service: SimulatedService
    size: int
    price: float = 0.0


@dataclass(frozen=True)
class ClusterRun:
    """What came of it, and per engine, in order of the pools: role, tokens that it sampled and computed, seconds that
    it worked, and the mean number of sequences that it ran.

    `num_passed`: prompts that went on elsewhere; `transfer_s`: of each, from its first token until its blocks were in
    the common memory. `wasted_tokens`: of prompts that were computed and then refused. `cost`: of all engines from the
    first arrival to the last token.
    """

    result: SimResult
    engines: tuple[EngineShare, ...]
    num_passed: int
    transfer_s: tuple[float, ...]
    wasted_tokens: int
    cost: float


@dataclass(frozen=True)
class EngineShare:
    """Of one engine of a run."""

    role: str
    sampled: int
    computed: int
    busy_s: float
    running: float


@dataclass(frozen=True)
class Cluster:
    """What is run. `router`: of `route.ROUTERS`, for prompts and for tokens. `reuse`: a prompt goes on with what any
    engine has written; otherwise with what its own engine has. `reject`: None, LATE, or one of `route.early.MODES`;
    `slo`: what that keeps. `nodes`: so many times the pools, each with a memory of its own, which prompts do not leave:
    `link` is then within a node.
    """

    pools: tuple[EnginePool, ...]
    router: str = "least-tokens"
    link: EngineLink = field(default_factory=EngineLink)
    reuse: bool = True
    reject: str | None = None
    slo: Slo | None = None
    nodes: int = 1

    @property
    def num_engines(self) -> int:
        return self.nodes * sum(pool.size for pool in self.pools)

    @property
    def label(self) -> str:
        shape = " ".join(f"{pool.role}={pool.size}" for pool in self.pools if pool.size)
        return shape if self.nodes == 1 else f"{self.nodes} x ({shape})"

    @property
    def price(self) -> float:
        """Of all engines, per hour."""
        return self.nodes * sum(pool.size * pool.price for pool in self.pools)

    def check(self) -> None:
        """Raises ConfigError."""
        if self.nodes < 1 or not 1 <= self.num_engines <= MAX_REPLICAS or any(pool.size < 0 for pool in self.pools):
            raise ConfigError(f"pools: {self.num_engines} engines must be 1 to {MAX_REPLICAS}", field="pools")
        roles = [pool.role for pool in self.pools if pool.size]
        if problem := problem_of(roles):
            raise ConfigError(f"pools: {problem}", field="pools")
        if self.reject not in (None, LATE, *MODES):
            raise ConfigError(f"reject: {self.reject!r} is none of {', '.join((LATE, *MODES))}", field="reject")
        if not self.link.bytes_per_s >= 1 or not self.link.block_s >= 0:
            raise ConfigError("link: needs at least 1 byte/s, and no seconds below 0", field="link")
        if set(roles) != {MIXED} and any(p.service.config.cache.kv_offload == "none" for p in self.pools if p.size):
            raise ConfigError(f"pools: keys and values go by a store; give kv_offload {STORE}", field="kv_offload")

    def run(self, workload: Workload, *, truncate: bool = False) -> ClusterRun:
        """The whole workload. Raises ConfigError as `check`, and as `simulate`."""
        self.check()
        clock = MonotonicClock()
        began_s = clock.now()
        with ExitStack() as stack:
            playing = _Playing(self, workload, truncate)
            for engine in playing.engines:
                stack.enter_context(engine.run.listening())
            playing.play(iter(workload))
        return playing.outcome(clock.now() - began_s)


@dataclass
class _Engine:
    number: int
    node: int
    role: str
    run: RoleRun
    pending: list[str] = field(default_factory=list)
    """Requests that have their first token, and whose blocks are being written."""
    asked: dict[str, RoutedRequest] = field(default_factory=dict)
    """What the router was asked for each that it has."""

    @property
    def store(self) -> SimStore | None:
        found = getattr(self.run.core.store_news, "__self__", None)
        return found if isinstance(found, SimStore) else None


class _Playing:
    """One run. Mutates its engines."""

    def __init__(self, cluster: Cluster, workload: Workload, truncate: bool) -> None:
        self._of, self._router = cluster, ROUTERS.get(cluster.router)()
        self.engines: list[_Engine] = []
        for node in range(cluster.nodes):
            folder = SimFolder(cluster.link.rates)
            for pool in cluster.pools:
                for _ in range(pool.size):
                    self.engines.append(self._engine(pool, node, folder, workload, truncate))
        self._passing: list[tuple[float, int, _Engine, str]] = []  # heap of (when its blocks are there, order, ...)
        self._first_s: dict[tuple[int, str], float] = {}
        self._paths: dict[tuple[int, str], list[str]] = {}
        self._transfers: list[float] = []
        self._order = self._wasted = 0
        self._speed = self._measured() if cluster.reject is not None else None

    def _engine(self, pool: EnginePool, node: int, folder: SimFolder, workload: Workload, truncate: bool) -> _Engine:
        clock, service, number = VirtualClock(), pool.service, len(self.engines)
        core = service.core(clock, folder)
        run = RoleRun(core, clock, workload, service.limits(truncate=truncate), service.label, pool.role == PREFILL)
        run.beside, run.number = self._of.num_engines, number
        engine = _Engine(number, node, pool.role, run)
        if engine.store is not None:
            engine.store.asked_only = True
        return engine

    # -- time ----------------------------------------------------------------------------------------------------

    def play(self, arrivals: Iterator[TimedRequest]) -> None:
        """Events in the order of their times."""
        coming = next(arrivals, None)
        while True:
            arrival_s = inf if coming is None else coming.arrival_s
            passing_s = self._passing[0][0] if self._passing else inf
            due_s = min(arrival_s, passing_s)
            working = [engine for engine in self.engines if engine.run.core.has_work and engine.run.due_s < due_s]
            if working:
                first = min(working, key=lambda engine: engine.run.due_s)
                self._step(first, due_s)
            elif coming is not None and arrival_s <= passing_s:
                self._arrives(coming)
                coming = next(arrivals, None)
            elif self._passing:
                time_s, _, source, name = heapq.heappop(self._passing)
                self._pass_on(time_s, source, name)
            else:
                return

    def _step(self, engine: _Engine, due_s: float) -> None:
        others = (e.run.due_s for e in self.engines if e is not engine and e.run.core.has_work)
        next_s = min((time_s for time_s in (due_s, *others) if engine.run.due_s < time_s < inf), default=None)
        engine.run.step(next_s)
        now_s = engine.run.clock.now()
        for name in engine.run.passed:
            engine.pending.append(name)
            self._first_s[engine.number, name] = now_s
        engine.run.passed.clear()
        self._look(engine, now_s)
        if engine.run.ended_last:
            for name in [name for name in engine.asked if name not in engine.run.live]:
                self._router.ended(engine.asked.pop(name), engine.number)

    def _look(self, engine: _Engine, now_s: float) -> None:
        """Whose blocks are written, or will be at a time that is known, goes on then."""
        left = []
        for name in engine.pending:
            ready_s = self._ready_s(engine, name, now_s)
            if ready_s is None:
                left.append(name)
                continue
            self._order += 1
            heapq.heappush(self._passing, (ready_s, self._order, engine, name))
        engine.pending = left

    def _ready_s(self, engine: _Engine, name: str, now_s: float) -> float | None:
        """When all whole blocks of its prompt are in the common memory; None: not all orders have been given."""
        key, store = (engine.number, name), engine.store
        assert store is not None, "`check` has seen to it"
        blocks = store.folder.blocks
        if key not in self._paths:
            request = engine.run.live[name].request
            assert request is not None, "the run keeps requests"
            self._paths[key] = _paths(store, request, engine.run.core.kv.block_size)
        paths = self._paths[key]
        waits = engine.run.core.kv.stored is not None and engine.run.core.kv.stored.waits
        if waits and any(path not in blocks for path in paths):
            return None
        return max([now_s, *(blocks[path][1] for path in paths if path in blocks)])

    # -- who gets what -------------------------------------------------------------------------------------------

    def _arrives(self, request: TimedRequest) -> None:
        now_s = request.arrival_s
        suited = [e for e in self.engines if e.role != DECODE] or self.engines
        if self._of.reject in MODES and self._refused(request, now_s):
            suited[0].run.refuse(EARLY)
            return
        asked = routed(request)
        engine = self._choose(asked, suited, now_s)
        engine.run.advance(now_s)
        name = str(len(engine.run.columns.arrival_s))
        if self._of.reuse and engine.store is not None:
            engine.run.before_add = lambda made: self._look_for(engine, made, now_s)
        engine.run.offer(request)
        if name in engine.run.live:
            self._place(asked, engine, name)

    def _pass_on(self, time_s: float, source: _Engine, name: str) -> None:
        key = source.number, name
        paths, first_s, asked = self._paths.pop(key), self._first_s.pop(key), source.asked.pop(name)
        request = source.run.live[name].request
        assert request is not None, "the run keeps requests"
        self._router.ended(asked, source.number)
        if self._of.reject is not None and self._has_no_place(request, time_s):
            self._wasted += len(request.prompt_token_ids)
            source.run.drop(name, WASTED)
            return
        engine = self._choose(asked, [e for e in self.engines if e.role != PREFILL and e.node == source.node], time_s)
        engine.run.advance(time_s)
        self._transfers.append(time_s - first_s)
        assert engine.store is not None, "`check` has seen to it"
        engine.store.look_for(paths, time_s)
        new = str(len(engine.run.columns.arrival_s))
        move(source.run, name, engine.run, ended=True)
        engine.run.came.add(int(new))
        self._place(asked, engine, new)

    def _look_for(self, engine: _Engine, made: Request, now_s: float) -> None:
        assert engine.store is not None, "it is asked for those that have one"
        engine.store.look_for(_paths(engine.store, made, engine.run.core.kv.block_size), now_s)

    def _choose(self, asked: RoutedRequest, engines: Sequence[_Engine], now_s: float) -> _Engine:
        loads = [self._load(engine, now_s) for engine in engines]
        return engines[self._router.choose(asked, loads)]

    def _load(self, engine: _Engine, now_s: float) -> EngineLoad:
        load = load_of(engine.number, engine.run, now_s, self._router)
        load.prompts_only = engine.role == PREFILL
        return load

    def _place(self, asked: RoutedRequest, engine: _Engine, name: str) -> None:
        engine.asked[name] = asked
        self._router.placed(asked, engine.number)

    # -- who is refused ------------------------------------------------------------------------------------------

    def _measured(self) -> PoolSpeed:
        """What steps take, by the cost model of the first engine of each kind."""
        prefills, decodes = ([e for e in self.engines if e.role != role] for role in (DECODE, PREFILL))
        timer = next(p.service for p in self._of.pools if p.size and p.role != DECODE).timer
        decoder = next(p.service for p in self._of.pools if p.size and p.role != PREFILL)
        chunk = prefills[0].run.core.scheduler.max_num_batched_tokens
        whole_s = timer.step_s(StepShape(chunk, 1, chunk, chunk * (chunk + 1) // 2, 1))
        decoding = decoder.timer
        mean = decodes[0].run.limits.kv_capacity_tokens // max(1, decoder.plan.max_num_seqs)

        def step_us(width: int) -> int:
            context = width * min(mean, 2048)
            return round(1e6 * decoding.step_s(StepShape(width, width, context, context, width)))

        slots = self._of.nodes * sum(p.size * p.service.plan.max_num_seqs for p in self._of.pools if p.role != PREFILL)
        memory = sum(e.run.limits.kv_capacity_tokens for e in decodes)
        return PoolSpeed(len(prefills), len(decodes), slots, memory, round(1e9 * whole_s / chunk), step_us)

    def _forecast(self) -> PoolForecast:
        assert self._speed is not None, "somebody refuses"
        waiting, decoding = [], []
        for engine in self.engines:
            for live in engine.run.live.values():
                request, columns = live.request, engine.run.columns
                assert request is not None, "the run keeps requests"
                prompt, out = len(request.prompt_token_ids), request.expected_tokens or request.max_tokens
                if isnan(columns.first_token_s[live.row]):
                    waiting.append((columns.arrival_s[live.row], PoolRequest(prompt, out, prompt + out)))
                else:
                    decoding.append(PoolRequest(0, max(1, out - len(live.token_ids)), prompt + out))
        return PoolForecast(self._speed, [one for _, one in sorted(waiting, key=lambda w: w[0])], decoding)

    def _refused(self, request: TimedRequest, now_s: float) -> bool:
        slo, out = self._of.slo, request.expected or request.num_output
        new = PoolRequest(request.num_prompt, out, request.num_prompt + out)
        times = (None, None) if slo is None else (round(1e6 * slo.ttft_s), round(1e6 * slo.tpot_s))
        verdict = self._forecast().judge(new, mode=self._of.reject or "", ttft_us=times[0], tpot_us=times[1])
        return verdict.retry_us is not None

    def _has_no_place(self, request: Request, now_s: float) -> bool:
        """Whether it could not decode now."""
        assert self._speed is not None, "somebody refuses"
        decoders = [engine for engine in self.engines if engine.role != PREFILL]
        there = [live for engine in decoders for live in engine.run.live.values()]
        held = sum(len(live.request.prompt_token_ids) + live.request.max_tokens for live in there if live.request)
        own, width = len(request.prompt_token_ids) + request.max_tokens, len(there) + 1
        late = self._of.slo is not None and self._speed.step_us(-(-width // len(decoders))) > 1e6 * self._of.slo.tpot_s
        return bool(there) and (width > self._speed.slots or held + own > self._speed.kv_tokens or late)

    # -- the end -------------------------------------------------------------------------------------------------

    def outcome(self, wall_s: float) -> ClusterRun:
        results = [engine.run.result() for engine in self.engines]
        result = replace(merged(results, self._of.label), wall_s=wall_s)
        shares = []
        for engine, one in zip(self.engines, results, strict=True):
            stats = one.stats
            running = one.series.levels[:, one.levels.index("running")].mean() if len(one.series.levels) else 0.0
            busy_s = getattr(engine.run.core.executor, "busy_s", 0.0)
            shares.append(
                EngineShare(engine.role, stats.num_sampled_tokens, stats.num_scheduled_tokens, busy_s, float(running))
            )
        cost = self._of.price * result.span_s / 3600
        return ClusterRun(result, tuple(shares), len(self._transfers), tuple(self._transfers), self._wasted, cost)


def _paths(store: SimStore, request: Request, block_size: int) -> list[str]:
    return paths_of(store.settings, request, array("I", request.prompt_token_ids), block_size)


def imbalance(run: ClusterRun) -> float:
    """How uneven the engines that decode are: the most tokens that one sampled over the mean; 1 is even."""
    sampled = [share.sampled for share in run.engines if share.role != PREFILL]
    return max(sampled) * len(sampled) / max(1, sum(sampled))
