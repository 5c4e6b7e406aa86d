"""What a board found, as plain data for JSON, and how its figures become measures of the three axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.eval.cap.conditions import Conditions
from penstock.eval.cap.context import GRID_ENDS, Context, Scores, gain_of
from penstock.eval.cap.speed import Speed, by_round
from penstock.eval.cap.text import Divergence
from penstock.eval.cap.verdict import Measure, Verdict, measure
from penstock.eval.intervals import Interval, bootstrap
from penstock.eval.paired import difference
from penstock.eval.result import TaskResult
from penstock.measure.intervals import ratio_interval

FORMAT = 1


class Performance(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of `ttft_s` and `tpot_s`; all times, in the order of prompts; see `eval.cap.speed.Speed`."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    kv_prefill_bytes: int
    kv_end_bytes: int
    peak_running: int
    preempted: int
    ttfts_s: list[float]
    tpots_s: list[float]
    batches_s: list[float]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration. `score`: mean of the tasks' headline scores. `verdict`, `kl`: None for the plain one."""

    name: str
    settings: dict[str, Any]
    context: Context
    score: float
    score_low: float | None
    score_high: float | None
    tasks: list[TaskResult]
    text: TaskResult
    kl: Divergence | None
    performance: Performance
    measures: list[Measure]
    verdict: Verdict | None


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """How long speed was measured. `why`: they ended. `busy`: share of the processors' time, meanwhile, that went to
    other programs; None where the system does not tell."""

    number: int
    seconds: float
    why: str
    busy: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`conditions`: as text, by name. `machine`: cores, memory, instruction set. `kv_memory`: bytes."""

    penstock_cap: int
    version: str
    model: str
    command: str
    machine: dict[str, Any]
    conditions: dict[str, Any]
    lengths: list[int]
    kv_memory: int
    rows: list[Row]
    rounds: Rounds | None = None

    @property
    def plain(self) -> Row:
        return self.rows[0]


def encode(report: Report) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(report)
    return plain


def performance_of(speed: Speed) -> Performance:
    return Performance(
        ttft_s=float(np.median(speed.ttft_s)), tpot_s=float(np.median(speed.tpot_s)), tokens_per_s=speed.throughput,
        kv_prefill_bytes=speed.prefill_bytes, kv_end_bytes=speed.end_bytes, peak_running=speed.peak_running,
        preempted=speed.preempted, ttfts_s=speed.ttft_s, tpots_s=speed.tpot_s, batches_s=speed.batch_s,
    )  # fmt: skip


def score_of(tasks: Sequence[TaskResult]) -> tuple[float, Interval | None]:
    """Mean of the headline scores, each task counting alike, and its interval over examples within tasks."""
    values = [task.values[0].value for task in tasks]
    return float(np.mean(values)), _mean_interval([[e.scores[t.values[0].name] for e in t.examples] for t in tasks])


def _mean_interval(columns: Sequence[Sequence[float]]) -> Interval | None:
    """Of the mean over columns of their means, entries drawn within each; None if one has fewer than two."""
    if any(len(column) < 2 for column in columns):
        return None
    rng = np.random.default_rng(0)
    drawn = np.zeros(2000)
    for column in columns:
        values = np.asarray(column, np.float64)
        drawn += values[rng.integers(len(values), size=(2000, len(values)))].mean(axis=1) / len(columns)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def measures_of(
    own: tuple[Context, Scores, list[TaskResult], TaskResult, Speed],
    plain: tuple[Context, Scores, list[TaskResult], TaskResult, Speed],
    lengths: Sequence[int], conditions: Conditions,
) -> list[Measure]:  # fmt: skip
    """Everything that speaks for or against an axis, in pairs with the plain configuration."""
    metric = conditions.context.task.metrics[0].name
    out = [_context(own, plain, gain_of(own[1], plain[1], lengths, metric, conditions.threshold))]
    out += _accuracy(own[2], plain[2], own[3], plain[3], conditions)
    return out + _speed(own[4], plain[4], conditions)


def _context(own: Any, plain: Any, interval: Interval | None) -> Measure:
    before, after = plain[0].longest, own[0].longest
    gain = after / before - 1 if before else 0.0
    # Where both go on behind the grid's end, nobody knows which one goes further.
    open_ended = own[0].limited_by == plain[0].limited_by == GRID_ENDS
    found = interval if before and not open_ended else None
    return measure("C", "longest context", "tokens", before, after, gain, found, same=0.0, beyond=0.0)


def _accuracy(
    tasks: Sequence[TaskResult], before: Sequence[TaskResult], text: TaskResult, text_before: TaskResult,
    conditions: Conditions,
) -> list[Measure]:  # fmt: skip
    out = []
    changes = []
    for task, was in zip(tasks, before, strict=True):
        name = task.values[0].name
        assert task.digest == was.digest, "configurations are asked the same"
        changes.append([a.scores[name] - b.scores[name] for a, b in zip(task.examples, was.examples, strict=True)])
    if tasks:
        score, base = score_of(tasks)[0], score_of(before)[0]
        out.append(
            measure("A", "mean score of the tasks", "share", base, score, score - base, _mean_interval(changes),
                    same=conditions.score_tolerance, beyond=0.0)
        )  # fmt: skip
    bits = difference(text, text_before, "bits_per_byte")
    old, new = ([e.scores["bits_per_byte"] for e in found.examples] for found in (text_before, text))
    interval = bootstrap(lambda a, b: 1 - b / a, old, new)
    gain = 1 - bits.metric.value / bits.before.value
    out.append(
        measure("A", "bits per byte of the text", "bits", bits.before.value, bits.metric.value, gain, interval,
                same=conditions.text_tolerance, beyond=0.0)
    )  # fmt: skip
    return out


def _speed(own: Speed, plain: Speed, conditions: Conditions) -> list[Measure]:
    close = conditions.speed_tolerance
    a, b = performance_of(plain), performance_of(own)
    out = []
    for name, unit, before, after, old, new in (
        ("time to first token", "s", a.ttft_s, b.ttft_s, plain.ttft_s, own.ttft_s),
        ("time per token", "s", a.tpot_s, b.tpot_s, plain.tpot_s, own.tpot_s),
        ("throughput in the memory", "tokens/s", a.tokens_per_s, b.tokens_per_s, plain.batch_s, own.batch_s),
    ):
        gain, interval = ratio_interval(by_round(old, conditions.repeats), by_round(new, conditions.repeats))
        out.append(measure("P", name, unit, before, after, gain, interval, same=close, beyond=close))
    # Counted, not timed: the same in every run.
    if a.kv_end_bytes and b.kv_end_bytes:
        gain = a.kv_end_bytes / b.kv_end_bytes - 1
        out.append(
            measure("P", "KV memory of a request", "bytes", a.kv_end_bytes, b.kv_end_bytes, gain, (gain, gain),
                    same=close, beyond=close)
        )  # fmt: skip
    gain = b.peak_running / a.peak_running - 1
    out.append(
        measure("P", "sequences at once", "sequences", a.peak_running, b.peak_running, gain, (gain, gain), same=close,
                beyond=close)
    )  # fmt: skip
    return out
