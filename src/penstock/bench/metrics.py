"""From single requests to the figures of a run, under the names that `vllm bench serve` writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.base.errors import ConfigError
from penstock.core.qoe import Delivery, Expected
from penstock.measure.latency import decomposition
from penstock.measure.steady import buckets, rates, steady_window

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between pieces of a stream",
    "e2el": "time to the last token",
}
SPLIT = {
    "queue": "... queue",
    "prefill": "... prefill",
    "network": "... network",
}
"""Parts of the TTFT, where the server tells its own."""
GOODPUT = ("ttft", "tpot", "e2el")


@dataclass
class Outcome:
    """How one request went. Units: seconds; times from the start of the run.

    `due_s`: when it should have been sent; `ready_s`: when the client came to it; `sent_s`: when it was sent, later
    than `ready_s` if it waited for others (max_concurrency). `itls_s`: gaps between the pieces after the first.
    `cached_tokens` is None if the server does not say.
    """

    due_s: float = 0.0
    ready_s: float = 0.0
    sent_s: float = 0.0
    ok: bool = False
    error: str = ""
    kind: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    text: str = ""
    queue_s: float | None = None
    """These two as the server tells them, if it does: until it began with the request, and from there to the first
    token."""
    prefill_s: float | None = None

    @property
    def tpot_s(self) -> float | None:
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def network_s(self) -> float | None:
        """What of the TTFT is neither queue nor prefill: both ways, and the front ends at their ends."""
        if self.queue_s is None or self.prefill_s is None:
            return None
        return max(0.0, self.ttft_s - self.queue_s - self.prefill_s)

    def quality(self, reader: Expected) -> float:
        """Quality of experience (`core.qoe`), 0 to 1; a piece of the stream is taken for its share of the tokens."""
        delivery, at_s, done = Delivery(0.0, reader), self.ttft_s, 0
        pieces = len(self.itls_s) + 1
        for number, gap_s in enumerate([0.0, *self.itls_s], 1):
            at_s += gap_s
            due = self.output_tokens * number // pieces
            if due > done:
                delivery.take(due - done, at_s)
                done = due
        return delivery.quality

    def value(self, metric: str) -> float | None:
        """In seconds; None if this request has none."""
        return {
            "ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.latency_s, "queue": self.queue_s,
            "prefill": self.prefill_s, "network": self.network_s,
        }[metric]  # fmt: skip


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as milliseconds by metric. Raises ConfigError."""
    out: dict[str, float] = {}
    for item in given:
        name, _, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOODPUT or not 0 <= limit < float("inf"):
            raise ConfigError(f"goodput: {item!r} is not like ttft:200 ({', '.join(GOODPUT)}; ms)", field="goodput")
        out[name] = limit
    return out


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = (50.0, 90.0, 99.0),
    goodput: dict[str, float] | None = None,
    warmup_s: float | None = None,
    reader: Expected | None = None,
) -> dict[str, Any]:
    """The figures of a run. Units: ms where the name says so, else requests or tokens, and those per second; in
    `steady` and `decomposition` seconds. `warmup_s`: as in `measure.steady`.
    """
    good = [o for o in outcomes if o.ok]
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    num_in, num_out = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    out: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) * per_s,
        "request_goodput": None,
        "input_throughput": num_in * per_s,
        "output_throughput": num_out * per_s,
        "total_token_throughput": (num_in + num_out) * per_s,
        **_peaks(good),
    }
    if goodput:
        kept = sum(is_good(o, goodput) for o in good)
        out["request_goodput"] = kept * per_s
        out["goodput_slo_ms"] = goodput
        out["goodput_fraction"] = kept / len(outcomes) if outcomes else 0.0
    qualities = [o.quality(reader or Expected()) for o in good]
    out["mean_qoe"] = float(np.mean(qualities)) if qualities else None
    out["p10_qoe"] = float(np.percentile(qualities, 10)) if qualities else None
    told = [o for o in good if o.cached_tokens is not None]
    told_tokens = sum(o.prompt_tokens for o in told)
    out["prefix_cache_hit_rate"] = sum(o.cached_tokens or 0 for o in told) / told_tokens if told_tokens else None
    out["errors_by_kind"] = dict(Counter(o.kind for o in outcomes if not o.ok))
    for metric in metrics:
        out |= _spread(metric, _values(good, metric), percentiles)
    if any(o.network_s is not None for o in good):
        for part in SPLIT:
            out |= _spread(part, _values(good, part), percentiles)
    gaps = _values(good, "itl")
    out["max_itl_ms"] = max(gaps, default=0.0) * 1e3
    out["steady"] = steady(good, duration_s, warmup_s)
    jct, ttft = np.array([o.latency_s for o in good]), np.array([o.ttft_s for o in good])
    out["decomposition"] = decomposition(ttft, jct, np.array([o.output_tokens for o in good], np.int64))
    # How late the client itself was: answers do not matter for this, so nothing hides behind a slow server.
    out |= _spread("send_delay", [o.ready_s - o.due_s for o in outcomes], (99.0,))
    out["max_send_delay_ms"] = max((o.ready_s - o.due_s for o in outcomes), default=0.0) * 1e3
    out["mean_slot_wait_ms"] = float(np.mean([o.sent_s - o.ready_s for o in outcomes])) * 1e3 if outcomes else 0.0
    return out


