"""deploy/grafana/penstock.json: the dashboard, written from the list of panels below.

    python tools/dashboard.py            write it
    python tools/dashboard.py --check    say whether it is up to date (exit status 1 if not)

A test takes every name of a metric and of a label in it to a server's /metrics. A panel whose metric no code makes is
left out, and appears with the metric.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.generated import write_or_check  # noqa: E402

BOARD = ROOT / "deploy" / "grafana" / "penstock.json"
OBSERVATION = ROOT / "src" / "penstock" / "server" / "observation"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = 'model_name=~"$model", instance=~"$instance"'
WINDOW = "[$__rate_interval]"
COLUMNS = 24
TTFT_LIMITS, TPOT_LIMITS = ("1.0", "0.25", "0.5", "2.5", "5.0", "10.0"), ("0.1", "0.025", "0.05", "0.2", "0.5", "1.0")
"""Of the histograms' own bounds, the first one chosen."""

Targets = Sequence[tuple[str, str]]


def of(name: str, more: str = "") -> str:
    return f"penstock:{name}{{{more}{WHERE}}}"


def rate(name: str, by: str = "", more: str = "") -> str:
    """Per second, summed over servers and models."""
    group = f"by ({by}) " if by else ""
    return f"sum {group}(rate({of(name, more)}{WINDOW}))"


def quantiles(name: str) -> Targets:
    bucket = rate(f"{name}_bucket", by="le")
    return [(f"histogram_quantile({q}, {bucket})", f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99)]


def mean(name: str) -> str:
    """Of a histogram's values."""
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


def kept(name: str, variable: str) -> str:
    """The share of a histogram's values up to a bound."""
    bound = f'le="${variable}", '
    return f"{rate(f'{name}_bucket', more=bound)} / {rate(f'{name}_count')}"


@dataclass(frozen=True)
class Panel:
    """`unit`: Grafana's. `text`: below the title's question mark."""

    title: str
    targets: Targets
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    most: float | None = None
    stacks: bool = False

    @property
    def metrics(self) -> set[str]:
        return {name for expression, _ in self.targets for name in re.findall(r"penstock:(\w+)", expression)}


def stat(title: str, expression: str, text: str, **more: Any) -> Panel:
    return Panel(title, [(expression, "")], text=text, **({"kind": "stat"} | more))


READY = {"mode": "absolute", "steps": [{"color": "red", "value": None}, {"color": "green", "value": 1}]}
HITS, QUERIES = rate("prefix_cache_hits_total"), rate("prefix_cache_queries_total")
RESTARTS = f"sum(increase({of('engine_restarts_total')}[$__range]))"
E2E, TTFT, TPOT = "e2e_request_latency_seconds", "time_to_first_token_seconds", "request_time_per_output_token_seconds"
NO_LIMIT = 'subsystem!="kv_limit", '
DRAFTS = f"{rate('spec_decode_num_accepted_tokens_total')} / {rate('spec_decode_num_draft_tokens_total')}"
SECTIONS: Sequence[tuple[str, Sequence[Panel]]] = (
    ("", (
        stat("Ready", f"min({of('engine_up')})", "1: every engine can finish a token now."),
        stat("Running", f"sum({of('num_requests_running')})", "Sequences being computed."),
        stat("Waiting", f"sum({of('num_requests_waiting')})", "Sequences that wait for room."),
        stat("Saturation", f"max({of('saturation')})", "0 idle, 1: a new request has to wait. Scale by it.",
             kind="gauge", unit="percentunit", most=1),
        stat("KV memory in use", f"max({of('kv_cache_usage_perc')})",
             "What only the prefix cache holds counts as free.", kind="gauge", unit="percentunit", most=1),
        stat("Generated tokens", rate("generation_tokens_total"), "Tokens per second."),
        stat("Prefix cache hits", f"{HITS} / {QUERIES}", "Share of the looked-up tokens that were there.",
             unit="percentunit"),
        stat("Engine restarts", RESTARTS, "In the time shown."),
    )),
    ("Traffic", (
        Panel("Requests", [(rate("requests_total", "ending"), "{{ending}}"),
                           (rate("requests_refused_total", "reason"), "refused: {{reason}}")], "reqps"),
        Panel("Tokens", [(rate("prompt_tokens_by_source_total", "source"), "prompt: {{source}}"),
                         (rate("generation_tokens_total"), "generated"),
                         (rate("recomputed_tokens_total"), "recomputed")], text="Per second."),
        Panel("Error answers", [(rate("request_errors_total", "status"), "{{status}}")], "reqps"),
    )),
    ("Latency", (
        Panel("Time to first token", quantiles(TTFT), "s"),
        Panel("Between two tokens", quantiles("inter_token_latency_seconds"), "s"),
        Panel("Whole requests", quantiles(E2E), "s"),
        Panel("Where a request's time goes", [(mean(f"request_{part}_time_seconds"), part)
                                              for part in ("queue", "prefill", "decode")], "s", stacks=True,
              text="Means; together the whole request. Queue and prefill are the time to first token."),
        Panel("Latency = TTFT + TPOT x tokens", [
            (mean(E2E), "measured"),
            (f"{mean(TTFT)} + ({mean(TPOT)}) * ({mean('request_generation_tokens')} - 1)", "by the rule"),
        ], "s", text="Means. The two part where long answers are slower per token than short ones."),
        Panel("Within the limits", [(kept(TTFT, "ttft_limit"), "TTFT <= $ttft_limit s"),
                                    (kept(TPOT, "tpot_limit"), "TPOT <= $tpot_limit s")], "percentunit", most=1,
              text="Share of the requests that keep each limit; goodput is at most the lower one of the rate."),
        Panel("Limits of their own", [(rate("request_tpot_slo_total", "met"), "kept: {{met}}")], "reqps",
              "Requests with a tpot_slo_ms."),
        Panel("Quality of experience", quantiles("qoe"), "percentunit", most=1,
              text="1: every token came when its reader wanted it."),
    )),
    ("Queue", (
        Panel("Waiting in the queue", quantiles("request_queue_time_seconds"), "s"),
        Panel("Predicted for a request that came now", [
            (f"max({of('predicted_wait_seconds')})", "wait"),
            (f"max({of('predicted_ttft_seconds')})", "to its first token"),
        ], "s"),
        Panel("Long texts waiting to be encoded", [
            (f"sum({of('encoding_queue_requests')})", "texts"),
            (f"histogram_quantile(0.95, {rate('encoding_wait_seconds_bucket', by='le')})", "wait, p95 (s)"),
        ]),
    )),
    ("Tenants", (
        Panel("Requests by tenant", [(rate("tenant_total", "tenant", 'kind="requests", '), "{{tenant}}")], "reqps"),
        Panel("Generated tokens by tenant", [
            (rate("tenant_total", "tenant", 'kind="generation_tokens", '), "{{tenant}}")], text="Per second."),
        Panel("Prompt tokens by tenant", [
            (rate("tenant_total", "tenant", 'kind="prompt_tokens", '), "{{tenant}}")], text="Per second."),
    )),
    ("Memory", (
        Panel("KV blocks", [(f"sum by (state) ({of('kv_blocks')})", "{{state}}")]),
        Panel("KV memory given up", [(rate("num_preemptions_total"), "preemptions"),
                                     (rate("evicted_blocks_total"), "evicted blocks"),
                                     (rate("kv_refusals_total"), "growth refused")], text="Per second."),
        Panel("Memory by subsystem", [
            (f"sum by (subsystem) ({of('memory_bytes', NO_LIMIT)})", "{{subsystem}}")], "bytes"),
        Panel("Resident memory", [
            ('sum(process_resident_memory_bytes{instance=~"$instance"})', "server"),
            ('sum(penstock_engine_process_resident_memory_bytes{instance=~"$instance"})', "engine")], "bytes"),
    )),
    ("Work and energy", (
        Panel("Processor", [
            (f'sum(rate(process_cpu_seconds_total{{instance=~"$instance"}}{WINDOW}))', "server"),
            (f'sum(rate(penstock_engine_process_cpu_seconds_total{{instance=~"$instance"}}{WINDOW}))', "engine"),
        ], text="Cores in use."),
        Panel("Engine step", [(f"max({of('engine_step_seconds')})", "last step"),
                              (f"max({of('engine_progress_age_seconds')})", "since its loop moved"),
                              (f"max({of('event_loop_longest_hold_seconds')})", "server: longest hold")], "s"),
        Panel("What steps are for", [(rate("prefill_seconds_total"), "prompts"),
                                     (rate("decode_seconds_total"), "decoding")], "percentunit", stacks=True,
              text="Seconds of steps per second; the rest is idle."),
        Panel("Power", [(rate("energy_joules_total", "source"), "{{source}}")], "watt",
              text="rapl: the machine's own counters; model: watts that were given, or an estimate."),
        Panel("Energy per generated token", [
            (f"{rate('energy_joules_total')} / {rate('generation_tokens_total')}", "J")], "joule"),
    )),
    ("Speculation and faults", (
        Panel("Speculation", [(DRAFTS, "drafts that were right"),
                              (f"avg({of('spec_decode_draft_share')})", "drafter's share of time")], "percentunit",
              "Empty without --speculative-config."),
        Panel("Crashes", [(rate("engine_restarts_total"), "restarts"),
                          (rate("request_replays_total"), "requests that went on"),
                          (rate("request_convictions_total"), "requests found guilty")], text="Per second."),
    )),
)  # fmt: skip


