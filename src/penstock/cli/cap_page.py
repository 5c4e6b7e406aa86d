"""A CAP board as one page: triangles, accuracy against memory, maps, verdicts. No scripts, nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from penstock.cli.cap_shapes import legend, triangle
from penstock.cli.cap_tables import (
    conditions_text,
    figure,
    gain,
    kl_text,
    machine_text,
    methods,
    rounds_text,
    size,
    trilemma_text,
)
from penstock.cli.eval_page import MAP_STYLE, heat_map
from penstock.sim.page import STYLE
from penstock.report.chart import Chart, Line, number, percent

if TYPE_CHECKING:
    from penstock.eval.cap.report import Report, Row

Span = tuple[float, float, float]
"""A figure between the ends of its interval."""
_CLASSES = {"improved": "up", "worse": "down", "mixed": "both", "unchanged": "", "not shown": "soft"}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}
td.up {{ color: var(--good); font-weight: 600; }} td.down, td.both {{ color: var(--c1); font-weight: 600; }}
td.soft {{ color: var(--soft); }} .text td {{ white-space: normal; text-align: left; vertical-align: top; }}
.text th {{ text-align: left; }}
.text td:nth-child(6) {{ white-space: nowrap; }} .text td:last-child {{ min-width: 220px; }}
.triangles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 14px; }}
.ring {{ fill: none; stroke: var(--rule); }} .spoke {{ stroke: var(--rule); }}
.plain {{ fill: none; stroke: var(--ink); stroke-dasharray: 3 3; }}
.shape {{ fill: var(--c0); fill-opacity: 0.18; stroke: var(--c0); stroke-width: 2; stroke-linejoin: round; }}
.sure {{ stroke: var(--c0); stroke-width: 6; stroke-opacity: 0.35; stroke-linecap: round; }}
.tip {{ fill: var(--c0); }}
.tip.open {{ fill: var(--card); stroke: var(--c0); stroke-width: 1.5; }} .of {{ fill: var(--soft); font-size: 10px; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 8px; }}
.maps {{ display: flex; flex-wrap: wrap; gap: 14px; }}
.charts {{ grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); }}
{map_style}</style></head>
<body><main><h1>{title}</h1><p class="soft">{about}</p><p><b>{trilemma}</b></p>
<h2>What the data say</h2><div class="card scroll"><table class="text"><thead><tr><th>configuration</th>
<th>declared</th><th>C</th><th>A</th><th>P</th><th>label</th><th>why</th></tr></thead>
<tbody>{verdicts}</tbody></table></div>
<p class="soft" style="margin-top:8px">An axis counts as improved, unchanged or worse only where a paired interval of
95 % says so; else it is not shown. Mixed: better by one measure, worse by another, or worse by its figure where the
interval is wide.</p>
<h2>Context and accuracy</h2><div class="card scroll"><table class="num"><thead><tr><th>configuration</th>
<th>C: longest context</th><th>limited by</th><th>would fit</th><th>A: score</th><th>95 %</th>
<th>bits per byte</th>
<th>KL, nats per token</th><th>same top token</th></tr></thead><tbody>{quality}</tbody></table></div>
<h2>Performance</h2><div class="card scroll"><table class="num"><thead><tr><th>configuration</th><th>TTFT</th>
<th>TPOT</th>
<th>tokens per s</th><th>KV of a request after prefill</th><th>at its end</th><th>sequences at once</th>
<th>preemptions</th></tr></thead><tbody>{speeds}</tbody></table></div>
<p class="soft" style="margin-top:8px">{batch}</p>
<h2>Context, accuracy, performance</h2>
<p class="soft">The plain configuration is the dashed triangle. Outwards is better; the inner ring is half, the outer
one twice the plain value, and what is further is cut there. C: longest context kept; A: score; P: throughput in the
same KV memory; or the measure by which the axis improved or got worse, where it is not by these. The broad lines are
intervals of 95 %. The word at a corner is the table's; it is filled only where something is shown.</p>
<div class="triangles">{triangles}</div>
<h2>Accuracy against memory</h2>{legend}<div class="charts">{curves}</div>
{maps}
<h2>Every measure</h2>{details}
<h2>How it was measured</h2><p class="soft">{methods}</p><p class="soft">{conditions}.</p>
<p class="soft">Machine: {machine}. Penstock {version}.</p><pre>{command}</pre>
</main></body></html>
"""


