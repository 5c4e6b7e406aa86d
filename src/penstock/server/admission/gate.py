"""Which requests are taken on at arrival: what can be served in time, and of every tenant what it may have.

A refusal costs next to nothing and comes at once: 429 if the client asks for too much, 503 if the server has too much
to do, both with the time at which asking again makes sense. What has been taken on is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Scope

from penstock.base.clock import Clock
from penstock.base.errors import InputError, RefusedError
from penstock.config.server import ServerConfig
from penstock.core.request import Request
from penstock.engine.frontend import EngineClient
from penstock.engine.stream import Stream
from penstock.server.admission.early import EarlyRejection, mode_of
from penstock.server.admission.forecast import QueueForecast
from penstock.server.admission.limits import Left, limit_headers
from penstock.server.admission.pace import Pace
from penstock.server.admission.promises import PromisedRequest, PromiseKeeper, PromiseVerdict
from penstock.server.call import Call, Tenant
from penstock.server.context import Server
from penstock.server.errors import WireError

if TYPE_CHECKING:
    from penstock.core.messages import EngineInfo

GENERATING = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
        "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify", "/pooling",
        "/v1/decisions", "/v1/systemone", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/completion",
        "/infill", "/generate", "/generate_stream", "/",
    )
)  # fmt: skip
TICK_S = 0.1
QUEUE_OVER_KV = 16
"""By default so many times the KV memory may wait, in prompt tokens."""
DOWN_S = 10.0
"""Seconds that a restart of the engine may take before new requests are refused."""
BEAM_COST = 2
"""A beam looks at twice its width of continuations per token."""
MAX_RETRY_S = 600.0
OFFLINE_OVER_SLOTS = 8
"""Of offline work so many times the slots may be there beyond the length of the queue: lines of batches."""


@dataclass(eq=False)
class Admitted:
    """A request that was taken on. `cost`: tokens it may come to, weighted; `reserved`: of its tenant's tokens;
    `offline`: as offline work, which is no load to others."""

    tenant: Tenant
    num_prompt: int
    width: int
    reserved: int
    arrival_s: float
    progress: PromisedRequest
    offline: bool = False
    stream: Stream | None = None
    started: bool = False


@dataclass
class Load:
    """What a tenant (or all together) has in the engine. Waiting: without a first token."""

    weight: float = 1.0
    waiting: int = 0
    waiting_seqs: int = 0
    waiting_tokens: int = 0
    running_seqs: int = 0

    @property
    def live(self) -> int:
        return self.waiting_seqs + self.running_seqs


@dataclass
class Bucket:
    """Tokens that a tenant may still use now; fills up to its tokens per minute."""

    level: float
    at_s: float


class Turnstile:
    """Lets one through per round of the event loop, so that many at once do not keep refusals waiting."""

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()
        self._turning = False

    def __len__(self) -> int:
        return len(self._line)

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._line.append(turn)
        await turn

    def _next(self) -> None:
        while self._line:
            turn = self._line.popleft()
            if not turn.done():  # otherwise its client has gone
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._turning = False


def width_of(request: Request) -> int:
    """Sequences that it may come to."""
    return request.beam.beam_width if request.beam is not None else request.n


def cost_of(request: Request) -> int:
    """Tokens that a request may come to at worst, those of beams and with logprobs weighted by what they cost more."""
    prompt = len(request.prompt_token_ids)
    if request.pooling:
        return prompt
    per_token = 1 + max(0, request.rules.num_logprobs) / 20
    prompt_factor = 1 + max(0, request.rules.num_prompt_logprobs) / 20
    width = width_of(request) * (BEAM_COST if request.beam is not None else 1)
    return math.ceil(prompt * prompt_factor + width * request.max_tokens * per_token)


class Gate:
    """The server's admission. All methods belong to the event loop's thread.

    Attributes:
        num_admitted: requests taken on so far.
        refused: refusals so far by reason: queue_full, queue_tokens, wait, cost, deadline, slo, early, tenant_tokens,
            tenant_concurrency, engine.

    `fair`, `by_due`: the engine's policy is `fair`, or `slo`.
    """

    def __init__(
        self, client: EngineClient, info: EngineInfo, config: ServerConfig, clock: Clock, *, fair: bool = False,
        by_due: bool = False,
    ) -> None:  # fmt: skip
        self._client = client
        self._config = config
        self._clock = clock
        self._fair = fair
        self._slots = max(1, info.max_num_seqs)
        kv_tokens = info.kv_capacity_tokens or info.num_blocks * max(1, info.block_size)
        self._max_tokens = config.max_num_queued_tokens or QUEUE_OVER_KV * kv_tokens
        self.pace = Pace()
        self.promises = PromiseKeeper(client, info, by_due=by_due, tpot_s=config.tpot_slo)
        mode = mode_of(config.early_rejection, config.replica_roles)
        self._early = None if mode is None else EarlyRejection(client, info, mode)
        self.turnstile = Turnstile()
        self.num_admitted = 0
        self.refused: Counter[str] = Counter()
        self._entries: dict[str, Admitted] = {}
        self._unstarted: dict[str, Admitted] = {}
        self._all = Load()
        self._loads: dict[str, Load] = {}
        self._concurrent: Counter[str] = Counter()
        self._buckets: dict[str, Bucket] = {}
        self._num_offline = 0
        self._looked_s = 0.0
        self._down_since_s: float | None = None
        self._next_place_s = 0.0

    # -- arrivals ------------------------------------------------------------------------------------------------

    async def enter(self, scope: Scope) -> None:
        """Before the body is even read. Raises RefusedError if it is clear already that there is no room."""
        tenant: Tenant = scope["state"]["tenant"]
        self._check_engine()
        self._check_queue(tenant, 0, len(self.turnstile))
        await self.turnstile.enter()

    def admit(self, call: Call, request: Request) -> Callable[[], None]:
        """Take a checked request on; call what is returned when it has ended.

        Raises RefusedError, WireError (408), InputError (times that nobody could keep).
        """
        tenant, now = call.tenant, self._clock.now()
        work, width = self.promises.work(request, call.num_shared), width_of(request)
        promised = request
        try:
            self.promises.check_possible(request, work)
        except InputError:
            if request.slo_ttft_s not in (None, self._config.ttft_slo) or request.slo_tpot_s not in (
                None, self._config.tpot_slo,
            ):  # fmt: skip
                raise
            promised = msgspec.structs.replace(request, slo_ttft_s=None, slo_tpot_s=None)  # the server's own promise
        num_prompt = len(request.prompt_token_ids) - call.num_shared
        cost = cost_of(request) - call.num_shared
        self._check_engine()
        if cost > self._max_tokens:
            raise self._refusal(
                "cost", 429, f"the request may come to {cost} tokens (prompt, n, beams, max_tokens and logprobs "
                f"counted), and this server takes on {self._max_tokens} at once; ask for less",
            )  # fmt: skip
        offline = request.offline_s is not None
        if offline:
            self._check_offline()
        else:
            self._check_queue(tenant, num_prompt, 0)
        wait_s = 0.0 if offline else self._wait_s(tenant, width_of(request))
        limit_s = self._config.max_queue_wait
        if limit_s and wait_s > limit_s:
            raise self._refusal(
                "wait", 503, f"the request would wait about {wait_s:.0f} s, and {limit_s:g} s is the limit here",
                wait_s - limit_s,
            )  # fmt: skip
        verdict = None
        if self._early is not None and not offline and not request.pooling:
            verdict = self._check_early(self._early, promised, work, width)
        elif not offline:
            verdict = self._check_slo(tenant, promised, work)
        ttft_s = None if verdict is None else verdict.ttft_s
        self._check_deadline(call, num_prompt, wait_s if ttft_s is None else ttft_s, first=ttft_s is not None)
        self._check_concurrent(tenant)
        self._reserve(tenant, cost)
        progress = PromisedRequest(
            request, width, work, self.promises.expected(request), predicted_s=ttft_s, admitted_s=now,
            turn_s=0.0 if verdict is None else verdict.turn_s, bias=self.promises.bias,
        )  # fmt: skip
        entry = Admitted(tenant, num_prompt, width, cost, now, progress, offline)
        if ttft_s is not None:
            self.promises.predicted.observe(ttft_s)
            call.facts["predicted_ttft_ms"] = round(1000 * ttft_s, 1)
        self._add(request.request_id, entry)
        return lambda: self._end(request.request_id, entry)

    def follow(self, request: Request, stream: Stream) -> None:
        """The stream of a request that was admitted."""
        entry = self._entries.get(request.request_id)
        if entry is not None:
            entry.stream = stream

    def hold(self, tenant: Tenant) -> Callable[[], None]:
        """A text of this tenant is encoded, which counts as a request; call what is returned when that has ended.

        Raises RefusedError.
        """
        self._check_concurrent(tenant)
        self._concurrent[tenant.name] += 1
        return lambda: self._let_go(tenant.name)

    def tokens_left(self, tenant: Tenant) -> int | None:
        """Tokens that a request may come to now; None: the tenant has no limit."""
        return None if tenant.tokens_per_minute is None else int(self._bucket(tenant, self._clock.now()).level)

    def too_costly(self, tenant: Tenant, num_tokens: int) -> RefusedError:
        """The refusal of a request whose prompt alone comes to more than that."""
        over = self._over(tenant, num_tokens + 1)
        # It may have become possible meanwhile.
        return over or self._refusal("tenant_tokens", 429, "this key has too few tokens left; try again", 1.0,
                                     "rate_limit_exceeded")  # fmt: skip

    # -- reasons to refuse ---------------------------------------------------------------------------------------

    def _refusal(
        self, reason: str, status: int, message: str, retry_after_s: float | None = None, code: str | None = None
    ) -> RefusedError:
        self.refused[reason] += 1
        later = None if retry_after_s is None else min(MAX_RETRY_S, max(1.0, retry_after_s))
        return RefusedError(message, status=status, code=code or reason, retry_after_s=later)

    def _check_engine(self) -> None:
        state = self._client.state
        if state in ("failed", "stopped"):
            raise self._refusal("engine", 503, f"the engine is not running: {self._client.reason}", 5.0,
                                "engine_unavailable")  # fmt: skip
        down = self._down_since_s
        if state == "restarting" and down is not None and self._clock.now() - down > DOWN_S:
            raise self._refusal("engine", 503, "the engine is being restarted, and it takes long; try again later",
                                5.0, "engine_unavailable")  # fmt: skip

    def _check_queue(self, tenant: Tenant, num_tokens: int, num_before: int) -> None:
        """`num_before`: requests that have come in and are not admitted yet."""
        self._look()
        total, own = self._all, self._loads.get(tenant.name, Load())
        free = max(0, self._slots - total.running_seqs)
        share = self._share(tenant)
        most = self._config.max_num_queued_reqs
        # One tenant alone may fill the queue; whoever has less than its share of it gets in all the same.
        if most and total.waiting + num_before >= most + free and own.waiting + num_before >= most * share + free:
            raise self._refusal(
                "queue_full", 429, f"{total.waiting + num_before} requests are waiting already; try again later",
                self._place_s(), "queue_full",
            )  # fmt: skip
        if (
            total.waiting
            and total.waiting_tokens + num_tokens > self._max_tokens
            and own.waiting_tokens + num_tokens > self._max_tokens * share
        ):
            raise self._refusal(
                "queue_tokens", 429, f"prompts of {total.waiting_tokens} tokens are waiting already; try again later",
                self._place_s(), "queue_full",
            )  # fmt: skip

    def _check_offline(self) -> None:
        """Offline work waits behind all other, in a line of its own, as long as that of the others may be."""
        most = self._config.max_num_queued_reqs
        if most and self._num_offline >= most + OFFLINE_OVER_SLOTS * self._slots:
            raise self._refusal(
                "queue_full", 429, f"{self._num_offline} requests are waiting as offline work already; try again later",
                self._place_s(), "queue_full",
            )  # fmt: skip

    def _check_slo(self, tenant: Tenant, request: Request, work: float) -> PromiseVerdict | None:
        """When its first token will come; None: nothing is known yet. Raises RefusedError."""
        line = self._line(tenant)
        if not line.speed.known:
            return None
        verdict = self.promises.judge(request, work, width_of(request), self._clock.now(), line)
        if verdict.retry_s is not None:
            raise self._refusal("slo", 429, f"{verdict.why}; try again later", verdict.retry_s)
        return verdict

    def _check_early(
        self, early: EarlyRejection, request: Request, work: float, width: int
    ) -> PromiseVerdict | None:  # fmt: skip
        """As `_check_slo`, where some engines compute prompts and others decode."""
        slo_s = request.slo_ttft_s
        left_s = None if slo_s is None else request.arrival_s + slo_s - self._clock.now()
        out, taken = self.promises.expected(request), (e for e in self._entries.values() if not e.offline)
        verdict = early.judge(request, work, out, width, left_s, taken)
        if verdict is None:
            return None
        if verdict.retry_us is not None:
            raise self._refusal("early", 429, f"{verdict.why}; try again later", verdict.retry_us / 1e6)
        return PromiseVerdict(verdict.ready_us / 1e6, 0.0)

    def early_shown(self) -> dict[str, object] | None:
        """What `early_rejection` sees; None: it is off."""
        return None if self._early is None else self._early.shown(self._entries.values(), self.refused["early"])

    def _check_deadline(self, call: Call, num_prompt: int, wait_s: float, *, first: bool = False) -> None:
        """`first`: `wait_s` is the time to its first token, and not to its turn."""
        limit_s = call.deadline_s if call.deadline_s is not None else self._config.request_timeout
        if limit_s is None:
            return
        left_s = call.arrival_s + limit_s - self._clock.now()
        needs_s = wait_s + (0.0 if first else self.pace.prefill_s(num_prompt))
        if left_s <= 0 or needs_s > left_s:
            self.refused["deadline"] += 1
            usage = {"prompt_tokens": num_prompt, "completion_tokens": 0, "total_tokens": num_prompt,
                     "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
            raise WireError(
                408, f"the request has to end within {limit_s:g} s, and its first token would take about "
                f"{max(needs_s, 0.001):.3g} s", code="timeout", extra={"usage": usage},
            )  # fmt: skip

    def _check_concurrent(self, tenant: Tenant) -> None:
        if tenant.max_concurrent is not None and self._concurrent[tenant.name] >= tenant.max_concurrent:
            raise self._refusal(
                "tenant_concurrency", 429, f"this key may have {tenant.max_concurrent} requests at once",
                self._place_soon_s(), code="rate_limit_exceeded",
            )  # fmt: skip

    def _reserve(self, tenant: Tenant, cost: int) -> None:
        over = self._over(tenant, cost)
        if over is not None:
            raise over
        if tenant.tokens_per_minute is not None:
            self._bucket(tenant, self._clock.now()).level -= cost

    def _over(self, tenant: Tenant, cost: int) -> RefusedError | None:
        """The refusal of what costs more than the tenant may use now."""
        per_minute = tenant.tokens_per_minute
        if per_minute is None:
            return None
        if cost > per_minute:
            return self._refusal(
                "tenant_tokens", 429, f"the request may come to {cost} tokens (max_tokens counted), and this key has "
                f"{per_minute} a minute; ask for less", code="rate_limit_exceeded",
            )  # fmt: skip
        level = self._bucket(tenant, self._clock.now()).level
        if cost <= level:
            return None
        return self._refusal(
            "tenant_tokens", 429, f"this key has {per_minute} tokens a minute, {level:.0f} of them left; "
            f"the request may come to {cost}", (cost - level) * 60 / per_minute, "rate_limit_exceeded",
        )  # fmt: skip

    def _bucket(self, tenant: Tenant, now: float) -> Bucket:
        most = float(tenant.tokens_per_minute or 0)
        bucket = self._buckets.setdefault(tenant.name, Bucket(most, now))
        bucket.level = min(most, bucket.level + (now - bucket.at_s) * most / 60)
        bucket.at_s = now
        return bucket

    # -- predictions ---------------------------------------------------------------------------------------------

    def _share(self, tenant: Tenant) -> float:
        """Of everything, what is this tenant's while the present ones want more than there is. In (0, 1]."""
        others = sum(load.weight for name, load in self._loads.items() if name != tenant.name)
        return tenant.weight / (others + tenant.weight)

    def _line(self, tenant: Tenant) -> QueueForecast:
        """The queue as a request of this tenant finds it."""
        self._look()
        now, share = self._clock.now(), self._share(tenant)
        line = self.promises.whole_line(self._entries.values(), now)
        if self._fair and share < 1 and line.entries:
            mine = [entry for entry in self._entries.values() if entry.tenant.name == tenant.name]
            own = self.promises.line(mine, now, share)
            if own.start(0, 1)[0] < line.start(0, 1)[0]:
                return own
        return line

    def _wait_s(self, tenant: Tenant, width: int) -> float:
        line = self._line(tenant)
        if self._client.snapshot.decode_s:
            return self.promises.bias * line.start(0, width)[0]
        slots = self._slots
        snapshot = self._client.snapshot
        if snapshot.num_waiting and snapshot.kv_used >= 0.9 * snapshot.kv_total > 0:
            slots = min(slots, max(1, snapshot.num_running))  # memory is the tighter limit
        total = self._all
        wait_s = self._line_s(total.waiting_tokens, total.live + width - slots, slots)
        if self._fair:
            own, share = self._loads.get(tenant.name, Load()), self._share(tenant)
            mine = self._line_s(own.waiting_tokens / share, (own.live + width - slots * share) / share, slots)
            wait_s = min(wait_s, mine)
        return wait_s

    def _line_s(self, num_tokens: float, num_endings: float, slots: int) -> float:
        return max(self.pace.prefill_s(num_tokens), self.pace.endings_s(max(0.0, num_endings), slots))

    def _place_s(self) -> float:
        """When a place will be free for the next one that is refused now: each gets a later one, as in a line."""
        now = self._clock.now()
        step_s = self.pace.endings_s(1, self._slots) or 0.01
        self._next_place_s = min(now + MAX_RETRY_S, max(now, self._next_place_s) + step_s)
        return self._next_place_s - now

    def predicted_wait_s(self) -> float:
        """Seconds that a new request of a new tenant would wait for its turn; 0 while nothing is known."""
        return self._wait_s(Tenant(name=""), 1)

    def predicted_ttft_s(self, num_prompt: float) -> float:
        """Seconds to the first token of a prompt of so many tokens, of a new tenant; 0 while nothing is known."""
        line = self._line(Tenant(name=""))
        if not line.speed.known:
            return self.predicted_wait_s() + self.pace.prefill_s(num_prompt)
        return line.first_s(num_prompt, 1, bias=self.promises.bias)

    def saturation(self) -> float:
        """0 idle, 1 nothing more can be taken on without waiting: for autoscalers. The fullest resource counts."""
        self._look()
        snapshot = self._client.snapshot
        shares = [min(1.0, self._all.live / self._slots)]
        if snapshot.kv_total:
            shares.append(snapshot.kv_used / snapshot.kv_total)
        if self._config.max_queue_wait:
            shares.append(self.predicted_wait_s() / self._config.max_queue_wait)
        return min(1.0, max(shares))

    @property
    def num_waiting(self) -> int:
        """Requests that were taken on and have no token yet."""
        return self._all.waiting

    def headers(self, tenant: Tenant, path: str = "") -> list[tuple[bytes, bytes]]:
        """What a tenant with limits has left, under the names of the path's clients."""
        lefts = []
        if tenant.max_concurrent is not None:
            left = max(0, tenant.max_concurrent - self._concurrent[tenant.name])
            reset_s = 0.0 if left else self._place_soon_s()
            lefts.append(Left("requests", tenant.max_concurrent, left, reset_s))
        if tenant.tokens_per_minute is not None:
            level = self._bucket(tenant, self._clock.now()).level
            missing_s = (tenant.tokens_per_minute - level) * 60 / tenant.tokens_per_minute
            lefts.append(Left("tokens", tenant.tokens_per_minute, max(0, int(level)), missing_s))
        return limit_headers(lefts, path, time.time()) if lefts else []

    def _place_soon_s(self) -> float:
        """Seconds until a request is expected to end."""
        return self.pace.endings_s(1, self._all.running_seqs) or 1.0

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _add(self, request_id: str, entry: Admitted) -> None:
        self.num_admitted += 1
        self.promises.added(entry.progress)
        self._entries[request_id] = self._unstarted[request_id] = entry
        self._concurrent[entry.tenant.name] += 1
        if entry.offline:
            self._num_offline += 1
            return
        own = self._loads.setdefault(entry.tenant.name, Load())
        own.weight = entry.tenant.weight
        for load in (own, self._all):
            load.waiting += 1
            load.waiting_seqs += entry.width
            load.waiting_tokens += entry.num_prompt

    def _start(self, request_id: str, entry: Admitted) -> None:
        if entry.started:
            return
        entry.started = True
        entry.progress.started_s = self._clock.now()
        self.promises.changed()
        self._unstarted.pop(request_id, None)
        if entry.offline:
            return
        for load in (self._loads[entry.tenant.name], self._all):
            load.waiting -= 1
            load.waiting_seqs -= entry.width
            load.waiting_tokens -= entry.num_prompt
            load.running_seqs += entry.width

    def _end(self, request_id: str, entry: Admitted) -> None:
        if self._entries.get(request_id) is not entry:
            return
        del self._entries[request_id]
        self._start(request_id, entry)
        name = entry.tenant.name
        if entry.offline:
            self._num_offline -= 1
        else:
            for load in (self._loads[name], self._all):
                load.running_seqs -= entry.width
            if self._loads[name].live == 0:
                del self._loads[name]
        self._let_go(name)
        self.promises.changed()
        final = None if entry.stream is None else entry.stream.final
        if final is None:
            return
        tokens = [len(sample.token_ids) for sample in final.outputs]
        first_s = final.metrics.first_token_s
        if first_s is not None:
            self.promises.began(entry.progress, first_s - entry.progress.admitted_s)
            self.promises.ended(entry.progress, tokens, final.outputs[0].token_ids)
        for num in tokens:
            if num:
                self.pace.finished(num)
        if entry.tenant.tokens_per_minute is not None:
            unused = max(0, entry.reserved - entry.num_prompt - sum(tokens))
            bucket = self._bucket(entry.tenant, self._clock.now())
            bucket.level = min(float(entry.tenant.tokens_per_minute), bucket.level + unused)

    def _let_go(self, name: str) -> None:
        self._concurrent[name] -= 1
        if self._concurrent[name] == 0:
            del self._concurrent[name]

    def _look(self) -> None:
        """Who has got a first token since the last look; at most every few milliseconds."""
        now = self._clock.now()
        if now - self._looked_s < 0.01:
            return
        self.promises.advance(self._unstarted.values(), self._all.running_seqs, min(1.0, now - self._looked_s))
        self._looked_s = now
        self.pace.observe(self._client.snapshot)
        for request_id, entry in list(self._unstarted.items()):
            if entry.stream is not None and entry.stream.started:
                self._start(request_id, entry)

    async def watch(self) -> None:
        """For ever: follow the engine's speed, and how long it has been away."""
        while True:
            await asyncio.sleep(TICK_S)
            self._look()
            if self._client.state != "restarting":
                self._down_since_s = None
            elif self._down_since_s is None:
                self._down_since_s = self._clock.now()


async def install(server: Server) -> None:
    """`server.parts["admission"]`; the service asks it from now on."""
    info = server.client.info
    assert info is not None
    fair, by_due = bool(server.parts.get("fair")), bool(server.parts.get("by_due"))
    gate = Gate(server.client, info, server.config, server.service.clock, fair=fair, by_due=by_due)
    server.parts["admission"] = gate
    server.service.admission = gate
    watching = asyncio.get_running_loop().create_task(gate.watch())

    async def stop() -> None:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    server.closers.append(stop)
