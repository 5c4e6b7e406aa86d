"""Results for people and for files."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import PenstockError
from penstock.bench.metrics import METRICS

_ROWS = (
    ("completed", "Successful requests", "{:d}"),
    ("failed", "Failed requests", "{:d}"),
    ("duration", "Duration (s)", "{:.2f}"),
    ("total_input_tokens", "Input tokens", "{:d}"),
    ("total_output_tokens", "Generated tokens", "{:d}"),
    ("request_throughput", "Requests per second", "{:.2f}"),
    ("request_goodput", "Requests per second within the SLO", "{:.2f}"),
    ("output_throughput", "Generated tokens per second", "{:.2f}"),
    ("total_token_throughput", "All tokens per second", "{:.2f}"),
    ("max_output_tokens_per_s", "Generated tokens in the best second", "{:.0f}"),
    ("max_concurrent_requests", "Most requests at once", "{:d}"),
    ("prefix_cache_hit_rate", "Prompt tokens from the prefix cache", "{:.1%}"),
    ("verified", "Answers asked again, alone", "{:d}"),
    ("verify_mismatches", "... that were different", "{:d}"),
)
_GUESSES = (
    ("spec_decode_num_drafts", "Drafts", "{:d}"),
    ("spec_decode_draft_tokens", "Draft tokens", "{:d}"),
    ("spec_decode_accepted_tokens", "Accepted tokens", "{:d}"),
    ("spec_decode_acceptance_rate", "Acceptance rate (%)", "{:.1f}"),
    ("spec_decode_acceptance_length", "Mean accepted length", "{:.2f}"),
    ("spec_decode_draft_share", "Share of drafting in steps with guesses", "{:.1%}"),
    ("spec_decode_verify_share", "Share of verifying", "{:.1%}"),
    ("spec_decode_speedup", "Effective speed-up of these steps, estimated", "{:.2f}"),
)
LATE_MS = 10.0
"""From here on the client's own lateness spoils what it measures."""


def print_result(result: dict[str, Any], metrics: Sequence[str]) -> None:
    """A table on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Serving benchmark", show_header=False)
    for name, label, shape in _ROWS:
        if result.get(name) is not None:
            table.add_row(label, shape.format(result[name]))
    for row in guess_rows(result):
        table.add_row(*row)
    for kind, count in result["errors_by_kind"].items():
        table.add_row(f"Failed: {kind}", str(count))
    console.print(table)
    columns = (
        [k.removesuffix(f"_{metrics[0]}_ms") for k in result if k.endswith(f"_{metrics[0]}_ms")] if metrics else []
    )
    spread = Table("ms", *columns)
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


def guess_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Speculation's numbers (`core.acceptance.Acceptance.figures`) as rows of a table; none if there are none."""
    rows = [(label, shape.format(result[name])) for name, label, shape in _GUESSES if result.get(name) is not None]
    positions = result.get("spec_decode_per_position_acceptance_rates")
    if positions:
        rows.append(("Acceptance per position (%)", " ".join(f"{100 * share:.1f}" for share in positions)))
    return rows


def print_figures(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def save(path: Path, result: dict[str, Any]) -> None:
    """As JSON, whole or not at all. Raises PenstockError."""
    _write(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def save_text(path: Path, text: str) -> None:
    """Whole or not at all. Raises PenstockError."""
    _write(path, text.encode())


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise PenstockError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def progress(label: str, total: int, *, show: bool = True) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where a person is looking; the function counts one more."""
    if not show or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
