"""One line of JSON per request, however it ended, and one about throughput every ten seconds. Never any text."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from penstock.core.acceptance import Acceptance
from penstock.core.sampling import SamplingParams
from penstock.server.context import Server
from penstock.server.errors import WireError
from penstock.server.observation.stats import Stats, ending, timings

if TYPE_CHECKING:
    from starlette.types import Scope

    from penstock.core.output import RequestOutput
    from penstock.engine.stream import Stream
    from penstock.server.call import Call

log = logging.getLogger("penstock.request")
throughput_log = logging.getLogger("penstock.throughput")
STATUS = {"stop": 200, "length": 200, "repetition": 200, "client_gone": 499, "timeout": 408, "error": 500}
LOG_EVERY = 10
"""Ticks of one second between two lines about throughput."""
_REMEMBERED = 1024


class RequestLog:
    """Writes to the logger `penstock.request`. A request that ended badly gets no second line for its error answer."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._failed: OrderedDict[str, None] = OrderedDict()

    def on_finish(self, stream: Stream, output: RequestOutput) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        line = self.finished(stream, output)
        if line["status"] != 200:
            self._failed[line["request_id"]] = None
            if len(self._failed) > _REMEMBERED:
                self._failed.popitem(last=False)
        log.info(json.dumps(line, separators=(",", ":")))

    def finished(self, stream: Stream, output: RequestOutput) -> dict[str, Any]:
        call: Call | None = stream.call
        facts = dict(call.facts) if call is not None else {}
        http_id = str(facts.pop("http_request_id", ""))
        ended, t = ending(output), timings(output)
        line: dict[str, Any] = {
            "event": "request",
            "id": stream.request_id,
            "request_id": http_id,
            "tenant": call.tenant.name if call is not None else "",
            "endpoint": call.endpoint if call is not None else "",
            "model": self.model_name,
            "stream": call.stream if call is not None else False,
            "n": call.params.n if call is not None and isinstance(call.params, SamplingParams) else stream.request.n,
            "status": STATUS.get(ended, 503),
            "ending": ended,
            "finish_reasons": [sample.finish_reason for sample in output.outputs],
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "generated_tokens": sum(len(sample.token_ids) for sample in output.outputs),
            "max_tokens": stream.request.max_tokens,
            "queue_ms": _ms(t["queue_s"]),
            "ttft_ms": _ms(t["ttft_s"]),
            "tpot_ms": _ms(t["tpot_s"]),
            "e2e_ms": _ms(t["e2e_s"]),
            "preemptions": output.metrics.num_preemptions,
            "replays": stream.num_replays,
            "client_gone": ended == "client_gone",
        }
        if output.metrics.num_drafts:
            line |= {
                "drafts": output.metrics.num_drafts,
                "draft_tokens": output.metrics.num_draft_tokens,
                "accepted_tokens": output.metrics.num_accepted_tokens,
            }
        if output.error is not None:
            line["error"] = output.error[:300]
        for name, value in facts.items():
            if isinstance(value, bool | int | float):  # a text might be the client's
                line.setdefault(name, value)
        return line

    def on_refused(self, scope: Scope, status: int, error: WireError | None) -> None:
        """An error was answered. The message stays out: it may quote what the client sent."""
        state = scope.get("state", {})
        request_id = state.get("request_id", "")
        if self._failed.pop(request_id, self) is not self or scope["method"] != "POST":
            return
        if not log.isEnabledFor(logging.INFO):
            return
        received_s = state.get("received_s")  # unset if the answer came before the body did
        line = {
            "event": "refused",
            "request_id": request_id,
            "tenant": getattr(state.get("tenant"), "name", ""),
            "endpoint": scope["path"][:128],
            "model": self.model_name,
            "status": status,
            "reason": (error.code or error.type) if error is not None else None,
            "param": error.param[:64] if error is not None and error.param else None,
            "took_ms": 0.0 if received_s is None else _ms(time.perf_counter() - received_s),
        }
        log.info(json.dumps(line, separators=(",", ":")))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)


class Throughput:
    """Says how the engine is doing while it has work, in vLLM's words. `tick` is called once a second.

    `speculates`: its drafts too.
    """

    def __init__(self, stats: Stats, every: int = LOG_EVERY, *, speculates: bool = False, whose: str = "") -> None:
        """`whose`: before the line of one of several models."""
        self._stats, self._whose = stats, whose
        self._speculates = speculates
        self._every = every
        self._tick = 0
        self._mark = self._now()
        self._drafted = Acceptance()
        self._idle = True

    def _now(self) -> tuple[float, float, float, float, float]:
        s = self._stats
        return (s.clock.now(), s.num_generation_tokens, s.num_prompt_tokens - s.num_cached_tokens,
                s.counter("num_prefix_queries_tokens"), s.counter("num_prefix_hit_tokens"))  # fmt: skip

    def tick(self) -> None:
        self._tick += 1
        if self._tick < self._every:
            return
        self._tick = 0
        now = self._now()
        elapsed, generated, computed, asked, hit = (a - b for a, b in zip(now, self._mark, strict=True))
        self._mark = now
        snapshot = self._stats.client.snapshot
        busy = bool(generated or computed or snapshot.num_running or snapshot.num_waiting)
        if busy or not self._idle:  # one last line says that it has become quiet
            usage = snapshot.kv_used / snapshot.kv_total if snapshot.kv_total else 0.0
            throughput_log.info(
                "%sAvg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
                "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
                self._whose, computed / elapsed, generated / elapsed, snapshot.num_running, snapshot.num_waiting,
                usage * 100,
                100 * hit / asked if asked and math.isfinite(hit) else 0.0,
            )  # fmt: skip
            if self._speculates:
                self._drafts()
        self._idle = not busy

    def _drafts(self) -> None:
        """Another line if there were drafts since the last one; vLLM's words."""
        now = self._stats.acceptance
        d = now - self._drafted
        self._drafted = now
        if not d.num_drafts:
            return
        throughput_log.info(
            "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted: %d tokens, Drafted: %d tokens, "
            "Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%",
            d.mean_length, d.num_accepted_tokens, d.num_draft_tokens,
            ", ".join(f"{share:.3f}" for share in d.per_position), 100 * (d.rate or 0.0),
        )  # fmt: skip


async def install(server: Server) -> None:
    """Log finished and refused requests; keep the history; say the throughput."""
    stats: Stats = server.parts["stats"]
    if server.config.request_log:
        request_log = RequestLog(server.model_name)
        server.client.on_finish.append(request_log.on_finish)
        server.on_refused.append(request_log.on_refused)
    whose = "" if server.first is None else f"{server.model_name}: "
    quiet = server.config.disable_log_stats
    throughput = None if quiet else Throughput(stats, speculates=server.speculates, whose=whose)

    async def keep_ticking() -> None:
        while True:
            await asyncio.sleep(1.0)
            stats.tick()
            if throughput is not None:
                throughput.tick()

    ticking = asyncio.create_task(keep_ticking())
    server.closers.append(ticking.cancel)
