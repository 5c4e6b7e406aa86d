"""Results for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.bench.metrics import METRICS, SPLIT
from penstock.report.tables import table

_ROWS = (
    ("completed", "Successful requests", "{:d}"),
    ("failed", "Failed requests", "{:d}"),
    ("duration", "Duration (s)", "{:.2f}"),
    ("total_input_tokens", "Input tokens", "{:d}"),
    ("total_output_tokens", "Generated tokens", "{:d}"),
    ("request_throughput", "Requests per second", "{:.2f}"),
    ("request_goodput", "Requests per second within the SLO", "{:.2f}"),
    ("input_throughput", "Input tokens per second", "{:.2f}"),
    ("mean_qoe", "Quality of experience, mean", "{:.3f}"),
    ("p10_qoe", "Quality of experience, p10", "{:.3f}"),
    ("output_throughput", "Generated tokens per second", "{:.2f}"),
    ("total_token_throughput", "All tokens per second", "{:.2f}"),
    ("max_itl_ms", "Longest gap between pieces (ms)", "{:.2f}"),
    ("max_output_tokens_per_s", "Generated tokens in the best second", "{:.0f}"),
    ("max_concurrent_requests", "Most requests at once", "{:d}"),
    ("prefix_cache_hit_rate", "Prompt tokens from the prefix cache", "{:.1%}"),
    ("verified", "Answers asked again, alone", "{:d}"),
    ("verify_mismatches", "... that were different", "{:d}"),
)
_DRAFTS = (
    ("spec_decode_num_drafts", "Drafts", "{:d}"),
    ("spec_decode_draft_tokens", "Draft tokens", "{:d}"),
    ("spec_decode_accepted_tokens", "Accepted tokens", "{:d}"),
    ("spec_decode_acceptance_rate", "Acceptance rate (%)", "{:.1f}"),
    ("spec_decode_acceptance_length", "Mean accepted length", "{:.2f}"),
    ("spec_decode_draft_share", "Share of drafting in steps with drafts", "{:.1%}"),
    ("spec_decode_verify_share", "Share of verifying", "{:.1%}"),
    ("spec_decode_speedup", "Effective speed-up of these steps, estimated", "{:.2f}"),
)
LATE_MS = 10.0
"""From here on the client's own lateness spoils what it measures."""


def print_result(result: dict[str, Any], metrics: Sequence[str]) -> None:
    """A table on standard output."""
    from rich.console import Console

    console = Console()
    rows = [(label, shape.format(result[name])) for name, label, shape in _ROWS if result.get(name) is not None]
    rows += draft_rows(result) + steady_rows(result) + bill_rows(result)
    rows += [(f"Failed: {kind}", str(count)) for kind, count in result["errors_by_kind"].items()]
    print_figures("Serving benchmark", rows)
    columns = (
        [k.removesuffix(f"_{metrics[0]}_ms") for k in result if k.endswith(f"_{metrics[0]}_ms")] if metrics else []
    )
    spread = table(("ms", *columns), left=len(columns) + 1, box=True)
    for metric in metrics:
        for part in (metric, *(SPLIT if metric == "ttft" and "mean_network_ms" in result else ())):
            cells = [f"{result[f'{column}_{part}_ms']:.2f}" for column in columns]
            spread.add_row(SPLIT.get(part) or f"{metric.upper()} ({METRICS[metric]})", *cells)
    if metrics:
        console.print(spread)
    print_slowdown(result.get("slowdown"))
    late_ms = result["p99_send_delay_ms"]
    if late_ms > LATE_MS:
        console.print(
            f"The client was late: 1 % of the requests left more than {late_ms:.0f} ms after they were due. Latencies "
            "count from when a request left; the server saw a gentler load than was asked for.",
            style="yellow",
        )


def steady_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Rates without warm-up and drain, and what the two parts of the latency do not explain."""
    rows, steady, parts = [], result["steady"], result["decomposition"]
    if steady["method"] is not None:
        between = f"{steady['start_s']:.1f} to {steady['end_s']:.1f} s"
        rows.append(("Steady part", between if steady["settled"] else f"{between}; never settled"))
        for name, label in (
            ("requests_per_s", "Requests/s, steady"), ("input_tokens_per_s", "Input tokens/s, steady"),
            ("output_tokens_per_s", "Generated tokens/s, steady"),
        ):  # fmt: skip
            rows.append((label, f"{steady[name]:.2f}"))
    if parts["residual"] is not None:
        rows.append(("Mean latency beyond TTFT + TPOT x tokens", f"{parts['residual']:.2%}"))
    return rows


def bill_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Money, joules and carbon, as far as they are known."""
    rows, cost, energy = [], result.get("cost"), result.get("energy")
    if cost is not None:
        unit = cost["currency"]
        rows += [(f"Price of a million {kind} tokens", f"{cost[name]:.4f} {unit}")
                 for kind, name in (("input", "per_million_input"), ("output", "per_million_output"))
                 if cost[name] is not None]  # fmt: skip
        rows.append(("... from", f"{cost['per_hour']:g} {unit} an hour, by {cost['split_by']}"))
        if cost["output_tokens_per_unit"] is not None:
            rows.append((f"Output tokens for 1 {unit}", f"{cost['output_tokens_per_unit']:,.0f}"))
    if energy is not None:
        rows.append((f"Energy (J, {energy['energy_source']})", f"{energy['joules']:.1f}"))
        if energy["joules_per_output_token"] is not None:
            rows.append(("Joules per output token", f"{energy['joules_per_output_token']:.3f}"))
            rows.append(("Grams of CO2 per million output tokens", f"{energy['grams_co2_per_output_token'] * 1e6:.1f}"))
    return rows


def print_slowdown(slowdown: dict[str, Any] | None) -> None:
    """Nothing without one."""
    from rich.console import Console

    if slowdown is None:
        return
    shown = table(("tokens", "requests", "mean JCT (s)", "mean", "p50", "p99", "max"), box=True,
                  title="Slowdown: latency over latency alone")  # fmt: skip
    for c in [*slowdown["classes"]]:
        shown.add_row(
            f"{c['from_tokens']} to {c['to_tokens']}", str(c["requests"]), f"{c['mean_jct_s']:.2f}",
            *(f"{c[name]:.2f}" for name in ("mean", "p50", "p99", "max")),
        )  # fmt: skip
    Console().print(shown)


def print_rates(result: dict[str, Any]) -> None:
    """What a search for the highest rate has found."""
    rate = result["sustainable_rate"]
    promise = result["promise"]
    kept = promise if isinstance(promise, str) else f"{promise:.0%} within the limits"
    print_figures("Sustainable rate", [
        ("Requests per second", "none" if rate is None else f"{rate:.3g}"), ("Promise", kept),
        ("Rates tried", str(len(result["trials"]))),
    ])  # fmt: skip


def draft_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Speculation's numbers (`core.acceptance.Acceptance.figures`) as rows of a table; none if there are none."""
    rows = [(label, shape.format(result[name])) for name, label, shape in _DRAFTS if result.get(name) is not None]
    positions = result.get("spec_decode_per_position_acceptance_rates")
    if positions:
        rows.append(("Acceptance per position (%)", " ".join(f"{100 * share:.1f}" for share in positions)))
    return rows


def print_figures(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich.console import Console

    Console().print(table(("", ""), rows, title=title, left=2, box=True, head=False))
