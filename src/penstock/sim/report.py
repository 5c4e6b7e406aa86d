"""Runs as one HTML page, as JSON and as a table for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.report.chart import Key
from penstock.report.numbers import number, percent, seconds
from penstock.report.page import Cell, part, render
from penstock.report.tables import table as make_table
from penstock.sim.charts import AREAS, latency_charts, time_charts
from penstock.sim.metrics import Slo, by_tenant, distributions, metrics
from penstock.sim.result import SimResult

if TYPE_CHECKING:
    from rich.table import Table

Show = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """One line of the headline table. `better`: +1 more is better, -1 less is, 0 neither. `short`: also in a
    terminal.
    """

    name: str
    path: tuple[str, ...]
    show: Show
    better: int = 0
    short: bool = False


def _integer(value: float) -> str:
    return f"{value:,.0f}"


def _money(value: float) -> str:
    return f"{value:,.4f}"


def _quality(value: float) -> str:
    return f"{value:.3f}"


_LATENCY_ROWS = [
    Row(f"{title} {p}", ("latency_s", key, p), seconds, -1, short=p != "p90" and key != "prefill")
    for key, title in (
        ("ttft", "TTFT"), ("queue", "Queue time"), ("prefill", "Prefill"), ("tbt", "TBT"), ("tpot", "TPOT"),
        ("jct", "JCT"),
    )
    for p in ("p50", "p90", "p99")
]  # fmt: skip
HEADLINE: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("Requests", (
        Row("arrived", ("requests", "arrived"), _integer),
        Row("finished", ("requests", "finished"), _integer, short=True),
        Row("refused", ("requests", "refused"), _integer, -1, short=True),
        Row("span", ("span_s",), seconds, -1, short=True),
    )),
    ("Throughput", (
        Row("output tokens/s", ("throughput", "output_tokens_per_s"), number, 1, short=True),
        Row("prompt tokens/s", ("throughput", "input_tokens_per_s"), number, 1),
        Row("prompt + output tokens/s", ("throughput", "total_tokens_per_s"), number, 1),
        Row("output tokens/s, steady", ("steady", "output_tokens_per_s"), number, 1, short=True),
        Row("prompt tokens/s, steady", ("steady", "input_tokens_per_s"), number, 1),
        Row("requests/s, steady", ("steady", "requests_per_s"), number, 1),
        Row("requests/s", ("throughput", "requests_per_s"), number, 1, short=True),
        Row("goodput, requests/s", ("goodput", "requests_per_s"), number, 1, short=True),
        Row("SLO attainment", ("goodput", "attainment"), percent, 1, short=True),
        Row("quality of experience, mean", ("qoe", "mean"), _quality, 1, short=True),
        Row("quality of experience, p10", ("qoe", "p10"), _quality, 1, short=True),
    )),
    ("Latency", (
        *_LATENCY_ROWS,
        Row("TBT max", ("latency_s", "tbt", "max"), seconds, -1, short=True),
        Row("TPOT mean", ("latency_s", "tpot", "mean"), seconds, -1, short=True),
        Row("JCT beyond TTFT + TPOT x tokens", ("decomposition", "residual"), percent, short=True),
        Row("slowdown mean", ("slowdown", "mean"), number, -1, short=True),
        Row("slowdown p99", ("slowdown", "p99"), number, -1, short=True),
        Row("normalized latency mean, per token", ("latency_s", "normalized", "mean"), seconds, -1),
    )),
    ("Memory and work", (
        Row("KV in use, peak", ("kv", "peak_use"), percent, short=True),
        Row("prefix hits", ("prefix_cache", "hit_rate"), percent, 1, short=True),
        Row("preemptions", ("preemptions", "count"), _integer, -1, short=True),
        Row("recomputed tokens", ("preemptions", "recomputed_tokens"), _integer, -1),
        Row("peak running", ("engine", "peak_running"), _integer),
        Row("tokens per step", ("engine", "tokens_per_step"), number),
        Row("device busy", ("engine", "busy"), percent, short=True),
    )),
    ("Cost and energy", (
        Row("cost", ("cost", "cost"), _money, -1),
        Row("price of 1M prompt tokens", ("cost", "per_million_input"), _money, -1, short=True),
        Row("price of 1M output tokens", ("cost", "per_million_output"), _money, -1, short=True),
        Row("output tokens for one unit of money", ("cost", "output_tokens_per_unit"), number, 1),
        Row("energy, J, modelled", ("energy", "joules"), number, -1),
        Row("J per output token, modelled", ("energy", "joules_per_output_token"), number, -1, short=True),
        Row("g CO2 per output token, modelled", ("energy", "grams_co2_per_output_token"), number, -1),
    )),
)  # fmt: skip


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> float | None:
    node: Any = tree
    for name in path:
        if node is None:
            return None
        node = node[name]
    return None if node is None else float(node)


def _cells(measured: list[dict[str, Any]], row: Row) -> list[Cell]:
    values = [_at(m, row.path) for m in measured]
    known = [v for v in values if v is not None]
    texts = ["-" if v is None else row.show(v) for v in values]
    best = None
    if row.better and len(set(texts)) > 1 and known:  # what looks equal is equal
        best = row.show(max(known) if row.better > 0 else min(known))
    return [Cell(text, "best" if text == best else "") for text in texts]


def html_page(results: Sequence[SimResult], slo: Slo | None = None, *, title: str = "") -> str:
    """One self-contained page about one run, or several compared. Deterministic: equal results give equal pages
    (but for the note on how long the simulation took).
    """
    slo = slo or Slo()
    runs = list(results)
    measured = [metrics(r, slo) for r in runs]
    one, labels = len(runs) == 1, [r.label for r in runs]
    settings = _settings(runs)
    same = all(len(cells) == 2 for cells in settings)
    return render(
        "simulation.html", title=title or "Simulated service", intro=_intro(runs, measured, slo),
        tiles=_tiles(measured[0]) if one else [], runs=labels,
        groups=[(group, [[line.name, *_cells(measured, line)] for line in lines])
                for group, lines in HEADLINE if not (one and group == "Latency")],
        percentiles=_percentiles(measured[0]) if one else [],
        many=[] if one else [Key(label, k % 8) for k, label in enumerate(labels)],
        latency=latency_charts(runs, slo), over_time=time_charts(runs),
        kv_tokens=" / ".join(dict.fromkeys(f"{r.kv_tokens:,}" for r in runs)),
        memory_key=[Key(text, k, True) for k, (_, text) in enumerate(AREAS)],
        memory_head=["", "", *(text for _, text in AREAS), "free"],
        memory=[[r.label, _bar(r), *_shares(m)] for r, m in zip(runs, measured, strict=True)],
        slowdowns=_slowdowns(runs, measured), bills=_bills(runs, measured),
        tenants=_tenants(runs, slo), settings=settings,
        settings_head=["", *((labels if one else ["all runs"]) if same else labels)],
        decisions=_decisions(runs), footer=_footer(measured),
    )  # fmt: skip


def _intro(runs: list[SimResult], measured: list[dict[str, Any]], slo: Slo) -> list[str]:
    first = measured[0]
    parts = [
        runs[0].workload,
        *(str(runs[0].settings[name]) for name in ("model", "device") if name in runs[0].settings),
    ]
    lines = [" · ".join(parts)]
    prompt, output = first["throughput"]["prompt_tokens"], first["throughput"]["output_tokens"]
    lines.append(
        f"{_integer(first['requests']['arrived'])} requests, {_integer(prompt)} prompt and {_integer(output)} output "
        f"tokens; limits: TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}"
    )
    refused = {why: count for r in runs for why, count in r.refused.items()}
    if refused:
        lines.append("refused: " + "; ".join(f"{count} {why}" for why, count in refused.items()))
    truncated, skipped = runs[0].truncated, runs[0].skipped_lines
    if truncated:
        lines.append(f"{truncated} requests were shortened to fit")
    if skipped:
        lines.append(f"{skipped} broken lines of the trace were left out")
    return lines


def _tiles(m: dict[str, Any]) -> list[tuple[str, str, str]]:
    def tile(name: str, path: tuple[str, ...], show: Show, more: str) -> tuple[str, str, str]:
        return name, also(path, show), more

    def also(path: tuple[str, ...], show: Show) -> str:
        value = _at(m, path)
        return "-" if value is None else show(value)

    slo = m["goodput"]
    return [
        tile("Output", ("throughput", "output_tokens_per_s"), lambda v: f"{number(v)} tok/s",
             f"{also(('throughput', 'requests_per_s'), number)} requests/s"),
        tile("TTFT p50", ("latency_s", "ttft", "p50"), seconds, f"p99 {also(('latency_s', 'ttft', 'p99'), seconds)}"),
        tile("TBT p50", ("latency_s", "tbt", "p50"), seconds, f"p99 {also(('latency_s', 'tbt', 'p99'), seconds)}"),
        tile("JCT p50", ("latency_s", "jct", "p50"), seconds, f"p99 {also(('latency_s', 'jct', 'p99'), seconds)}"),
        tile("SLO attainment", ("goodput", "attainment"), percent,
             f"TTFT ≤ {seconds(slo['ttft_slo_s'])}, TPOT ≤ {seconds(slo['tpot_slo_s'])}"),
        tile("Prefix hits", ("prefix_cache", "hit_rate"), percent,
             f"{also(('prefix_cache', 'hit_tokens'), number)} tokens not computed"),
        tile("KV in use, peak", ("kv", "peak_use"), percent,
             f"{also(('preemptions', 'count'), _integer)} preemptions"),
        tile("Device busy", ("engine", "busy"), percent,
             f"{also(('engine', 'tokens_per_step'), number)} tokens per step"),
    ]  # fmt: skip


def _percentiles(m: dict[str, Any]) -> list[list[str]]:
    """Every latency of one run in one small table."""
    names = {
        "ttft": "TTFT", "queue": "... queue time", "prefill": "... prefill", "tbt": "TBT, all gaps", "tpot": "TPOT",
        "jct": "JCT", "normalized": "Normalized latency, per output token",
    }  # fmt: skip
    columns = ("mean", "p50", "p90", "p99", "max")
    found = {name: [m["latency_s"][key][column] for column in columns] for key, name in names.items()}
    return [[name, *("-" if v is None else seconds(v) for v in values)] for name, values in found.items()]


def _bar(result: SimResult) -> Cell:
    return Cell(part("shares", [result.memory[name] for name, _ in AREAS]), "shares")


def _shares(measured: dict[str, Any]) -> list[str]:
    mean = measured["kv"]["mean"]
    return [percent(mean[name]) for name in (*(name for name, _ in AREAS), "free")]


def _tenants(runs: list[SimResult], slo: Slo) -> list[tuple[str, list[list[str]]]]:
    """By run; nothing if no run has two."""
    if max(len(r.tenants) for r in runs) < 2:
        return []
    found = {
        run.label: [
            [t["tenant"] or "(none)", _integer(t["requests"]), _integer(t["output_tokens"]), seconds(t["ttft_p50_s"]),
             seconds(t["ttft_p99_s"]), percent(t["attainment"])]
            for t in by_tenant(run, slo)
        ]
        for run in runs
    }  # fmt: skip
    return [(label, rows) for label, rows in found.items() if rows]


def _slowdowns(runs: list[SimResult], measured: list[dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """By run: the classes of size, the smallest first."""
    found = []
    for run, m in zip(runs, measured, strict=True):
        if m["slowdown"] is None:
            continue
        rows = [
            [f"{c['from_tokens']:,} to {c['to_tokens']:,}", _integer(c["requests"]), seconds(c["mean_jct_s"]),
             *(number(c[name]) for name in ("mean", "p50", "p99", "max"))]
            for c in m["slowdown"]["classes"]
        ]  # fmt: skip
        found.append((run.label, rows))
    return found


def _bills(runs: list[SimResult], measured: list[dict[str, Any]]) -> list[str]:
    """Where prices, watts and carbon come from."""
    out = []
    for run, m in zip(runs, measured, strict=True):
        if m["cost"] is not None:
            out.append(f"{run.label}: {m['cost']['per_hour']:g} {m['cost']['currency']} an hour "
                       f"({m['cost']['price_source']}), shared out by {m['cost']['split_by']}")  # fmt: skip
        if m["energy"] is not None:
            e = m["energy"]
            out.append(f"{run.label}: energy is a model: {e['energy_about']}; {e['carbon_g_per_kwh']:g} g CO2 per kWh "
                       f"({e['carbon_source']})")  # fmt: skip
    return out


def _settings(runs: list[SimResult]) -> list[list[str]]:
    """Name and value; one value if all runs agree on everything, otherwise one per run."""
    names = dict.fromkeys(name for r in runs for name in r.settings)
    rows = [[name, *(str(r.settings.get(name, "-")) for r in runs)] for name in names]
    return [row[:2] for row in rows] if all(len(set(values)) == 1 for _, *values in rows) else rows


def _decisions(runs: list[SimResult]) -> list[tuple[str, Sequence[Sequence[str]]]]:
    """By the runs that share them: " (label, label)", "" if all do."""
    kinds: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for run in runs:
        kinds.setdefault(tuple((d.name, str(d.value), d.why) for d in run.decisions), []).append(run.label)
    return [(f" ({', '.join(of)})" if len(kinds) > 1 else "", rows) for rows, of in kinds.items() if rows]


def _footer(measured: list[dict[str, Any]]) -> str:
    wall_s = sum(m["simulation"]["wall_s"] for m in measured)
    span_s = sum(m["span_s"] for m in measured)
    fast = f", {number(span_s / wall_s)} times as fast as real time" if wall_s > 0 else ""
    return f"Penstock {__version__}. {seconds(span_s)} of service simulated in {seconds(wall_s)}{fast}."


def json_report(results: Sequence[SimResult], slo: Slo | None = None) -> str:
    """Metrics, settings, decisions, cumulative distributions and time series of every run. Seconds, tokens, shares."""
    slo = slo or Slo()
    runs = []
    for r in results:
        curves = {
            name: dict(zip(("values_s", "share"), d.curve(), strict=True)) for name, d in distributions(r).items()
        }
        runs.append({
            "label": r.label,
            "workload": r.workload,
            "settings": {name: _plain(value) for name, value in r.settings.items()},
            "decisions": [{"name": d.name, "value": _plain(d.value), "why": d.why} for d in r.decisions],
            "metrics": metrics(r, slo),
            "tenants": by_tenant(r, slo) if len(r.tenants) > 1 else [],
            "cdf": curves,
            "series": {
                "bucket_s": r.series.width_s,
                "levels": dict(zip(r.levels, r.series.levels.T.tolist(), strict=True)),
                "counts": dict(zip(r.counters, r.series.counts.T.tolist(), strict=True)),
            },
        })  # fmt: skip
    return json.dumps({"penstock": __version__, "runs": runs}, indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def table(results: Sequence[SimResult], slo: Slo | None = None) -> Table:
    """The short headline for a terminal, one column per run."""
    from rich.markup import escape

    measured = [metrics(r, slo) for r in results]
    out = make_table(["", *(escape(r.label) for r in results)], title=escape(results[0].workload), box=True)
    for _, rows in HEADLINE:
        for row in rows:
            if row.short:
                cells = _cells(measured, row)
                out.add_row(row.name, *(f"[bold green]{c.text}[/]" if c.kind else str(c.text) for c in cells))
        out.add_section()
    return out