def html_page(report: Report) -> str:
    """One file. Names and commands are a user's: they are escaped."""
    names = [row.name for row in report.rows]
    judged = [row for row in report.rows if row.verdict is not None]
    about = (
        f"{len(judged)} configurations beside the plain one, in {size(report.kv_memory)} of KV memory; accuracy "
        f"of {', '.join(task.name for task in report.plain.tasks) or 'no task'}"
    )
    return _PAGE.format(
        title=f"CAP board of {escape(report.model)}", style=STYLE, map_style=MAP_STYLE, about=escape(about),
        trilemma=escape(trilemma_text(report)), verdicts="".join(_verdict(row) for row in judged),
        quality="".join(_quality(row) for row in report.rows), speeds="".join(_speed(row) for row in report.rows),
        batch=escape(f"{_batch(report)} {rounds_text(report)}".strip()),
        triangles="".join(triangle(row, report.plain) for row in report.rows[1:]), legend=legend(names),
        curves="".join(_curves(report)), maps=_maps(report), details="".join(_detail(row) for row in judged),
        methods=escape(" ".join(methods(report))), conditions=escape(conditions_text(report)),
        machine=escape(machine_text(report)), version=escape(report.version), command=escape(report.command),
    )  # fmt: skip


def _verdict(row: Row) -> str:
    assert row.verdict is not None
    cells = "".join(f'<td class="{_CLASSES[word]}">{word}</td>' for word in row.verdict.words.values())
    label = {"confirmed": "up", "not confirmed": "down"}.get(row.verdict.label, "")
    declared = row.verdict.declared + (", exact" if row.verdict.exact and row.verdict.declared else "")
    return (
        f'<tr><td>{escape(row.name)}</td><td title="{escape(row.verdict.why, quote=True)}">{declared or "nothing"}</td>'
        f'{cells}<td class="{label}">{row.verdict.label}</td><td>{escape(row.verdict.said)}</td></tr>'
    )


def _quality(row: Row) -> str:
    low_high = "" if row.score_low is None or row.score_high is None else f"{row.score_low:.1%} to {row.score_high:.1%}"
    cells = (
        f"{row.context.longest:,}", row.context.limited_by, f"{row.context.fits:,}",
        f"{row.score:.1%}" if row.tasks else "", low_high, f"{row.text.value('bits_per_byte').value:.4f}",
        "" if row.kl is None else kl_text(row), "" if row.kl is None else f"{row.kl.same_top:.1%}",
    )  # fmt: skip
    return _line(row.name, cells)


def _speed(row: Row) -> str:
    p = row.performance
    cells = (
        figure(p.ttft_s, "s"), figure(p.tpot_s, "s"), f"{p.tokens_per_s:,.0f}", size(p.kv_prefill_bytes),
        size(p.kv_end_bytes), str(p.peak_running), str(p.preempted),
    )  # fmt: skip
    return _line(row.name, cells)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _batch(report: Report) -> str:
    c = report.conditions
    return (
        f"Medians of single requests of {c['input len']} + {c['output len']} tokens; tokens per second, prompts "
        f"included, of batches of {c['requests']} such requests in {size(report.kv_memory)} of KV memory. KV memory is "
        "read from the allocator."
    )


def _curves(report: Report) -> list[str]:
    return [*_against_memory(report), _by_length(report)]


def _against_memory(report: Report) -> list[str]:
    """Score and KL over the KV memory that one request holds; what differs in its budget only is joined."""
    charts = []
    held = [float(row.performance.kv_end_bytes) for row in report.rows]
    if report.plain.tasks:
        spans = [_span(r.score_low, r.score, r.score_high) for r in report.rows]
        note = "mean score of the tasks; bars: 95 %"
        charts.append(_bars("Score", note, held, spans, report, Chart("", x_format=size, y_format=percent, y_max=1.0)))
    kls = [_span(0.0, 0.0, 0.0) if r.kl is None else _span(r.kl.low, r.kl.kl, r.kl.high) for r in report.rows]
    note = "nats per token, less is better; bars: 95 %"
    charts.append(_bars("KL from the plain one", note, held, kls, report, Chart("", x_format=size, y_format=number)))
    return charts