def made(panel: Panel, sources: str) -> bool:
    """Whether code makes all its metrics: a name stands there, but for its endings and for what is put together."""
    bare = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in panel.metrics}
    return all(name in sources or name.removeprefix("spec_decode_") in sources for name in bare)


def drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.title == "Ready":
        defaults["thresholds"] = READY
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
        if panel.stacks:
            defaults["custom"]["stacking"] = {"mode": "normal"}
    out: dict[str, Any] = {
        "id": number, "type": panel.kind, "title": panel.title, "gridPos": place, "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [{"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
                    for i, (expression, legend) in enumerate(panel.targets)],
    }  # fmt: skip
    if panel.text:
        out["description"] = panel.text
    if panel.kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom"}
        out["options"] = {"tooltip": {"mode": "multi"}, "legend": legend}
    return out


def panels() -> Iterator[dict[str, Any]]:
    """From left to right, each section below a line with its name."""
    sources = "\n".join(path.read_text("utf-8") for path in sorted(OBSERVATION.glob("*.py")))
    number, y = 1, 0
    for title, group in SECTIONS:
        if title:
            place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
            yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
            number, y = number + 1, y + 1
        width, height = (3, 4) if not title else (8, 8)
        x = 0
        shown = [panel for panel in group if made(panel, sources)]
        for panel in shown:
            if x + width > COLUMNS:
                x, y = 0, y + height
            yield drawn(panel, number, {"x": x, "y": y, "w": width, "h": height})
            number, x = number + 1, x + width
        y += height


def queried(name: str, label: str) -> dict[str, Any]:
    return {
        "name": name.removesuffix("_name"), "label": label, "type": "query", "datasource": SOURCE,
        "query": f"label_values(penstock:engine_up, {name})", "refresh": 2, "includeAll": True, "multi": True,
        "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def chosen(name: str, label: str, values: Sequence[str]) -> dict[str, Any]:
    options = [{"text": value, "value": value, "selected": value == values[0]} for value in values]
    return {"name": name, "label": label, "type": "custom", "query": ",".join(values), "options": options,
            "current": {"text": values[0], "value": values[0]}}  # fmt: skip


def board() -> str:
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        queried("model_name", "Model"), queried("instance", "Instance"),
        chosen("ttft_limit", "TTFT limit (s)", TTFT_LIMITS), chosen("tpot_limit", "TPOT limit (s)", TPOT_LIMITS),
    ]  # fmt: skip
    whole = {
        "uid": "penstock", "title": "Penstock", "schemaVersion": 39, "editable": True, "timezone": "browser",
        "refresh": "10s", "time": {"from": "now-30m", "to": "now"}, "tags": ["penstock"],
        "templating": {"list": variables}, "panels": list(panels()),
    }  # fmt: skip
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(BOARD, board, sys.argv[1:]))
