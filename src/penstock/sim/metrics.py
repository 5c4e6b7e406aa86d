"""What is measured of a run, each defined once.

For request i with P_i prompt and N_i output tokens: a_i arrival, s_i the start of the first step that works on it,
t_ij the end of the step that yields its j-th token (j = 1 ... N_i). All on the virtual clock, in seconds.

    queue time_i  = s_i - a_i
    prefill_i     = t_i1 - s_i
    TTFT_i        = t_i1 - a_i = queue time_i + prefill_i (a simulated network takes no time)
    TBT_ij        = t_ij - t_i(j-1), j >= 2; a distribution over all gaps of all requests (also called ITL)
    TPOT_i        = (t_iN - t_i1) / (N_i - 1), N_i >= 2; the mean gap of one request
    JCT_i         = t_iN - a_i (end-to-end latency)
    normalized_i  = JCT_i / N_i
    span          = max t_iN - min a_i
    throughput    = sum N_i / span (output), sum (P_i + N_i) / span (all tokens), requests / span
    attainment    = share of all arrived requests, refused ones included, with TTFT_i and TPOT_i within their limits
    goodput       = requests within the limits / span
    QoE_i         = area below what i's reader was shown / area below what he expects (`core.qoe`), 0 to 1
    hit rate      = prompt tokens found in the prefix cache at first admission / prompt tokens
    busy          = sum of step durations / span
    slowdown_i    = JCT_i / JCT_i alone on the idle device (`sim.alone`), by classes of size (`measure.latency`)
    residual      = what TTFT + TPOT x tokens misses of the mean JCT (`measure.latency`)
    steady        = rates without warm-up and drain (`measure.steady`)

A percentile p is the smallest value that at least p % of all values do not exceed (nearest rank): a value that
occurred. Sources: Yu et al., Orca, OSDI 2022, and Kwon et al., arXiv 2309.06180, section 6.1 (normalized latency);
Agrawal et al., Sarathi-Serve, arXiv 2403.02310 (TBT); Zhong et al., DistServe, arXiv 2401.09670 (goodput, attainment).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.measure.cost import cost
from penstock.measure.energy import ModelMeter, energy, modelled_j
from penstock.measure.latency import decomposition, slowdown_classes
from penstock.measure.steady import rates, steady_window
from penstock.sim.result import Floats, Ints, SimResult

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Distribution:
    """Values in ascending order and how often each occurred. Percentiles of nothing are NaN."""

    values: Floats
    cumulative: Ints

    @classmethod
    def of(cls, values: Floats, counts: Ints | None = None) -> Distribution:
        """NaN values (requests that never got so far) are left out."""
        known = ~np.isnan(values)
        values = values[known]
        order = np.argsort(values, kind="stable")
        weights = np.ones(len(values), np.int64) if counts is None else counts[known][order]
        return cls(values[order], np.cumsum(weights))

    @property
    def count(self) -> int:
        return int(self.cumulative[-1]) if len(self.values) else 0

    @property
    def mean(self) -> float:
        if not len(self.values):
            return float("nan")
        counts = np.diff(self.cumulative, prepend=0)
        return float((self.values * counts).sum() / self.count)

    def percentile(self, p: float) -> float:
        """Nearest rank."""
        if not len(self.values):
            return float("nan")
        rank = max(1, int(np.ceil(p / 100 * self.count - 1e-9)))
        return float(self.values[np.searchsorted(self.cumulative, rank)])

    def curve(self, num_points: int = 160) -> tuple[list[float], list[float]]:
        """At most so many (value, share of values <= it) pairs that draw the cumulative distribution; dense at its
        end.
        """
        if not len(self.values):
            return [], []
        body = np.linspace(0, 1, num_points * 3 // 4)
        tail = 1 - np.geomspace(0.03, 1 / max(2, self.count), num_points // 4)
        ranks = np.unique(np.clip(np.ceil(np.concatenate([body, tail, [1.0]]) * self.count), 1, self.count))
        at = np.searchsorted(self.cumulative, ranks)
        return self.values[at].tolist(), (ranks / self.count).tolist()

    def summary(self) -> dict[str, float]:
        """mean, p50, p90, p99 and max."""
        out = {"mean": self.mean}
        out |= {f"p{p}": self.percentile(p) for p in PERCENTILES}
        out["max"] = self.percentile(100)
        return out


@dataclass(frozen=True)
class Slo:
    """Limits of a good answer, in seconds. Requests of one token have no TPOT to miss."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1


