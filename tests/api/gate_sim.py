"""The server's gate before the real scheduler on the virtual clock: requests are judged, taken on, and served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.base.clock import VirtualClock
from penstock.base.errors import RefusedError
from penstock.config.server import ServerConfig
from penstock.core.cache_spec import group_layers
from penstock.core.messages import EngineInfo, EngineSnapshot
from penstock.core.model_spec import cache_spec
from penstock.core.output import RequestMetrics
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.step_shape import EMPTY
from penstock.engine.core import EngineCore
from penstock.engine.frontend import EngineClient
from penstock.engine.loop import SNAPSHOT_S, snapshot_of
from penstock.executor.sim import SimExecutor
from penstock.kv.manager import KVManager
from penstock.sched.policy import make_policy
from penstock.sched.scheduler import Scheduler
from penstock.server.admission.gate import Gate
from penstock.server.call import ANYONE, Call, Prompt, Tenant
from tests.engine.fake_model import spec
from tests.engine.policy_sim import VOCAB, LinearTimer

CPU = LinearTimer(0.02, 0.0005)
"""About a 0.5B on two cores: 20 ms for a step, 2,000 prompt tokens a second."""


class PlayedClient(EngineClient):
    """As much of a client as admission looks at."""

    state, reason = "ready", ""
    snapshot = EngineSnapshot()

    def __init__(self) -> None:
        return


class PlayedStream:
    """As much of a stream as admission looks at."""

    def __init__(self) -> None:
        self.started = False
        self.final: Any = None


@dataclass
class Fate:
    """What became of a request. Seconds on the virtual clock; None: not yet, or never."""

    request: Request
    predicted_s: float | None = None
    old_s: float = 0.0
    """What was predicted from rates of tokens alone."""
    first_s: float | None = None
    end_s: float | None = None
    refused: RefusedError | None = None
    tokens: int = 0
    release: Any = None
    stream: PlayedStream = field(default_factory=PlayedStream)

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        assert self.end_s is not None
        assert self.first_s is not None
        return (self.end_s - self.first_s) / max(1, self.tokens - 1)


class GateSim:
    """`run` a load; `now` and then `ask` for single requests."""

    def __init__(
        self, policy: str = "fcfs", *, timer: LinearTimer = CPU, slots: int = 16, blocks: int = 1000, budget: int = 512,
        fair: bool = False, depth: int = 1, **settings: Any,
    ) -> None:  # fmt: skip
        self.clock = VirtualClock(100.0)
        groups = group_layers([cache_spec(layer, "float32") for layer in spec(slots=False).layers])
        self.kv = KVManager(groups, [blocks], 16)
        scheduler = Scheduler(
            self.kv, make_policy(policy), max_num_seqs=slots, max_num_batched_tokens=budget, block_size=16, timer=timer
        )
        self.core = EngineCore(
            scheduler, self.kv, SimExecutor(timer, self.clock, vocab_size=VOCAB, depth=depth), self.clock
        )
        self.client: Any = PlayedClient()
        info = EngineInfo(
            vocab_size=VOCAB, max_model_len=4096, kv_capacity_tokens=blocks * 16, max_num_seqs=slots, block_size=16,
            max_num_batched_tokens=budget, alone_s=[(n, timer.step_s(EMPTY.plus(0, n, 1))) for n in (1, 64, 1024)],
        )  # fmt: skip
        by_due = policy.split(":")[0] == "slo"
        self.gate = Gate(self.client, info, ServerConfig(**settings), self.clock, fair=fair, by_due=by_due)
        self.fates: dict[str, Fate] = {}
        self._told_s = 0.0

    def ask(self, request: Request, tenant: Tenant = ANYONE) -> Fate:
        """A request that arrives now."""
        fate = Fate(request)
        call = Call(prompt=Prompt([1]), params=SamplingParams(), request_id="", endpoint="", tenant=tenant,
                    arrival_s=request.arrival_s)  # fmt: skip
        gate, pace = self.gate, self.gate.pace
        gate._look()
        total = gate._all
        fate.old_s = pace.prefill_s(len(request.prompt_token_ids)) + max(
            pace.prefill_s(total.waiting_tokens), pace.endings_s(max(0.0, total.live + 1 - gate._slots), gate._slots)
        )
        try:
            fate.release = gate.admit(call, request)
        except RefusedError as error:
            fate.refused = error
            return fate
        gate.follow(request, fate.stream)  # type: ignore[arg-type]
        fate.predicted_s = gate._entries[request.request_id].progress.predicted_s
        self.fates[request.request_id] = fate
        self.core.add(request)
        return fate

    def step(self) -> None:
        for out in self.core.step():
            fate = self.fates[out.request_id]
            fate.tokens += len(out.token_ids)
            if out.token_ids and fate.first_s is None:
                fate.first_s, fate.stream.started = self.clock.now(), True
            if out.finish_reason is not None:
                self._end(fate)
        if self.clock.now() - self._told_s >= SNAPSHOT_S:
            self._told_s = self.clock.now()
            self.client.snapshot = snapshot_of(self.core)

    def _end(self, fate: Fate) -> None:
        fate.end_s = self.clock.now()
        sample = type("Sample", (), {"token_ids": [0] * fate.tokens})
        metrics = RequestMetrics(arrival_s=fate.request.arrival_s, first_token_s=fate.first_s)
        fate.stream.final = type("Final", (), {"outputs": [sample], "metrics": metrics})
        fate.release()

    def until(self, time_s: float) -> None:
        """Serve until then."""
        while self.core.has_work and self.clock.now() < time_s:
            before = self.clock.now()
            self.step()
            if self.clock.now() == before and self.core.scheduler.wake_s is not None:
                self.clock.advance_to(self.core.scheduler.wake_s)
        self.clock.advance_to(time_s)

    def run(self, load: Sequence[Request], tenants: Sequence[Tenant] = ()) -> list[Fate]:
        """Requests in order of arrival, and everything to its end. Arrivals count from now."""
        fates = [self.ask_at(request, tenants[n] if tenants else ANYONE) for n, request in enumerate(load)]
        while self.core.has_work:
            self.until(self.clock.now() + 1.0)
        return fates

    def ask_at(self, request: Request, tenant: Tenant = ANYONE) -> Fate:
        """`ask` at the request's own time, or as soon as the step that runs then has ended."""
        self.until(request.arrival_s)
        return self.ask(request, tenant)