def is_good(outcome: Outcome, limits_ms: dict[str, float]) -> bool:
    """Answered, and within all limits; what has no value (a TPOT of one token) cannot miss."""
    return outcome.ok and all((outcome.value(m) or 0.0) * 1e3 <= limit for m, limit in limits_ms.items())


def steady(good: Sequence[Outcome], duration_s: float, warmup_s: float | None = None) -> dict[str, Any]:
    """Rates of the steady part of a run; a piece of a stream carries its share of the answer's tokens."""
    times, amounts = [], []
    for o in good:
        share = o.output_tokens / (len(o.itls_s) + 1)
        times.append(o.sent_s + o.ttft_s + np.concatenate([[0.0], np.cumsum(o.itls_s)]))
        amounts.append(np.full(len(o.itls_s) + 1, share))
    first = np.array([o.sent_s + o.ttft_s for o in good])
    num_prompt = np.array([o.prompt_tokens for o in good], np.float64)
    finish = np.array([o.sent_s + o.latency_s for o in good])
    if not good:
        return rates(None, 0.0, first, num_prompt, finish)
    tokens, width_s = buckets(np.concatenate(times), np.concatenate(amounts), duration_s)
    window = steady_window(tokens, width_s, float(first.max()), warmup_s)
    inside = 0.0
    if window is not None:
        inside = float(tokens[round(window.start_s / width_s) : round(window.end_s / width_s)].sum())
    return rates(window, inside, first, num_prompt, finish)


def _values(good: Sequence[Outcome], metric: str) -> list[float]:
    if metric == "itl":
        return [gap for o in good for gap in o.itls_s]
    return [v for o in good if (v := o.value(metric)) is not None]


def _spread(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    ms = np.asarray(values_s, dtype=np.float64) * 1e3 if len(values_s) else np.zeros(1)
    out = {
        f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
    }  # fmt: skip
    return out | {f"p{p:g}_{name}_ms": float(np.percentile(ms, p)) for p in percentiles}


def _peaks(good: Sequence[Outcome]) -> dict[str, float]:
    """The best second of output tokens, and the most requests at once."""
    seconds: Counter[int] = Counter()
    changes: list[tuple[float, int]] = []
    for o in good:
        changes += [(o.sent_s, 1), (o.sent_s + o.latency_s, -1)]
        at = o.sent_s + o.ttft_s
        share = o.output_tokens / (len(o.itls_s) + 1)  # a piece may carry several tokens
        for gap in [0.0, *o.itls_s]:
            at += gap
            seconds[int(at)] += share  # type: ignore[assignment]  # a Counter of floats
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return {"max_output_tokens_per_s": float(max(seconds.values(), default=0)), "max_concurrent_requests": most}


def detail(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One entry per request, for `--save-detailed`."""
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft_s for o in outcomes],
        "itls": [o.itls_s for o in outcomes],
        "latencies": [o.latency_s for o in outcomes],
        "start_times": [o.sent_s for o in outcomes],
        "queue_times": [o.queue_s for o in outcomes],
        "prefill_times": [o.prefill_s for o in outcomes],
        "network_times": [o.network_s for o in outcomes],
        "due_times": [o.due_s for o in outcomes],
        "cached_tokens": [o.cached_tokens for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }
