"""The report as one HTML page: no scripts, nothing loaded; bars with whiskers from the lowest to the highest repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from benchmarks.peers.measure import FIGURES, TITLES, is_rate
from benchmarks.peers.rows import OURS

from penstock.report.numbers import number, seconds
from penstock.report.page import render

BAR, GAP, LABEL, WIDTH, RIGHT = 20, 8, 150, 620, 70
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Engines compared</title><style>{style}
figure {{ margin-bottom: 10px; }} .bars {{ max-width: 760px; }}
.ours {{ fill: var(--c0); }} .peer {{ fill: var(--c7); opacity: .55; }}
.wrong {{ fill: var(--c1); opacity: .5; }} .whisker {{ stroke: var(--ink); stroke-width: 1.4; }}
tr.ours td {{ font-weight: 700; }}</style></head>
<body><main><h1>Engines compared</h1>{head}{body}
<p class="soft">Only bars of one picture may be compared: its engines took turns on the machine. Whiskers: the lowest
and the highest repeat. Orange: an engine whose tokens failed the check.</p></main></body></html>
"""

Cells = Callable[[dict[str, Any]], list[str]]


def html_page(
    sections: dict[tuple[str, str, str], list[dict[str, Any]]], head: Sequence[str],
    columns: Callable[[str], list[str]], cells: Cells,
) -> str:  # fmt: skip
    body = []
    for (model, workload, _), part in sections.items():
        body.append(f"<h2>{escape(model)}, {escape(workload)}</h2>")
        name = FIGURES[workload][0]
        shown = [row for row in part if name in row["figures"]]
        if shown:
            better = "more is better" if is_rate(name) else "less is better"
            body.append(
                f'<figure class="bars"><figcaption><h3>{escape(TITLES[name])}</h3><span>{better}</span></figcaption>'
                f"{bars(shown, name)}</figure>"
            )
        body.append(_table(columns(workload), part, cells))
    lines = "".join(f'<p class="soft">{escape(line)}</p>' for line in head)
    return _PAGE.format(style=render("style.css"), head=lines, body="".join(body))


def bars(rows: Sequence[dict[str, Any]], name: str) -> str:
    """Horizontal bars in the order of the rows, as SVG."""
    top = max(row["figures"][name]["high"] for row in rows) or 1.0
    show = number if is_rate(name) else seconds
    scale = (WIDTH - LABEL - RIGHT) / top
    height = len(rows) * (BAR + GAP)
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(TITLES[name])}">']
    for i, row in enumerate(rows):
        f, y = row["figures"][name], i * (BAR + GAP)
        kind = "wrong" if row["check"] is False else "ours" if row["engine"] == OURS else "peer"
        who, middle = escape(f"{row['engine']}:{row['precision']}"), y + BAR / 2
        low, high = LABEL + f["low"] * scale, LABEL + f["high"] * scale
        out.append(f'<text x="{LABEL - 8}" y="{middle + 4:.1f}" text-anchor="end">{who}</text>')
        out.append(
            f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{f["median"] * scale:.1f}" height="{BAR}" rx="3">'
            f"<title>{who}: {show(f['median'])}</title></rect>"
        )
        out.append(f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>')
        out += [
            f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{middle - 4}" y2="{middle + 4}"/>'
            for x in (low, high)
        ]
        out.append(f'<text class="label" x="{high + 8:.1f}" y="{middle + 4:.1f}">{show(f["median"])}</text>')
    return "".join([*out, "</svg>"])


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]], cells: Cells) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    lines = []
    for row in rows:
        mark = ' class="ours"' if row["engine"] == OURS else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(c)}</td>" for c in cells(row)) + "</tr>")
        lines += [
            f'<tr><td colspan="{len(columns)}" class="soft">{escape(e)}</td></tr>' for e in dict.fromkeys(row["errors"])
        ]
    return (
        f'<div class="scroll"><table class="num"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
