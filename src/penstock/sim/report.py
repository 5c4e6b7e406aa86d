"""Runs as one HTML page, as JSON and as a table for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock import __version__
from penstock.sim.charts import AREAS, latency_charts, time_charts
from penstock.sim.metrics import Slo, by_tenant, distributions, metrics
from penstock.sim.page import DEFINITIONS, STYLE, TEMPLATE
from penstock.sim.result import SimResult
from penstock.report.chart import Chart, number, percent, seconds

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


_LATENCY_ROWS = [
    Row(f"{title} {p}", ("latency_s", key, p), seconds, -1, short=p != "p90")
    for key, title in (("ttft", "TTFT"), ("tbt", "TBT"), ("tpot", "TPOT"), ("jct", "JCT"), ("queue", "Queue time"))
    for p in ("p50", "p90", "p99")
]
HEADLINE: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("Requests", (
        Row("arrived", ("requests", "arrived"), _integer),
        Row("finished", ("requests", "finished"), _integer, short=True),
        Row("refused", ("requests", "refused"), _integer, -1, short=True),
        Row("span", ("span_s",), seconds, -1, short=True),
    )),
    ("Throughput", (
        Row("output tokens/s", ("throughput", "output_tokens_per_s"), number, 1, short=True),
        Row("prompt + output tokens/s", ("throughput", "total_tokens_per_s"), number, 1),
        Row("requests/s", ("throughput", "requests_per_s"), number, 1, short=True),
        Row("goodput, requests/s", ("goodput", "requests_per_s"), number, 1, short=True),
        Row("SLO attainment", ("goodput", "attainment"), percent, 1, short=True),
    )),
    ("Latency", (
        *_LATENCY_ROWS,
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
)  # fmt: skip


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> float | None:
    node: Any = tree
    for name in path:
        node = node[name]
    return None if node is None else float(node)


def _cells(measured: list[dict[str, Any]], row: Row) -> list[dict[str, Any]]:
    values = [_at(m, row.path) for m in measured]
    known = [v for v in values if v is not None]
    texts = ["-" if v is None else row.show(v) for v in values]
    best = None
    if row.better and len(set(texts)) > 1 and known:  # what looks equal is equal
        best = row.show(max(known) if row.better > 0 else min(known))
    return [{"text": text, "best": text == best} for text in texts]


def html_page(results: Sequence[SimResult], slo: Slo | None = None, *, title: str = "") -> str:
    """One self-contained page about one run, or several compared. Deterministic: equal results give equal pages
    (but for the note on how long the simulation took).
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    slo = slo or Slo()
    runs = list(results)
    measured = [metrics(r, slo) for r in runs]
    groups = [
        {"name": group, "rows": [{"name": line.name, "cells": _cells(measured, line)} for line in lines]}
        for group, lines in HEADLINE
        if len(runs) > 1 or group != "Latency"
    ]
    settings = _settings(runs)
    areas = [{"label": text, "style": k, "area": True} for k, (_, text) in enumerate(AREAS)]

    def shown(charts: list[Chart]) -> list[dict[str, Any]]:
        own = len(runs) == 1
        return [
            {
                "title": c.title,
                "note": c.note,
                "svg": Markup(c.svg()),
                "legend": _chart_legend(c) if own else [],
            }
            for c in charts
        ]

    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE)
    return page.render(
        version=__version__,
        style=Markup(STYLE),
        title=title or "Simulated service",
        intro=_intro(runs, measured, slo),
        tiles=_tiles(measured[0]) if len(runs) == 1 else [],
        runs=[r.label for r in runs],
        groups=groups,
        percentiles=_percentiles(measured[0]) if len(runs) == 1 else None,
        run_legend=[{"label": r.label, "style": k % 8, "area": False} for k, r in enumerate(runs)],
        latency=shown(latency_charts(runs, slo)),
        over_time=shown(time_charts(runs)),
        kv_tokens=" / ".join(dict.fromkeys(f"{r.kv_tokens:,}" for r in runs)),
        memory_legend=areas,
        memory_names=[*(text for _, text in AREAS), "free"],
        memory=[
            {"label": r.label, "bar": Markup(_bar(r)), "shares": _shares(m)}
            for r, m in zip(runs, measured, strict=True)
        ],
        tenants=_tenants(runs, slo),
        settings=settings,
        same_settings=all(len(s["values"]) == 1 for s in settings),
        decisions=_decisions(runs),
        definitions=DEFINITIONS,
        footer=_footer(measured),
    )


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


