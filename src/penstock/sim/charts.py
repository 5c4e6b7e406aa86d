"""Which charts a report shows of its runs. One run is shown in detail; several are laid over each other."""

from __future__ import annotations

import numpy as np

from penstock.report.chart import Area, Chart, Format, Line
from penstock.report.numbers import number, percent, seconds
from penstock.sim.metrics import Distribution, Slo, distributions
from penstock.sim.result import Floats, SimResult

_POINTS = 160
_LATENCIES = (
    ("ttft", "Time to first token", "arrival to first token"),
    ("tbt", "Time between tokens", "every gap of every request"),
    ("tpot", "Time per output token", "mean gap of a request"),
    ("jct", "Job completion time", "arrival to last token"),
    ("queue", "Queue time", "arrival to first step"),
    ("normalized", "Normalized latency", "completion time / output tokens"),
)
AREAS = (
    ("tokens", "filled"), ("reserved", "reserved"), ("internal", "internal fragmentation"), ("external", "external"),
    ("cached", "cached prefixes"),
)  # fmt: skip


def latency_charts(results: list[SimResult], slo: Slo) -> list[Chart]:
    """Cumulative distributions."""
    measured = [distributions(result) for result in results]
    charts = []
    for name, title, note in _LATENCIES:
        found = [m[name] for m in measured]
        if not any(d.count for d in found):
            continue
        lines = [
            _cdf(d, result.label, k, len(results) == 1)
            for k, (d, result) in enumerate(zip(found, results, strict=True))
        ]
        if not any(line.xs[-1] > 0 for line in lines if line.xs):
            continue
        limit = {"ttft": slo.ttft_s, "tpot": slo.tpot_s}.get(name)
        charts.append(
            Chart(
                title, seconds, percent, log_x=True, y_max=1.0, lines=lines, note=note,
                marks=[(limit, f"SLO {seconds(limit)}")] if limit is not None else [],
            )
        )  # fmt: skip
    return charts


def _cdf(d: Distribution, label: str, style: int, labelled: bool) -> Line:
    xs, ys = d.curve()
    floor = 1e-4  # a queue time of 0 has no place on a logarithmic axis
    dots = []
    for p in (50, 90, 99) if labelled else (50, 99):
        if d.count:
            at = d.percentile(p)
            dots.append((max(at, floor), p / 100, f"p{p} {seconds(at)}" if labelled else ""))
    # Steps, so that nothing is promised between two values that occurred.
    step_xs = [max(xs[0], floor)] if xs else []
    step_ys = [0.0] if xs else []
    for x, y in zip(xs, ys, strict=True):
        step_xs += [max(x, floor)] * 2
        step_ys += [step_ys[-1], y]
    return Line(label, step_xs, step_ys, style, dots)


def time_charts(results: list[SimResult]) -> list[Chart]:
    """Queues, memory and throughput over virtual time."""
    longest_s = max((r.series.width_s * len(r.series.levels) for r in results), default=1.0)
    unit = 1.0 if longest_s <= 300 else 60.0 if longest_s <= 3 * 3600 else 3600.0
    name = {1.0: "s", 60.0: "min", 3600.0: "h"}[unit]
    one = results[0] if len(results) == 1 else None
    charts = []

    def chart(title: str, note: str, y_format: Format = number) -> Chart:
        return Chart(title, lambda v: f"{number(v / unit)} {name}", y_format, note=note, tick_unit=unit)

    queues = chart("Running and waiting", "requests")
    if one is not None:
        queues.lines = [_level(one, "running", 0, "running"), _level(one, "waiting", 1, "waiting")]
        charts.append(queues)
    else:
        queues.title, queues.lines = "Waiting", [_level(r, "waiting", k) for k, r in enumerate(results)]
        running = chart("Running", "requests")
        running.lines = [_level(r, "running", k) for k, r in enumerate(results)]
        charts += [running, queues]

    memory = chart("KV memory", "share of the pool", percent)
    if one is not None:
        memory.y_max = 1.0
        memory.area_xs = _times(one)
        memory.areas = [Area(text, _column(one, key).tolist(), k) for k, (key, text) in enumerate(AREAS)]
    else:
        memory.title, memory.note = "KV memory in use", "share of the pool, cached prefixes apart"
        memory.lines = [Line(r.label, _times(r), _in_use(r).tolist(), k) for k, r in enumerate(results)]
    charts.append(memory)

    for title, note, key in (
        ("Output", "generated tokens per second", "output_tokens"),
        ("Work", "tokens computed per second, prefill and decode", "computed_tokens"),
    ):
        rates = chart(title, note)
        rates.lines = [_rate(r, key, k) for k, r in enumerate(results)]
        charts.append(rates)
    ttft = chart(
        "TTFT by time of arrival", "median and p99 of requests that arrived together" if one else "p99", seconds
    )
    for k, r in enumerate(results):
        if one is not None:
            ttft.lines += [_by_arrival(r, 50, 0, "p50"), _by_arrival(r, 99, 1, "p99")]
        else:
            ttft.lines.append(_by_arrival(r, 99, k, r.label))
    charts.append(ttft)
    if one is not None:
        load = chart("Load", "requests per second")
        load.lines = [_rate(one, "arrivals", 0, "arriving"), _rate(one, "finished", 1, "finished")]
        charts.append(load)
    return charts


def _by_arrival(result: SimResult, p: float, style: int, label: str) -> Line:
    """A percentile of TTFT for each of about forty stretches of arrival time."""
    r = result.requests
    ttft = r.first_token_s - r.arrival_s
    if not len(r):
        return Line(label, [], [], style)
    low, high = float(r.arrival_s[0]), float(r.arrival_s[-1])
    edges = np.linspace(low, high, min(40, max(2, len(r) // 20)) + 1)
    bounds = np.searchsorted(r.arrival_s, edges)
    bounds[-1] = len(r)
    xs, ys = [], []
    for k, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        value = Distribution.of(ttft[start:end]).percentile(p)
        if value == value:
            xs.append(float(edges[k] + edges[k + 1]) / 2)
            ys.append(value)
    return Line(label, xs, ys, style)


def _bins(result: SimResult) -> int:
    """Buckets of the timeline per point of a chart."""
    return max(1, -(-len(result.series.levels) // _POINTS))


def _grouped(values: Floats, n: int, mean: bool) -> Floats:
    """Sums, or means, of n values each; the last group may be shorter."""
    starts = np.arange(0, len(values), n)
    if not len(starts):
        return values
    sums: Floats = np.add.reduceat(values, starts)
    return sums / np.diff(np.append(starts, len(values))) if mean else sums


def _times(result: SimResult) -> list[float]:
    n = _bins(result)
    starts = np.arange(0, len(result.series.levels), n)
    out: list[float] = (starts * result.series.width_s).tolist()
    return out


def _column(result: SimResult, name: str) -> Floats:
    return _grouped(result.series.levels[:, result.levels.index(name)], _bins(result), True)


def _in_use(result: SimResult) -> Floats:
    return sum((_column(result, name) for name in ("reserved", "internal", "external")), _column(result, "tokens"))


def _level(result: SimResult, name: str, style: int, label: str = "") -> Line:
    return Line(label or result.label, _times(result), _column(result, name).tolist(), style)


def _rate(result: SimResult, name: str, style: int, label: str = "") -> Line:
    n = _bins(result)
    sums = _grouped(result.series.counts[:, result.counters.index(name)], n, False)
    return Line(label or result.label, _times(result), (sums / (n * result.series.width_s)).tolist(), style)
