"""A measured roofline for people: a table in the terminal, a page with three charts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from penstock.sim.page import STYLE
from penstock.report.chart import Chart, Format, Line, number, percent, seconds

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.roofline import Point, Roofline

KINDS = {
    "decode": ("Time per token against context", "context, tokens"),
    "batch": ("Tokens per second against sequences at once", "sequences"),
    "prefill": ("Time to the first token against prompt", "prompt, tokens"),
}
_HEAD = ("time", "spread", "roofline", "ratio", "limit", "tokens/s", "GB/s")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}
td.flag {{ color: var(--c1); font-weight: 700; }}</style></head>
<body><main><h1>{title}</h1><p class="soft">{about}</p>
<div class="charts">{charts}</div>{tables}{left_out}
<p class="soft">Roofline: the bytes and FLOPs of a step, counted, over the rates that were measured here. Marked: more
than {gap:.0%} above it. Spread: slowest less fastest repeat. GB/s: of memory, around the point. A model that fits into
the caches can be faster than a roofline of memory.</p></main></body></html>
"""


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
    from rich.table import Table

    console.print(about(found))
    for kind, (title, axis) in KINDS.items():
        points = found.of(kind)
        if not points:
            continue
        table = Table(title=title, title_justify="left")
        table.add_column(axis, justify="right")
        for column in _HEAD:
            table.add_column(column, justify="right")
        for p in points:
            cells = _cells(p)
            cells[3] = f"[red]{cells[3]} ![/red]" if p.is_flagged else cells[3]
            table.add_row(f"{p.x:,}", *cells)
        console.print(table)
    for sentence in found.left_out:
        console.print(f"left out: {sentence}", style="yellow")


def html_page(found: Roofline) -> str:
    """One file, no scripts, nothing loaded."""
    from penstock.bench.roofline import TOLERATED_GAP

    kinds = [kind for kind in KINDS if found.of(kind)]
    left = "".join(f"<li>{escape(s)}</li>" for s in found.left_out)
    return _PAGE.format(
        title=f"Roofline of {escape(str(found.about['model']))}", style=STYLE, about=escape(about(found)),
        charts="".join(_figure(kind, found.of(kind)) for kind in kinds),
        tables="".join(_table(kind, found.of(kind)) for kind in kinds),
        left_out=f"<h2>Left out</h2><ul>{left}</ul>" if left else "", gap=TOLERATED_GAP,
    )  # fmt: skip


def _cells(p: Point) -> list[str]:
    return [
        seconds(p.seconds), percent((p.high_s - p.low_s) / p.seconds), seconds(p.model_s), f"{p.ratio:.2f}", p.limit,
        number(p.tokens_per_s), f"{p.read_bytes_per_s / 1e9:.1f}",
    ]  # fmt: skip


def _figure(kind: str, points: list[Point]) -> str:
    title, axis = KINDS[kind]
    ordered = sorted(points, key=lambda p: p.x)
    xs = [float(p.x) for p in ordered]
    show: Format = number if kind == "batch" else seconds
    if kind == "batch":
        measured, model = [p.tokens_per_s for p in ordered], [p.x / p.model_s for p in ordered]
    else:
        measured, model = [p.seconds for p in ordered], [p.model_s for p in ordered]
    dots = [(x, y, "") for x, y in zip(xs, measured, strict=True)]
    chart = Chart(title, y_format=show, lines=[Line("roofline", xs, model, 1), Line("measured", xs, measured, 0, dots)])
    keys = "".join(
        f'<li><svg viewBox="0 0 26 10"><line class="key c{i}" x1="0" x2="26" y1="5" y2="5"/></svg>{name}</li>'
        for i, name in enumerate(("measured", "roofline"))
    )
    return (
        f"<figure><figcaption><h3>{title}</h3><span>{axis}</span></figcaption>{chart.svg()}"
        f'<ul class="legend">{keys}</ul></figure>'
    )


def _table(kind: str, points: list[Point]) -> str:
    title, axis = KINDS[kind]
    head = "".join(f"<th>{h}</th>" for h in (axis, *_HEAD))
    rows = []
    for p in points:
        cells = [f"<td>{c}</td>" for c in _cells(p)]
        if p.is_flagged:
            cells[3] = cells[3].replace("<td>", '<td class="flag">', 1)
        rows.append(f"<tr><td>{p.x:,}</td>{''.join(cells)}</tr>")
    return (
        f'<h2>{title}</h2><div class="scroll"><table class="num"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