def distributions(result: SimResult) -> dict[str, Distribution]:
    """ttft, tbt, tpot, jct, queue, prefill (seconds), normalized (seconds per output token), quality (0 to 1);
    slowdown, if known."""
    r = result.requests
    jct_s = r.finish_s - r.arrival_s
    slow = {} if result.alone_s is None else {"slowdown": Distribution.of(jct_s / result.alone_s)}
    return slow | {
        "ttft": Distribution.of(r.first_token_s - r.arrival_s),
        "tbt": Distribution.of(result.gaps_s, result.gap_counts),
        "tpot": Distribution.of(tpots(result)),
        "jct": Distribution.of(jct_s),
        "queue": Distribution.of(r.scheduled_s - r.arrival_s),
        "prefill": Distribution.of(r.first_token_s - r.scheduled_s),
        "normalized": Distribution.of(jct_s / np.maximum(r.num_output, 1)),
        "quality": Distribution.of(r.quality),
    }


def tpots(result: SimResult) -> Floats:
    """TPOT per request; NaN for fewer than two tokens."""
    r = result.requests
    several = r.num_output > 1
    spans = r.finish_s - r.first_token_s
    out: Floats = np.divide(spans, r.num_output - 1, out=np.full(len(r), np.nan), where=several)
    return out


def within(result: SimResult, slo: Slo) -> npt.NDArray[np.bool_]:
    """Per request: finished, and within both limits."""
    r = result.requests
    tpot = tpots(result)
    fast = (r.first_token_s - r.arrival_s) <= slo.ttft_s
    return fast & (np.isnan(tpot) | (tpot <= slo.tpot_s)) & ~np.isnan(r.finish_s)


def metrics(result: SimResult, slo: Slo | None = None) -> dict[str, Any]:
    """Every number of a run, fit for JSON: seconds, tokens, shares in 0 ... 1. What has no value is None."""
    slo = slo or Slo()
    r = result.requests
    span_s = result.span_s
    num_refused = sum(result.refused.values())
    num_good = int(within(result, slo).sum())
    prompt, output = int(r.num_prompt.sum()), int(r.num_output.sum())
    stats, found = result.stats, distributions(result)
    quality = found.pop("quality")
    out: dict[str, Any] = {
        "requests": {
            "arrived": len(r) + num_refused,
            "finished": int((~np.isnan(r.finish_s)).sum()),
            "refused": num_refused,
            "refused_why": result.refused,
            "truncated": result.truncated,
            "failed": result.failed,
            "skipped_lines": result.skipped_lines,
        },
        "span_s": span_s,
        "throughput": {
            "requests_per_s": _rate(len(r), span_s),
            "input_tokens_per_s": _rate(prompt, span_s),
            "output_tokens_per_s": _rate(output, span_s),
            "total_tokens_per_s": _rate(prompt + output, span_s),
            "prompt_tokens": prompt,
            "output_tokens": output,
        },
        "goodput": {
            "ttft_slo_s": slo.ttft_s,
            "tpot_slo_s": slo.tpot_s,
            "requests_per_s": _rate(num_good, span_s),
            "attainment": num_good / max(1, len(r) + num_refused),
        },
        "steady": steady(result, result.bill.warmup_s),
        "latency_s": {name: _clean(d.summary()) for name, d in found.items() if name != "slowdown"},
        "qoe": _clean({"mean": quality.mean, "p10": quality.percentile(10), "p50": quality.percentile(50)}),
        "decomposition": decomposition(r.first_token_s - r.arrival_s, r.finish_s - r.arrival_s, r.num_output),
        "slowdown": slowdowns(result),
        "prefix_cache": {
            "hit_tokens": int(r.cached.sum()),
            "hit_rate": float(r.cached.sum()) / max(1, prompt),
            "tokens_by_tier": dict(result.hits),
        },
        "preemptions": {
            "count": stats.num_preemptions,
            "requests": int((r.preemptions > 0).sum()),
            "swapped": stats.num_swaps,
            "recomputed_tokens": stats.num_recomputed_tokens,
        },
        "kv": {
            "capacity_tokens": result.kv_tokens,
            "peak_use": result.kv_peak,
            "mean": result.memory | {"free": max(0.0, 1.0 - sum(result.memory.values()))},
        },
        "engine": {
            "steps": stats.num_steps,
            "computed_tokens": stats.num_scheduled_tokens,
            "peak_running": stats.peak_running,
            "busy_s": result.busy_s,
            "busy": min(1.0, result.busy_s / span_s) if span_s > 0 else None,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "tokens_per_step": stats.num_scheduled_tokens / max(1, stats.num_steps),
        },
        "simulation": {
            "wall_s": result.wall_s,
            "speed_up": _rate(span_s, result.wall_s),
            "requests_per_wall_s": _rate(len(r), result.wall_s),
            "digest": result.digest or None,
        },
    }  # fmt: skip
    return out | charged(result, prompt, output)


