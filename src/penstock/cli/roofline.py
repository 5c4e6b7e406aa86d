"""A measured roofline for people: a table in the terminal, a page with three charts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from penstock.report.chart import Chart, Format, Line
from penstock.report.numbers import number, percent, seconds
from penstock.report.page import Cell, render
from penstock.report.tables import table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.roofline import Point, Roofline

T = TypeVar("T")
KINDS = {
    "decode": ("Time per token against context", "context, tokens"),
    "batch": ("Tokens per second against sequences at once", "sequences"),
    "prefill": ("Time to the first token against prompt", "prompt, tokens"),
}
_HEAD = ("time", "spread", "roofline", "ratio", "limit", "tokens/s", "GB/s")


def about(found: Roofline) -> str:
    """One sentence on what was measured with what."""
    a = found.about
    scheme = "" if a.get("quantization", "none") == "none" else f", weights {a['quantization']}"
    return (
        f"{a['family']}, {number(a['parameters'])} parameters, {a['dtype']}{scheme}; memory "
        f"{a['read_bytes_per_s'] / 1e9:.1f} GB/s ({a['read_low'] / 1e9:.1f} to {a['read_high'] / 1e9:.1f}, "
        f"{a['threads']} threads, {a['read_by']}), arithmetic {a['flops_per_s'] / 1e9:.0f} GOP/s ({a['flops_by']}); "
        f"medians of {a['repeats']}"
    )


def print_tables(found: Roofline, console: Console) -> None:
    console.print(about(found))
    for kind, (title, axis) in KINDS.items():
        rows = [_cells(p, f"[red]{p.ratio:.2f} ![/red]") for p in found.of(kind)]
        if rows:
            console.print(table((axis, *_HEAD), rows, title=title, left=0, box=True))
    for sentence in found.left_out:
        console.print(f"left out: {sentence}", style="yellow")


def html_page(found: Roofline) -> str:
    """One file, no scripts, nothing loaded."""
    from penstock.bench.roofline import TOLERATED_GAP

    kinds = [kind for kind in KINDS if found.of(kind)]
    return render(
        "sheet.html", title=f"Roofline of {found.about['model']}", intro=[about(found)], findings=(), setup=(),
        charts=[_chart(kind, found.of(kind)) for kind in kinds], left_out=found.left_out,
        tables=[(KINDS[kind][0], (KINDS[kind][1], *_HEAD),
                 [_cells(p, Cell(f"{p.ratio:.2f}", "flag")) for p in found.of(kind)]) for kind in kinds],
        foot="Roofline: the bytes and FLOPs of a step, counted, over the rates that were measured here. Marked: more "
        f"than {TOLERATED_GAP:.0%} above it. Spread: slowest less fastest repeat. GB/s: of memory, around the point. "
        "A model that fits into the caches can be faster than a roofline of memory.",
    )  # fmt: skip


def _cells(p: Point, flagged: T) -> list[str | T]:
    """`flagged`: how the ratio is written where it is too large."""
    return [
        f"{p.x:,}", seconds(p.seconds), percent((p.high_s - p.low_s) / p.seconds), seconds(p.model_s),
        flagged if p.is_flagged else f"{p.ratio:.2f}", p.limit, number(p.tokens_per_s),
        f"{p.read_bytes_per_s / 1e9:.1f}",
    ]  # fmt: skip


def _chart(kind: str, points: list[Point]) -> Chart:
    title, axis = KINDS[kind]
    ordered = sorted(points, key=lambda p: p.x)
    xs = [float(p.x) for p in ordered]
    show: Format = number if kind == "batch" else seconds
    if kind == "batch":
        measured, model = [p.tokens_per_s for p in ordered], [p.x / p.model_s for p in ordered]
    else:
        measured, model = [p.seconds for p in ordered], [p.model_s for p in ordered]
    dots = [(x, y, "") for x, y in zip(xs, measured, strict=True)]
    lines = [Line("roofline", xs, model, 1), Line("measured", xs, measured, 0, dots)]
    return Chart(title, y_format=show, lines=lines, note=axis)
