"""Results for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.bench.metrics import METRICS
from penstock.report.tables import table

_ROWS = (
    ("completed", "Successful requests", "{:d}"),
    ("failed", "Failed requests", "{:d}"),
    ("duration", "Duration (s)", "{:.2f}"),
    ("total_input_tokens", "Input tokens", "{:d}"),
    ("total_output_tokens", "Generated tokens", "{:d}"),
    ("request_throughput", "Requests per second", "{:.2f}"),
    ("request_goodput", "Requests per second within the SLO", "{:.2f}"),
    ("mean_qoe", "Quality of experience, mean", "{:.3f}"),
    ("p10_qoe", "Quality of experience, p10", "{:.3f}"),
    ("output_throughput", "Generated tokens per second", "{:.2f}"),
    ("total_token_throughput", "All tokens per second", "{:.2f}"),
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
    rows += draft_rows(result)
    rows += [(f"Failed: {kind}", str(count)) for kind, count in result["errors_by_kind"].items()]
    print_figures("Serving benchmark", rows)
    columns = (
        [k.removesuffix(f"_{metrics[0]}_ms") for k in result if k.endswith(f"_{metrics[0]}_ms")] if metrics else []
    )
    spread = table(("ms", *columns), left=len(columns) + 1, box=True)
    for metric in metrics:
        cells = [f"{result[f'{column}_{metric}_ms']:.2f}" for column in columns]
        spread.add_row(f"{metric.upper()} ({METRICS[metric]})", *cells)
    if metrics:
        console.print(spread)
    late_ms = result["p99_send_delay_ms"]
    if late_ms > LATE_MS:
        console.print(
            f"The client was late: 1 % of the requests left more than {late_ms:.0f} ms after they were due. Latencies "
            "count from when a request left; the server saw a gentler load than was asked for.",
            style="yellow",
        )


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
