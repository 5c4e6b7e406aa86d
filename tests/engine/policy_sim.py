"""Loads in virtual time: the real scheduler and KV manager on a simulated device; a formula says what steps cost."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from penstock.base.clock import VirtualClock
from penstock.core.batch import SchedulerOutput
from penstock.core.cache_spec import group_layers
from penstock.core.events import EngineStats
from penstock.core.model_spec import cache_spec
from penstock.core.request import Request
from penstock.core.step_shape import StepShape
from penstock.engine.core import EngineCore
from penstock.executor.sim import SimExecutor
from penstock.kv.manager import KVManager
from penstock.sched.adapters import WithAdapters
from penstock.sched.offline import WithOffline
from penstock.sched.policy import make_policy
from penstock.sched.policy.slot_use import SlotUse
from penstock.sched.scheduler import Scheduler
from penstock.sched.shares import WithShares
from tests.engine.fake_model import spec
from tests.engine.harness import request

VOCAB = 30_000


@dataclass(frozen=True)
class LinearTimer:
    """A step costs a fixed time (weights are read once) and a time per token. Units: seconds."""

    base_s: float = 0.010
    token_s: float = 0.00002
    name: str = "linear"

    def step_s(self, shape: StepShape) -> float:
        return self.base_s + self.token_s * shape.num_tokens

    def step_s_of(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / 1e10


class HooklessScheduler(Scheduler):
    """Never displaces for somebody who waits, never holds a start back: what the two hooks are worth."""

    def schedule(self, step: int, *, idle: bool, now_s: float = 0.0) -> SchedulerOutput | None:
        self.policy.displaces = False
        self.policy.not_before_s = lambda running, waiting: None  # type: ignore[method-assign]
        return super().schedule(step, idle=idle, now_s=now_s)


@dataclass
class Played:
    """What a load came to. Times in seconds since the start, by request id."""

    first_s: dict[str, float] = field(default_factory=dict)
    end_s: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)
    """(when submitted, tokens)."""
    slots: SlotUse = field(default_factory=SlotUse)
    hit_tokens: int = 0
    query_tokens: int = 0
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    rows: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """(first token, tokens) of every row, by request id."""
    stats: EngineStats = field(default_factory=EngineStats)

    def ttft_s(self, load: Seq[Request]) -> list[float]:
        return [self.first_s[r.request_id] - r.arrival_s for r in load]

    def latency_s(self, load: Seq[Request]) -> list[float]:
        return [self.end_s[r.request_id] - r.arrival_s for r in load]

    @property
    def makespan_s(self) -> float:
        return max(self.end_s.values())

    @property
    def tokens_per_s(self) -> float:
        """Generated and prompt tokens that were run, per second of the whole load."""
        return self.num_tokens / self.makespan_s

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens


def play(
    policy: str,
    load: Seq[Request],
    *,
    num_blocks: int = 4000,
    block_size: int = 16,
    budget: int = 512,
    max_num_seqs: int = 32,
    eviction: str = "lru",
    prefix_cache: str = "radix",
    depth: int = 1,
    timer: LinearTimer | None = None,
    hooks: bool = True,
    max_adapters: int = 0,
    offline: str = "",
    step_s: float = 0.1,
    slowdown: float = 0.1,
    shares: bool = True,
    **more: Any,
) -> Played:
    """Serve `load` (sorted by arrival_s) to its end; every request must end. `max_adapters`: that run at once, if any
    are served. `offline`: the policy of offline work, whose steps alone take `step_s`, and beside others a share of
    `slowdown` longer; without one it is as all other. `shares`: of tenants in the memory are kept. `more`: of the KV
    manager."""
    timer = timer or LinearTimer()
    clock = VirtualClock()
    groups = group_layers([cache_spec(layer, "float32") for layer in spec(slots=False).layers])
    kv = KVManager(groups, [num_blocks], block_size, prefix_cache=prefix_cache, eviction=eviction, **more)
    orders: Any = make_policy(policy)
    if shares:
        orders = shared = WithShares(orders)
    behind = WithOffline(orders, make_policy(offline), step_s=step_s, slowdown=slowdown) if offline else None
    orders = behind or orders
    if max_adapters:
        orders = placed = WithAdapters(orders, max_adapters)
    scheduler = (Scheduler if hooks else HooklessScheduler)(
        kv, orders, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=block_size, offline=behind
    )
    if shares:
        shared.queues = scheduler
    if max_adapters:
        placed.queues = scheduler
    executor = SimExecutor(timer, clock, vocab_size=VOCAB, depth=depth)
    core = EngineCore(scheduler, kv, executor, clock)
    played = Played()
    submit = executor.submit
    was_running = 0

    def watch(output: SchedulerOutput) -> None:
        played.steps.append((clock.now(), output.num_tokens))
        for row in output.scheduled:
            name = core._sequences[row.seq_id].request.request_id
            played.rows.setdefault(name, []).append((row.start, row.num_tokens))
        played.slots.step(len(scheduler.running), len(scheduler.waiting), new_batch=was_running == 0)
        submit(output)

    executor.submit = watch  # type: ignore[method-assign]
    arrived = 0
    while arrived < len(load) or core.has_work:
        while arrived < len(load) and load[arrived].arrival_s <= clock.now():
            core.add(load[arrived])
            arrived += 1
        before = clock.now()
        was_running = len(scheduler.running)
        outputs = core.step() if core.has_work else []
        for out in outputs:
            if out.token_ids:
                played.first_s.setdefault(out.request_id, clock.now())
            if out.finish_reason is not None:
                played.end_s[out.request_id] = clock.now()
        if clock.now() == before and not outputs:
            wake = [load[arrived].arrival_s] if arrived < len(load) else []
            if core.has_work and scheduler.wake_s is not None:
                wake.append(scheduler.wake_s)
            clock.advance_to(min(wake))
    stats = kv.stats()
    kv.check_invariants([])
    assert set(played.end_s) == {r.request_id for r in load}, "somebody was lost"
    played.hit_tokens, played.query_tokens = stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens
    played.num_evicted_blocks = stats.num_evicted_blocks
    played.num_preemptions = core.stats.num_preemptions
    played.num_tokens = core.stats.num_scheduled_tokens
    played.busy_s = executor.busy_s
    played.stats = core.stats
    return played


def poisson(rng: random.Random, rate_hz: float, seconds: float) -> list[float]:
    """Arrival times."""
    times = []
    now = rng.expovariate(rate_hz)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate_hz)
    return times


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def ask(rng: random.Random, arrival_s: float, prompt_len: int, num_out: int, **kw: Any) -> Request:
    """A request of random tokens, nothing shared."""
    return request(prompt(rng, prompt_len), max_tokens=num_out, arrival_s=arrival_s, **kw)


def quantile(values: Seq[float], q: float) -> float:
    """The smallest value that at least a share `q` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1)]
