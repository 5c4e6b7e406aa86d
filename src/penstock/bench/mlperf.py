"""MLPerf inference's scenarios against a server, with LoadGen's rules of what makes a result valid.

*offline*: all samples at once; samples and tokens per second. *server*: Poisson arrivals at a target rate; valid if the
99th percentile of TTFT and of TPOT (for benchmarks of language models) keep their limits. *single-stream*: one request
after the other; the 90th percentile of latency.

Every scenario has a least duration (600 s by the rules), and a least number of samples. *Early stopping* asks whether
so few samples can carry the percentile at all: with t samples over the limit of a percentile p, n are enough if t or
fewer of n would be over it with a chance below 1 % were the true share 1 - p. Single-stream's percentile is then the
t-th highest latency, for the largest such t.

This is not an MLPerf result, which needs the reference model, data set, accuracy run and review: it is the same load
with the same arithmetic. Source: MLCommons, Inference rules, and LoadGen (mlcommons/inference: loadgen/results.cc,
early_stopping.cc, mlperf.conf); Reddi et al., MLPerf Inference Benchmark, ISCA 2020, arXiv 1911.02549.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.errors import ConfigError
from penstock.bench.metrics import Outcome

if TYPE_CHECKING:
    from penstock.bench.http import HttpClient
    from penstock.bench.prompts import Sample
    from penstock.bench.serve import Target

SCENARIOS = ("offline", "server", "single-stream")
CONFIDENCE = 0.99
PERCENTILE = {"server": 0.99, "single-stream": 0.9, "offline": 0.9}
MIN_QUERIES = {"offline": 24_576, "server": 100, "single-stream": 64}
"""LoadGen's, for a data set of that size; with early stopping, which says itself what is too few."""
SPARE = 1.1
"""LoadGen makes so many times the samples that the target rate needs, so that a faster system lasts long enough."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Units: seconds, samples, samples per second. Limits are of the server scenario. Raises ConfigError."""

    scenario: str
    min_duration_s: float = 600.0
    min_query_count: int | None = None
    target_qps: float = 1.0
    ttft_s: float = 2.0
    tpot_s: float = 0.2
    early_stopping: bool = True

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise ConfigError(f"--scenario must be one of {', '.join(SCENARIOS)}", field="scenario")
        for name, value in (("min_duration", self.min_duration_s), ("target_qps", self.target_qps),
                            ("ttft_limit", self.ttft_s), ("tpot_limit", self.tpot_s)):  # fmt: skip
            if not 0 < value < 1e9:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be above 0 and finite, not {value:g}", field=name)
        if self.min_query_count is not None and self.min_query_count < 1:
            raise ConfigError("--min-query-count must be at least 1", field="min_query_count")

    @property
    def least(self) -> int:
        return MIN_QUERIES[self.scenario] if self.min_query_count is None else self.min_query_count

    @property
    def num_samples(self) -> int:
        """Made in advance; offline and server ask them all."""
        spare = 1.0 if self.scenario == "server" else SPARE
        return max(self.least, math.ceil(self.target_qps * self.min_duration_s * spare))


def poisson_times(rules: Rules, seed: int) -> list[float]:
    """When the server scenario's samples are due: until the least duration and the least number are both there."""
    rng = np.random.default_rng([seed, 0x5C])
    out: list[float] = []
    now_s = 0.0
    while now_s < rules.min_duration_s or len(out) < rules.least:
        now_s += float(rng.exponential(1 / rules.target_qps))
        out.append(now_s)
    return out


# -- early stopping ----------------------------------------------------------------------------------------------


def chance_of(most: int, num: int, share: float) -> float:
    """That at most `most` of `num` independent events happen, each with the chance `share`."""
    k = np.arange(most + 1)
    logs = np.cumsum(np.concatenate([[0.0], np.log((num - k[:-1]) / (k[:-1] + 1))]))
    terms = logs + k * math.log(share) + (num - k) * math.log1p(-share)
    top = float(terms.max())
    return float(np.exp(terms - top).sum() * math.exp(top))


def enough(num: int, over: int, percentile: float) -> bool:
    """Whether `num` samples, `over` of them over the limit, show that `percentile` of all keep it."""
    return over < num and chance_of(over, num, 1 - percentile) < 1 - CONFIDENCE


def needed(over: int, percentile: float) -> int:
    """The least number of samples for which `enough` holds."""
    low, high = over, max(2 * over, 8)
    while not enough(high, over, percentile):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle, over, percentile) else (middle, high)
    return high


def stopping_estimate(latencies_s: Sequence[float], percentile: float) -> float | None:
    """The percentile as early stopping estimates it, never below the plain one; None if there are too few samples."""
    num = len(latencies_s)
    over = 1
    if num < needed(1, percentile):
        return None
    while enough(num, over + 1, percentile):
        over += 1
    return sorted(latencies_s)[num - over]


# -- running -----------------------------------------------------------------------------------------------------


