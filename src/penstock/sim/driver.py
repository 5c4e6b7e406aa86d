"""The event loop of a run: requests arrive, the engine steps, an idle engine waits for the next arrival.

On a virtual clock waiting is a jump; on the machine's clock (`sim.real`) the same loop sleeps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import cast

import numpy as np

from penstock.base.clock import Clock, MonotonicClock
from penstock.base.errors import EngineError, InputError
from penstock.core.events import EngineStats
from penstock.core.output import EngineOutput
from penstock.core.qoe import Delivery, Expected
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.core.step_shape import StepShape
from penstock.engine.core import EngineCore
from penstock.kv.manager import KVManager
from penstock.sim.memory import SHARES
from penstock.sim.result import RequestColumns, SimResult
from penstock.sim.tap import COUNTERS, LEVELS, StepTap
from penstock.sim.timeline import Timeline
from penstock.sim.workload import TimedRequest, Workload, prompt_ids

Sample = tuple[StepShape, float]
_NEVER = float("nan")
_PROGRESS_STEPS = 256
_GREEDY = TokenRules(temperature=0.0)


@dataclass
class SimLimits:
    """What a request may ask for.

    `max_model_len`: prompt and output together. `kv_capacity_tokens`: what the pool holds; the smaller one counts.
    `truncate`: shorten what is too long (the prompt first, from its end) instead of refusing it.
    """

    max_model_len: int
    kv_capacity_tokens: int
    vocab_size: int
    truncate: bool = False


@dataclass
class Progress:
    """How far a run has come. Units: requests, tokens, virtual and real seconds."""

    arrived: int
    done: int
    tokens: int
    now_s: float
    wall_s: float


def hits_by_tier(kv: KVManager) -> dict[str, int]:
    """See `SimResult.hits`."""
    stats = kv.stats()
    host = stats.num_loaded_blocks * kv.block_size
    return {
        "queried": stats.num_prefix_query_tokens,
        "device": stats.num_prefix_hit_tokens - host,
        "host": host,
        "disk": stats.num_store_hit_tokens,
    }


def since(stats: EngineStats, before: EngineStats) -> EngineStats:
    """What was counted after `before` was; peaks are those of all time."""
    counts = {
        name: value - getattr(before, name)
        for name, value in vars(stats).items()
        if isinstance(value, int | float) and not name.startswith("peak")
    }
    return replace(stats, **counts)


_FACTS = (
    "arrival_s", "scheduled_s", "first_token_s", "finish_s", "num_prompt", "num_output", "cached", "preemptions",
    "quality",
)  # fmt: skip


class _Columns:
    """One growing array per fact: about 60 bytes per request. Row r is the r-th served request."""

    def __init__(self) -> None:
        self.arrival_s, self.scheduled_s = array("d"), array("d")
        self.first_token_s, self.finish_s = array("d"), array("d")
        self.num_prompt, self.num_output, self.cached = array("I"), array("I"), array("I")
        self.preemptions, self.tenant = array("I"), array("I")
        self.quality = array("d")

    def add(self, request: TimedRequest, tenant: int) -> int:
        row = len(self.arrival_s)
        self.arrival_s.append(request.arrival_s)
        for times in (self.scheduled_s, self.first_token_s, self.finish_s, self.quality):
            times.append(_NEVER)
        self.num_prompt.append(request.num_prompt)
        self.tenant.append(tenant)
        for zeros in (self.num_output, self.cached, self.preemptions):
            zeros.append(0)
        return row

    def copy(self, other: _Columns, row: int, tenant: int) -> int:
        """A request that comes with what is known of it. Returns its row here."""
        for name in _FACTS:
            getattr(self, name).append(getattr(other, name)[row])
        self.tenant.append(tenant)
        return len(self.tenant) - 1

    def finished(self) -> RequestColumns:
        def floats(values: array[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.array(values, np.float64)

        def ints(values: array[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.array(values, np.int64)

        return RequestColumns(
            floats(self.arrival_s), floats(self.scheduled_s), floats(self.first_token_s), floats(self.finish_s),
            ints(self.num_prompt), ints(self.num_output), ints(self.cached), ints(self.preemptions), ints(self.tenant),
            floats(self.quality),
        )  # fmt: skip


class _Live:
    """A request between arrival and its last token."""

    __slots__ = ("delivery", "last_s", "request", "row", "token_ids", "urgent")

    def __init__(self, row: int, delivery: Delivery, *, urgent: bool) -> None:
        self.urgent = urgent
        self.request: Request | None = None
        self.token_ids: list[int] = []  # where requests move
        self.row = row
        self.delivery = delivery
        self.last_s = _NEVER


def simulate(
    core: EngineCore,
    clock: Clock,
    workload: Workload,
    limits: SimLimits,
    *,
    label: str = "",
    digests: bool = False,
    real: bool = False,
    samples: list[Sample] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SimResult:
    """Run a workload to its end through an idle engine that lives on `clock`.

    Every request generates exactly `num_output` tokens (there is no end-of-sequence token). One that can never fit is
    refused and counted, never cut in silence. `digests` also hashes every step, so that two schedules can be compared;
    it costs about as much as the simulation itself. `progress` is called every few hundred steps. `real`: the executor
    computes, so prompts are lists, and the tokens are kept (`SimResult.tokens`). `samples` collects (shape, seconds)
    of every step, from the moment it was due (the end of the one before, or of a wait), with one step in flight.

    Raises InputError for broken workloads, EngineError if the engine gets stuck. Mutates `core`, and a virtual `clock`.
    """
    return WorkloadRun(core, clock, workload, limits, label, digests, real, samples).run(progress)


class WorkloadRun:
    """One engine and the requests that it is offered."""

    def __init__(
        self, core: EngineCore, clock: Clock, workload: Workload, limits: SimLimits, label: str, digests: bool,
        real: bool, samples: list[Sample] | None,
    ) -> None:  # fmt: skip
        self.core = core
        self.clock = clock
        self.workload = workload
        self.limits = limits
        self.label = label
        self.columns = _Columns()
        self.live: dict[str, _Live] = {}
        self.tenants: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.truncated = self.failed = self.done = self.arrived = 0
        self.gaps_s, self.gap_counts = array("d"), array("I")
        self.start_s = clock.now()
        self.first_arrival_s: float | None = None
        self.timeline = Timeline(len(LEVELS), len(COUNTERS))
        self.lists = real or core.recorder is not None
        self.tokens: list[list[int]] | None = [] if real else None
        self.samples = samples
        self.due_s = self.start_s
        """When the next step was due to begin: the last one's end, or the end of a wait."""
        self.ended_last = self.steps = 0
        """Requests that the last step ended; steps."""
        self.last_arrival_s = -inf
        self.progress: Callable[[Progress], None] | None = None
        self.wall = MonotonicClock()
        self.began_s = self.wall.now()
        self.before, self.hits_before = replace(core.stats), hits_by_tier(core.kv)
        self.beside, self.number = 1, 0
        """Runs that share a folder, and which of them this is: their texts differ."""
        self.moves = False
        """Requests may be taken out and taken in (`sim.moving`)."""
        self.left: set[int] = set()
        """Rows of requests that have been taken out."""
        self.tap = StepTap(core, self.timeline, digests=digests, shapes=samples is not None, inner=core.recorder)

    def run(self, progress: Callable[[Progress], None] | None) -> SimResult:
        """The whole workload."""
        with self.listening(progress):
            for request in self.workload:
                self.advance(self.start_s + request.arrival_s)
                self.offer(request)
            self.advance(None)
        return self.result()

    @contextmanager
    def listening(self, progress: Callable[[Progress], None] | None = None) -> Iterator[None]:
        """While requests are offered and time passes."""
        self.progress = progress
        outer, self.core.recorder = self.core.recorder, self.tap
        try:
            yield
        finally:
            self.core.recorder = outer
        self.tap.measure()
        if progress is not None:
            progress(self._progress())

    def advance(self, to_s: float | None) -> None:
        """Step until nothing is left to do, or until `to_s` on the clock, which a last step may go beyond.

        What counts is when the next step is due: on the machine's clock, a request that comes in the microseconds until
        it begins waits for the one after it, as in a simulation.
        """
        while self.core.has_work and (to_s is None or self.due_s < to_s):
            self.step(to_s)
        if to_s is not None and self.due_s < to_s:
            self._wait(to_s)

    def step(self, next_s: float | None) -> None:
        """One step of an engine that has work. `next_s`: when somebody comes next, at the latest."""
        self._step(next_s)
        self.steps += 1
        if self.progress is not None and self.steps % _PROGRESS_STEPS == 0:
            self.progress(self._progress())

    def sent(self, made: Request) -> Request:
        """As the engine is given it."""
        return made

    def offer(self, request: TimedRequest) -> None:
        """Hand in a request whose time has come, or refuse it. Raises InputError if it comes before the last one."""
        if request.arrival_s < self.last_arrival_s:
            raise InputError(f"workload {self.workload.name}: request {self.arrived} arrives before the one ahead")
        self.last_arrival_s = request.arrival_s
        self.arrived += 1
        fitting = self._fit(request)
        if fitting is not None:
            self._add(fitting)

    def num_unfinished(self, now_s: float) -> int:
        """Requests that were offered and have not ended by `now_s`; what a step beyond that ends counts."""
        return len(self.live) + (self.ended_last if self.clock.now() > now_s else 0)

    def num_prompt_tokens(self) -> tuple[int, int, int]:
        """Of those that have not ended: tokens of their prompts, those of prompts without an answer yet, and how many
        go before others."""
        total = waiting = urgent = 0
        for live in self.live.values():
            tokens = self.columns.num_prompt[live.row]
            total += tokens
            waiting += tokens if isnan(self.columns.first_token_s[live.row]) else 0
            urgent += live.urgent
        return total, waiting, urgent

    def _wait(self, time_s: float) -> None:
        self.due_s = time_s  # who sleeps for longer is late for the step
        self.clock.wait_until(time_s)

    def _progress(self) -> Progress:
        tokens, now_s = self.core.stats.num_sampled_tokens, self.clock.now() - self.start_s
        return Progress(self.arrived, self.done, tokens, now_s, self.wall.now() - self.began_s)

    # -- arrivals ------------------------------------------------------------------------------------------------

    def _fit(self, request: TimedRequest) -> TimedRequest | None:
        limits = self.limits
        longest = min(limits.max_model_len, limits.kv_capacity_tokens)
        if request.num_prompt < 1 or request.num_output < 1:
            self._refuse("no prompt or no output")
            return None
        if request.num_prompt + request.num_output <= longest:
            return request
        if not limits.truncate or longest < 2:
            self._refuse(
                f"longer than the context of {limits.max_model_len} tokens"
                if longest == limits.max_model_len
                else f"longer than the KV pool of {limits.kv_capacity_tokens} tokens"
            )
            return None
        self.truncated += 1
        num_prompt = max(1, longest - request.num_output)
        return replace(request, num_prompt=num_prompt, num_output=min(request.num_output, longest - num_prompt))

    def _refuse(self, why: str) -> None:
        self.refused[why] = self.refused.get(why, 0) + 1

    def _add(self, request: TimedRequest) -> None:
        if self.first_arrival_s is None:
            self.first_arrival_s = request.arrival_s
        row = self.columns.add(request, self.tenants.setdefault(request.tenant, len(self.tenants)))
        number = row * self.beside + self.number
        ids = prompt_ids(request, number, self.limits.vocab_size, self.workload.block_tokens)
        request_id = str(row)
        reader = request.reader or Expected()
        self.live[request_id] = _Live(row, Delivery(request.arrival_s, reader), urgent=request.priority < 0)
        made = Request(
            request_id=request_id,
            # A simulated engine only measures and copies a prompt, so the compact array serves it.
            prompt_token_ids=ids.tolist() if self.lists else cast("list[int]", ids),
            rules=_GREEDY,
            max_tokens=request.num_output,
            priority=request.priority,
            arrival_s=self.start_s + request.arrival_s,
            offline_s=request.offline_s,
            tenant=request.tenant,
            weight=request.weight,
            slo_tpot_s=request.slo_tpot_s,
            slo_ttft_s=request.slo_ttft_s,
            expected_tokens=request.expected,
            expected_ttft_s=reader.ttft_s,
            expected_tds=reader.tds,
            calls=list(request.calls),
        )
        if self.moves:
            self.live[request_id].request = made
        self.core.add(self.sent(made))
        if self.tokens is not None:
            self.tokens.append([])
        self.timeline.count(request.arrival_s, (0, 0, 1, 0))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _step(self, next_s: float | None) -> None:
        moved, computed = self.tap.num_moves, self.tap.num_computed
        outputs = self.core.step()
        now_s = self.clock.now()
        for request_id, started_s in self.tap.started:
            if (begun := self.live.get(request_id)) is not None and isnan(self.columns.scheduled_s[begun.row]):
                self.columns.scheduled_s[begun.row] = started_s - self.start_s
        self.tap.started.clear()
        done_before, num_tokens = self.done, 0
        if outputs:
            num_tokens = self._take(outputs, now_s - self.start_s)
        counts = (num_tokens, self.tap.num_computed - computed, 0, self.done - done_before)
        self.timeline.count(now_s - self.start_s, counts)
        if self.samples is not None and self.tap.num_moves == moved + 2:
            self.samples.append((self.tap.shape, now_s - self.due_s))
        self.due_s = now_s
        self.ended_last = self.done - done_before
        if not self.core.has_work:
            self.tap.measure()
        if self.tap.num_moves == moved and not outputs:
            # A policy may hold everybody back until somebody else comes, but not for ever.
            times = [] if next_s is None else [next_s]
            if self.core.scheduler.wake_s is not None:
                times.append(self.core.scheduler.wake_s)
            if not times:
                raise EngineError("the engine has requests left, runs none of them, and nobody else will come")
            self._wait(min(times))

    def _take(self, outputs: list[EngineOutput], now_s: float) -> int:
        """Note the news of a step that ended at `now_s`; returns the tokens it brought."""
        since: dict[float, int] = {}
        num_tokens = at_once = 0
        live, columns = self.live, self.columns
        for out in outputs:
            if self.moves and out.request_id not in live:
                continue  # it has been taken out
            state = live[out.request_id]
            n = len(out.token_ids)
            if self.moves:
                state.token_ids += out.token_ids
            if n:
                num_tokens += n
                state.delivery.take(n, now_s)
                if self.tokens is not None:
                    self.tokens[state.row].extend(out.token_ids)
                last_s = state.last_s
                if last_s != last_s:
                    columns.first_token_s[state.row] = now_s
                else:
                    since[last_s] = since.get(last_s, 0) + 1
                at_once += n - 1
                state.last_s = now_s
            if out.finish_reason is not None:
                self._finish(out, state, now_s)
            if n:
                columns.num_output[state.row] += n
        for last_s, count in since.items():
            self.gaps_s.append(now_s - last_s)
            self.gap_counts.append(count)
        if at_once:  # several tokens of one request in one step
            self.gaps_s.append(0.0)
            self.gap_counts.append(at_once)
        return num_tokens

    def _finish(self, out: EngineOutput, state: _Live, now_s: float) -> None:
        row = state.row
        self.done += 1
        self.failed += out.finish_reason == "error"
        self.columns.finish_s[row] = now_s
        self.columns.quality[row] = state.delivery.quality
        self.columns.cached[row] = out.num_cached_tokens
        self.columns.preemptions[row] = out.num_preemptions
        del self.live[out.request_id]

    # -- the end -------------------------------------------------------------------------------------------------

    def result(self) -> SimResult:
        """What has been seen."""
        means = self.timeline.mean_levels()
        first_s = self.first_arrival_s or 0.0
        requests = self.columns.finished().without(self.left)
        last_s = float(np.nanmax(requests.finish_s)) if len(requests) else first_s
        return SimResult(
            label=self.label or self.workload.name,
            workload=self.workload.description,
            requests=requests,
            tenants=tuple(self.tenants),
            gaps_s=np.array(self.gaps_s, np.float64),
            gap_counts=np.array(self.gap_counts, np.int64),
            series=self.timeline.series(),
            levels=LEVELS,
            counters=COUNTERS,
            memory=dict(zip(SHARES, means[2:], strict=True)),
            kv_peak=self.tap.slots.peak,
            kv_tokens=self.limits.kv_capacity_tokens,
            refused=dict(self.refused),
            truncated=self.truncated,
            failed=self.failed,
            stats=since(self.core.stats, self.before),
            span_s=last_s - first_s,
            busy_s=self.tap.busy_s,
            wall_s=self.wall.now() - self.began_s,
            digest=self.tap.digest,
            skipped_lines=self.workload.broken.count,
            hits={name: n - self.hits_before[name] for name, n in hits_by_tier(self.core.kv).items()},
            tokens=() if self.tokens is None else tuple(map(tuple, self.tokens)),
        )