def _tiles(m: dict[str, Any]) -> list[dict[str, str]]:
    def tile(name: str, path: tuple[str, ...], show: Show, more: str) -> dict[str, str]:
        value = _at(m, path)
        return {"name": name, "value": "-" if value is None else show(value), "more": more}

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


def _percentiles(m: dict[str, Any]) -> dict[str, Any]:
    """Every latency of one run in one small table."""
    head = ["mean", "p50", "p90", "p99", "max"]
    names = {
        "ttft": "TTFT", "tbt": "TBT, all gaps", "tpot": "TPOT", "jct": "JCT", "queue": "Queue time",
        "normalized": "Normalized latency, per output token",
    }  # fmt: skip
    rows = []
    for key, name in names.items():
        values = [m["latency_s"][key][column] for column in head]
        rows.append({"name": name, "cells": ["-" if v is None else seconds(v) for v in values]})
    return {"head": head, "rows": rows}


def _chart_legend(chart: Chart) -> list[dict[str, Any]]:
    if chart.areas:
        return [{"label": a.label, "style": a.style, "area": True} for a in chart.areas]
    if len(chart.lines) > 1:
        return [{"label": line.label, "style": line.style, "area": False} for line in chart.lines]
    return []


def _bar(result: SimResult) -> str:
    out, at = ['<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'], 0.0
    for k, (name, _) in enumerate(AREAS):
        width = 100 * result.memory[name]
        out.append(f'<rect class="a{k}" x="{at:.3f}" y="0" width="{width:.3f}" height="10"/>')
        at += width
    return "".join([*out, "</svg>"])


def _shares(measured: dict[str, Any]) -> list[str]:
    mean = measured["kv"]["mean"]
    return [percent(mean[name]) for name in (*(name for name, _ in AREAS), "free")]


def _tenants(runs: list[SimResult], slo: Slo) -> list[dict[str, Any]]:
    if max(len(r.tenants) for r in runs) < 2:
        return []
    head = ["tenant", "requests", "output tokens", "TTFT p50", "TTFT p99", "SLO attainment"]
    out = []
    for run in runs:
        rows = [
            [t["tenant"] or "(none)", _integer(t["requests"]), _integer(t["output_tokens"]), seconds(t["ttft_p50_s"]),
             seconds(t["ttft_p99_s"]), percent(t["attainment"])]
            for t in by_tenant(run, slo)
        ]  # fmt: skip
        if rows:
            out.append({"label": run.label, "head": head, "rows": rows})
    return out


def _settings(runs: list[SimResult]) -> list[dict[str, Any]]:
    """One value if all runs agree on everything; otherwise one per run."""
    names = list(dict.fromkeys(name for r in runs for name in r.settings))
    columns = {name: [str(r.settings.get(name, "-")) for r in runs] for name in names}
    if all(len(set(values)) == 1 for values in columns.values()):
        return [{"name": name, "values": values[:1]} for name, values in columns.items()]
    return [{"name": name, "values": values} for name, values in columns.items()]


def _decisions(runs: list[SimResult]) -> list[dict[str, Any]]:
    kinds: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for run in runs:
        kinds.setdefault(tuple((d.name, str(d.value), d.why) for d in run.decisions), []).append(run.label)
    out = []
    for decisions, labels in kinds.items():
        if decisions:
            label = "" if len(kinds) == 1 else f" ({', '.join(labels)})"
            rows = [{"name": name, "value": value, "why": why} for name, value, why in decisions]
            out.append({"label": label, "rows": rows})
    return out


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


def table(results: Sequence[SimResult], slo: Slo | None = None) -> Any:
    """The short headline as a rich Table, one column per run."""
    from rich.markup import escape
    from rich.table import Table

    measured = [metrics(r, slo) for r in results]
    out = Table(title=escape(results[0].workload), title_justify="left")
    out.add_column("")
    for r in results:
        out.add_column(escape(r.label), justify="right", overflow="fold")
    for _, rows in HEADLINE:
        for row in rows:
            if row.short:
                cells = _cells(measured, row)
                out.add_row(row.name, *(f"[bold green]{c['text']}[/]" if c["best"] else c["text"] for c in cells))
        out.add_section()
    return out