async def drive(
    client: HttpClient, target: Target, samples: Sequence[Sample], rules: Rules, *, seed: int = 0,
    max_concurrency: int | None = None, on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:  # fmt: skip
    """Ask as the scenario does; (what came of it, seconds from the start to the last answer).

    `samples` are asked again from their beginning when there are too few.
    """
    from penstock.bench.serve import one, run

    if rules.scenario == "single-stream":
        began_s = time.perf_counter()
        outcomes: list[Outcome] = []
        while (at_s := time.perf_counter() - began_s) < rules.min_duration_s or len(outcomes) < rules.least:
            sample = samples[len(outcomes) % len(samples)]
            outcome = await one(client, target.endpoint, target.body(sample), sample.prompt_len)
            outcome.due_s = outcome.ready_s = outcome.sent_s = at_s
            outcomes.append(outcome)
            on_done(outcome)
        return outcomes, time.perf_counter() - began_s
    due_s = poisson_times(rules, seed) if rules.scenario == "server" else [0.0] * rules.num_samples
    asked = [samples[i % len(samples)] for i in range(len(due_s))]
    return await run(client, target, asked, due_s, max_concurrency=max_concurrency, on_done=on_done)


# -- judging -----------------------------------------------------------------------------------------------------


def judge(rules: Rules, outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """LoadGen's summary: the metric of the scenario, every rule with whether it was kept, VALID or INVALID and why."""
    good = [o for o in outcomes if o.ok]
    why: list[str] = []
    checks: dict[str, bool] = {}

    def check(name: str, met: bool, advice: str) -> None:
        checks[name] = met
        if not met:
            why.append(f"{name}: {advice}")

    num, failed = len(outcomes), len(outcomes) - len(good)
    lasted_s = duration_s
    if rules.scenario == "server":
        lasted_s = max((o.due_s for o in outcomes), default=0.0)
    elif rules.scenario == "single-stream":
        lasted_s = max((o.sent_s + o.latency_s for o in outcomes), default=0.0)
    check("all samples answered", not failed and num > 0, f"{failed} of {num} failed; lower the rate")
    check("min duration", lasted_s >= rules.min_duration_s,
          f"{lasted_s:.1f} of {rules.min_duration_s:g} s; raise --target-qps: it makes more samples")  # fmt: skip
    check("min queries", num >= rules.least, f"{num} of {rules.least}; ask more")
    figures = _metric(rules, good, duration_s)
    if rules.scenario == "server":
        for name, limit_s in (("ttft", rules.ttft_s), ("tpot", rules.tpot_s)):
            found_s = figures[f"p99_{name}_s"]
            told = "nothing answered" if found_s is None else f"{found_s:.3f} s, more than {limit_s:g} s"
            met = found_s is not None and found_s <= limit_s
            check(f"p99 {name.upper()}", met, f"{told}; lower --target-qps")
    if rules.early_stopping and rules.scenario != "offline" and good:
        _early_stopping(rules, good, figures, check)
    return {
        "scenario": rules.scenario, "valid": not why, "result": "INVALID" if why else "VALID", "why_invalid": why,
        "checks": checks, "duration_s": duration_s, "num_samples": num, "failed": failed,
        "min_duration_s": rules.min_duration_s, "min_query_count": rules.least, "target_qps": rules.target_qps,
        "early_stopping": rules.early_stopping, **figures,
    }  # fmt: skip


def _metric(rules: Rules, good: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    tokens = sum(o.output_tokens for o in good)
    per_s = 1 / duration_s if duration_s > 0 else 0.0

    def at(values: Sequence[float], p: float) -> float | None:
        """LoadGen's: the value at index floor(n x p) of the ascending ones."""
        return sorted(values)[min(len(values) - 1, int(len(values) * p))] if values else None

    latencies = [o.latency_s for o in good]
    tpots = [o.tpot_s for o in good if o.tpot_s is not None]
    found: dict[str, Any] = {
        "samples_per_s": len(good) * per_s, "tokens_per_s": tokens * per_s,
        "mean_latency_s": float(np.mean(latencies)) if latencies else None,
        **{f"p{p}_latency_s": at(latencies, p / 100) for p in (50, 90, 95, 97, 99)},
        **{f"p{p}_ttft_s": at([o.ttft_s for o in good], p / 100) for p in (50, 90, 99)},
        **{f"p{p}_tpot_s": at(tpots, p / 100) for p in (50, 90, 99)},
    }  # fmt: skip
    name = {"offline": "samples_per_s", "server": "samples_per_s", "single-stream": "p90_latency_s"}[rules.scenario]
    return {"metric": name, "metric_value": found[name], **found}


def _early_stopping(rules: Rules, good: Sequence[Outcome], figures: dict[str, Any], check: Any) -> None:
    percentile, num = PERCENTILE[rules.scenario], len(good)
    if rules.scenario == "single-stream":
        estimate = stopping_estimate([o.latency_s for o in good], percentile)
        figures["early_stopping_latency_s"] = estimate
        check("early stopping", estimate is not None, f"{num} samples are too few for the {percentile:.0%} percentile; "
              f"ask {needed(1, percentile)} at least")  # fmt: skip
        return
    over = max(
        sum(o.ttft_s > rules.ttft_s for o in good), sum((o.tpot_s or 0.0) > rules.tpot_s for o in good)
    )  # fmt: skip
    figures["over_limit"] = over
    check("early stopping", enough(num, over, percentile), f"{over} of {num} samples are over a limit, which "
          f"{needed(over, percentile)} could carry")  # fmt: skip
