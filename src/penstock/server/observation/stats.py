"""What has happened since the server began, as plain numbers. Metrics, the log, /load and the page read them.

Counting happens once per message of the engine and once per finished request, never per token of a stream.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.acceptance import Acceptance
from penstock.core.messages import AGES_S, MISS_REASONS
from penstock.server.distribution import REQUEST_S, SHARE, TOKEN_S, TTFT_S, Distribution, steps

if TYPE_CHECKING:
    from penstock.base.clock import Clock
    from penstock.core.messages import Outputs
    from penstock.core.output import RequestOutput
    from penstock.engine.client import Tally
    from penstock.engine.frontend import EngineClient
    from penstock.engine.stream import Stream
    from penstock.server.call import Call

POINTS = 300
"""Seconds of history that the page shows."""
RECENT = 50
"""Finished requests that the page shows."""
ENDINGS = {"abort": "client_gone", "stop": "stop", "length": "length", "error": "error", "timeout": "timeout"}
"""What a finish reason means to operators; any other is its own name."""
GOOD = ("repetition", "length", "stop")
"""Endings with an answer."""


_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Point:
    """One second. Units: seconds, tokens per second, blocks; means over the second, None if there was nothing."""

    time_s: float
    num_running: int
    num_waiting: int
    kv_used: int
    generation_tokens_s: float
    prompt_tokens_s: float
    ttft_s: float | None
    tpot_s: float | None


class Stats:
    """Listens to an EngineClient. Units: seconds and tokens."""

    def __init__(self, client: EngineClient, clock: Clock) -> None:
        self.client = client
        self.clock = clock
        longest = client.info.max_model_len if client.info is not None else 1 << 20
        lengths = steps(longest)
        self.ttft, self.itl, self.tpot = Distribution(TTFT_S), Distribution(TOKEN_S), Distribution(TOKEN_S)
        self.e2e, self.queue, self.prefill = Distribution(REQUEST_S), Distribution(REQUEST_S), Distribution(REQUEST_S)
        self.decode, self.inference = Distribution(REQUEST_S), Distribution(REQUEST_S)
        self.prompt_lengths, self.generation_lengths = Distribution(lengths), Distribution(lengths)
        self.longest_sample, self.computed_lengths = Distribution(lengths), Distribution(lengths)
        self.params_max_tokens, self.params_n = Distribution(lengths), Distribution((1, 2, 5, 10, 20))
        self.tpot_slo: Counter[str] = Counter({"yes": 0, "no": 0})
        """Finished requests with a tpot_slo_ms, by whether they kept it: "yes", "no"; `ttft_slo`: first tokens."""
        self.ttft_slo: Counter[str] = Counter({"yes": 0, "no": 0})
        self.qoe = Distribution(SHARE)
        """Quality of experience of streams that have ended with an answer (`core.qoe`)."""
        self.preemptions = Distribution((0, 1, 2, 5, 10, 20, 50))
        self.step_tokens = Distribution(_STEP)
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generation_tokens = 0
        self.samples: Counter[str] = Counter()
        """Finished samples by finish reason."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """Finished requests by (endpoint, ending)."""
        self.tenants: Counter[tuple[str, str]] = Counter()
        """(tenant, "requests" | "prompt_tokens" | "generation_tokens")."""
        self.refused: Counter[str] = Counter()
        self.errors: Counter[int] = Counter()
        """Answers of status 400 and more."""
        self.num_replays = 0
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._before: Counter[str] = Counter()
        self._latest: dict[str, float] = {}
        self._epoch: int | None = None
        self._mark = (clock.now(), 0, 0, 0.0, 0, 0.0, 0)
        client.on_message.append(self.on_message)
        client.on_finish.append(self.on_finish)

    # -- news ----------------------------------------------------------------------------------------------------

    def on_message(self, message: Outputs, tally: Tally) -> None:
        self.num_generation_tokens += tally.num_tokens
        for gap_s in tally.gaps_s:
            self.itl.observe(gap_s)
        for live in tally.begun:
            self.num_prompt_tokens += len(live.request.prompt_token_ids)
            self.num_cached_tokens += live.num_cached
            began, first = live.metrics.arrival_s, live.metrics.first_token_s
            if first is not None:
                self.ttft.observe(first - began)
                if (slo_s := live.request.slo_ttft_s) is not None:
                    self.ttft_slo["yes" if first - began <= slo_s else "no"] += 1
        if message.snapshot is not None:
            self._counted(message.epoch, message.snapshot.counters)

    def _counted(self, epoch: int, counters: dict[str, float]) -> None:
        """Counters begin anew with every engine; their sums must not."""
        if epoch != self._epoch:
            self._before.update(self._latest)
            self._latest, self._epoch = {}, epoch
        num_steps = round(counters.get("num_steps", 0.0) - self._latest.get("num_steps", 0.0))
        if num_steps > 0:  # snapshots are rarer than steps: their sum and number are exact, their spread is not
            tokens = counters.get("num_scheduled_tokens", 0.0) - self._latest.get("num_scheduled_tokens", 0.0)
            self.step_tokens.observe(tokens / num_steps, num_steps)
        self._latest = counters

    def counter(self, name: str) -> float:
        """One of the engine's counters, over all engines there have been."""
        return self._before[name] + self._latest.get(name, 0.0)

    def misses(self) -> dict[str, float]:
        """Tokens of prompts that were computed, by reason."""
        return {reason: self.counter(f"miss_{reason}") for reason in MISS_REASONS}

    def ages(self, which: str, tier: str = "device") -> list[float]:
        """Blocks by bucket of `AGES_S`, and the sum of seconds: unused until they were `found`, or `left`."""
        return [self.counter(f"age_{which}:{tier}:{n}") for n in (*range(len(AGES_S) + 1), "sum")]

    @property
    def acceptance(self) -> Acceptance:
        """Speculation's numbers, over all engines there have been."""
        names = {*self._before, *self._latest}
        return Acceptance.of({name: self.counter(name) for name in names})

    def on_finish(self, stream: Stream, output: RequestOutput) -> None:
        call: Call | None = stream.call
        tokens = [len(sample.token_ids) for sample in output.outputs]
        prompt = len(output.prompt_token_ids)
        metrics, request = output.metrics, stream.request
        for sample in output.outputs:
            self.samples[sample.finish_reason or "abort"] += 1
        ended = ending(output)
        self.requests[call.endpoint if call is not None else "", ended] += 1
        tenant = call.tenant.name if call is not None else "default"
        for kind, number in (("requests", 1), ("prompt_tokens", prompt), ("generation_tokens", sum(tokens))):
            self.tenants[tenant, kind] += number
        self.num_replays += stream.num_replays
        self.prompt_lengths.observe(prompt)
        self.generation_lengths.observe(sum(tokens))
        self.longest_sample.observe(max(tokens, default=0))
        self.computed_lengths.observe(prompt - output.num_cached_tokens)
        self.params_n.observe(request.n)
        self.params_max_tokens.observe(request.max_tokens)
        self.preemptions.observe(metrics.num_preemptions)
        t = timings(output)
        spans = {"queue_s": self.queue, "prefill_s": self.prefill, "decode_s": self.decode,
                 "inference_s": self.inference, "e2e_s": self.e2e, "tpot_s": self.tpot}  # fmt: skip
        for name, distribution in spans.items():
            value = t[name]
            if value is not None:
                distribution.observe(value)
        if metrics.quality is not None and ended in GOOD:
            self.qoe.observe(metrics.quality)
        tpot_s, slo_s = t["tpot_s"], request.slo_tpot_s
        if tpot_s is not None and slo_s is not None:
            self.tpot_slo["yes" if tpot_s <= slo_s else "no"] += 1
        self.recent.append({
            "id": stream.request_id, "tenant": tenant, "endpoint": call.endpoint if call is not None else "",
            "ending": ended, "time_s": metrics.finished_s, "prompt_tokens": prompt,
            "cached_tokens": output.num_cached_tokens, "generated_tokens": sum(tokens),
            **{name: t[name] for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s")},
        })  # fmt: skip

    def on_refused(self, status: int, code: str | None) -> None:
        """An error was answered. `code` names the reason if it was refused though there was nothing wrong with it."""
        self.errors[status] += 1
        if code is not None:
            self.refused[code] += 1

    # -- looking at it -------------------------------------------------------------------------------------------

    def tick(self) -> Point:
        """The time since the last tick as one point of the history."""
        now, snapshot = self.clock.now(), self.client.snapshot
        mark = (now, self.num_generation_tokens, self.num_prompt_tokens - self.num_cached_tokens,
                self.ttft.total, self.ttft.num, self.itl.total, self.itl.num)  # fmt: skip
        d = [a - b for a, b in zip(mark, self._mark, strict=True)]
        self._mark = mark
        elapsed = max(d[0], 1e-9)
        point = Point(
            time_s=now,
            num_running=snapshot.num_running,
            num_waiting=snapshot.num_waiting,
            kv_used=snapshot.kv_used,
            generation_tokens_s=d[1] / elapsed,
            prompt_tokens_s=d[2] / elapsed,
            ttft_s=d[3] / d[4] if d[4] else None,
            tpot_s=d[5] / d[6] if d[6] else None,
        )
        self.points.append(point)
        return point

    def history(self, num_points: int) -> list[dict[str, Any]]:
        """The newest points, oldest first."""
        return [asdict(point) for point in list(self.points)[max(0, len(self.points) - num_points) :]]


def ending(output: RequestOutput) -> str:
    """How a request ended: stop, length, error, client_gone, timeout, ... The worst of its samples."""
    reasons = [sample.finish_reason or "abort" for sample in output.outputs]
    if output.error is not None:
        return "error"
    odd = [reason for reason in reasons if reason not in GOOD]
    reason = odd[0] if odd else next(good for good in GOOD if good in reasons or good == "stop")
    return ENDINGS.get(reason, reason)


def timings(output: RequestOutput) -> dict[str, float | None]:
    """Seconds: queue_s until it was first computed, prefill_s from there to the first token, decode_s from there on."""
    m = output.metrics
    most = max((len(sample.token_ids) for sample in output.outputs), default=0)

    def span(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else max(0.0, b - a)

    return {
        "queue_s": span(m.arrival_s, m.scheduled_s),
        "prefill_s": span(m.scheduled_s, m.first_token_s),
        "decode_s": span(m.first_token_s, m.finished_s),
        "inference_s": span(m.scheduled_s, m.finished_s),
        "ttft_s": m.ttft_s,
        "tpot_s": m.tpot_s(most),
        "e2e_s": span(m.arrival_s, m.finished_s),
    }