def _span(low: float | None, value: float, high: float | None) -> Span:
    return (value if low is None else low), value, (value if high is None else high)


def _bars(title: str, note: str, xs: Sequence[float], spans: Sequence[Span], report: Report, chart: Chart) -> str:
    for family in _families(report):
        ordered = sorted(family, key=lambda i: xs[i])
        if len(ordered) > 1:
            chart.lines.append(Line("", [xs[i] for i in ordered], [spans[i][1] for i in ordered], 7))
    for i, (at, (low, value, high)) in enumerate(zip(xs, spans, strict=True)):
        x = at + (i - (len(xs) - 1) / 2) * 0.008 * max(xs)  # side by side, where several hold as much
        chart.lines.append(Line(report.rows[i].name, [x, x], [low, high], i, [(x, value, "")]))
    chart.area_xs = (0.0, 1.08 * max(xs))  # room on both sides of the outermost points
    chart.tick_unit = float(1 << 10 if max(xs) < 1 << 21 else 1 << 20)
    return _figure(title, f"over the KV memory of one request; {note}", chart.svg())


def _families(report: Report) -> list[list[int]]:
    """Rows that differ in nothing but kv_budget."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(report.rows):
        if "kv_budget" in row.settings:
            rest = str(sorted((k, v) for k, v in row.settings.items() if k != "kv_budget"))
            found.setdefault(rest, []).append(i)
    return list(found.values())


def _by_length(report: Report) -> str:
    chart = Chart("", x_format="{:g}".format, y_format=percent, y_max=1.0)
    for i, row in enumerate(report.rows):
        there = [(float(at.length), at.value.value) for at in row.context.lengths if at.value is not None]
        if there:
            chart.lines.append(Line(row.name, [x for x, _ in there], [y for _, y in there], i,
                                    [(x, y, "") for x, y in there]))  # fmt: skip
    needed = report.plain.context.needed
    chart.lines.append(Line("needed", [report.lengths[0], report.lengths[-1]], [needed, needed], 7))
    task = report.plain.context.task.name
    return _figure("By length", f"{task}; needed: {needed:.0%} (grey). A line ends where the memory does", chart.svg())


def _figure(title: str, note: str, drawn: str) -> str:
    return f"<figure><figcaption><h3>{escape(title)}</h3><span>{escape(note)}</span></figcaption>{drawn}</figure>"


def _maps(report: Report) -> str:
    """Depth by length, one map per configuration; nothing for a task with other axes."""
    if len(report.plain.context.task.axes) != 2:
        return ""
    drawn = "".join(
        f'<div><h3 class="run">{escape(row.name)}</h3>'
        f"{heat_map(row.context.task, columns=report.lengths) if row.context.task.examples else '<p>nothing fits</p>'}"
        "</div>"
        for row in report.rows
    )
    axes = report.plain.context.task.axes
    head = f"{report.plain.context.task.task}: {axes[0]} (down) by {axes[1]} (across)"
    return f'<h2>{escape(head)}</h2><p class="soft">Empty: it does not fit.</p><div class="maps">{drawn}</div>'


def _detail(row: Row) -> str:
    rows = "".join(
        f"<tr><td>{m.axis}</td><td>{escape(m.name)}</td><td>{figure(m.before, m.unit)}</td>"
        f'<td>{figure(m.after, m.unit)}</td><td>{gain(m)}</td><td class="{_CLASSES[m.word]}">{m.word}</td></tr>'
        for m in row.measures
    )
    heads = "".join(f"<th>{h}</th>" for h in ("axis", "measure", "plain", "now", "gain (95 %)", "verdict"))
    return (
        f"<details><summary>{escape(row.name)}</summary><div class='card scroll'><table class='num'><thead><tr>{heads}"
        f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