def charged(result: SimResult, num_input: int, num_output: int) -> dict[str, Any]:
    """ "cost" and "energy" of a run, None where no price or no watts are known."""
    bill, stats, span_s = result.bill, result.stats, result.span_s
    power = bill.power
    return {
        "cost": None if bill.price is None else cost(
            bill.price, span_s, (stats.prefill_s, stats.decode_s), num_input, num_output
        ),
        "energy": None if power is None else energy(
            modelled_j(power, span_s, result.busy_s), "model", ModelMeter(power).about, num_input, num_output,
            bill.carbon,
        ),
    }  # fmt: skip


def steady(result: SimResult, warmup_s: float | None = None) -> dict[str, Any]:
    """Rates of the steady part, its times in seconds from the first arrival on (`measure.steady`)."""
    r, series = result.requests, result.series
    if not len(r) or np.isnan(r.first_token_s).all():
        return rates(None, 0.0, r.first_token_s, r.num_prompt, r.finish_s)
    skipped = int(r.arrival_s[0] / series.width_s)
    began_s = skipped * series.width_s
    tokens = series.counts[skipped:, result.counters.index("output_tokens")]
    window = steady_window(tokens, series.width_s, float(np.nanmax(r.first_token_s)) - began_s, warmup_s)
    inside = 0.0
    if window is not None:
        first, last = (round(t / series.width_s) for t in (window.start_s, window.end_s))
        inside = float(tokens[first:last].sum())
    return rates(window, inside, r.first_token_s - began_s, r.num_prompt, r.finish_s - began_s)


def slowdowns(result: SimResult) -> dict[str, Any] | None:
    """Slowdown of all requests, and by class of size, the smallest first; None if nobody knows the times alone."""
    r = result.requests
    if result.alone_s is None:
        return None
    jct_s = r.finish_s - r.arrival_s
    classes = slowdown_classes(r.num_prompt + r.num_output, jct_s, result.alone_s)
    return _clean(Distribution.of(jct_s / result.alone_s).summary()) | {"classes": classes}


def by_tenant(result: SimResult, slo: Slo, top: int = 12) -> list[dict[str, Any]]:
    """The tenants with most requests first: name, requests, output tokens, TTFT p50 and p99, attainment."""
    r = result.requests
    good = within(result, slo)
    counts = np.bincount(r.tenant, minlength=len(result.tenants))
    out = []
    for index in np.argsort(-counts, kind="stable")[:top].tolist():
        mine = r.tenant == index
        if not mine.any():
            continue
        ttft = Distribution.of((r.first_token_s - r.arrival_s)[mine])
        out.append({
            "tenant": result.tenants[index],
            "requests": int(counts[index]),
            "output_tokens": int(r.num_output[mine].sum()),
            "ttft_p50_s": ttft.percentile(50),
            "ttft_p99_s": ttft.percentile(99),
            "attainment": float(good[mine].mean()),
        })  # fmt: skip
    return out


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _clean(numbers: dict[str, float]) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in numbers.items()}
