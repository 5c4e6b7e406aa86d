"""An evaluation as one page: figures with intervals, maps, curves, some wrong answers. No scripts, nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from penstock.cli.eval_tables import ENDS, between, p_of, shown, signed, spread_of, tag_text, warned
from penstock.sim.page import STYLE
from penstock.report.chart import Chart, Line, percent

if TYPE_CHECKING:
    from penstock.eval.gate import Verdict
    from penstock.eval.paired import Difference
    from penstock.eval.result import Result, Scored, TaskResult, Value
    from penstock.eval.tasks.base import Tag

_WRONG = 5
_SAID = 400
MAP_STYLE = """td.cell, .map thead th { text-align: center; } .map { width: auto; }
.map td.cell { min-width: 64px; border: 2px solid var(--card); }"""
"""What `heat_map` needs."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}
.span {{ fill: var(--a0); opacity: 0.35; }} .mid {{ fill: var(--c0); }} .track {{ fill: var(--grid); }}
td.gauge {{ width: 36%; min-width: 160px; }} td.bad, p.bad {{ color: var(--c1); }}
.charts {{ grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); }}
.named th:nth-child(2), .named td:nth-child(2) {{ text-align: left; }} p.end {{ margin-top: 28px; }}
{map_style}</style></head>
<body><main><h1>{title}</h1><p class="soft">{about}</p>{warnings}{gate}
<h2>Figures</h2><div class="card scroll"><table class="num named"><thead><tr><th>task</th><th>metric</th><th>value</th>
<th>95 %</th><th>n</th><th>from 0 to 100 %</th></tr></thead><tbody>{rows}</tbody></table></div>
{answers}{changed}{maps}{curves}{wrong}
<p class="soft end">Equal prompts and greedy decoding for every configuration; digests in the JSON. Intervals: rates
Wilson's, everything else percentile bootstrap over examples, both 95 %.</p></main></body></html>
"""


def html_page(
    result: Result, changed: Sequence[Difference], judged: Sequence[Verdict], baseline: Result | None = None
) -> str:
    """One file. Texts of models and data sets are escaped: they may hold anything."""
    told = [f"{len(result.tasks)} tasks", f"examples of seed {result.seed}", "chat" if result.chat else "plain text"]
    told += [f"{name} {value}" for name, value in result.settings.items()]
    maps = "".join(_map(task) for task in result.tasks if len(task.axes) == 2)
    curves = "".join(_curve(task) for task in result.tasks if len(task.axes) == 1)
    return _PAGE.format(
        title=f"Evaluation of {escape(result.model)}", style=STYLE, map_style=MAP_STYLE, about=escape(", ".join(told)),
        gate=_gate(judged), warnings=_warnings(result, baseline), answers=_answers(result),
        rows="".join(_rows(task) for task in result.tasks), changed=_changed(changed), maps=maps,
        curves=f'<h2>By position, length, subject</h2><div class="charts">{curves}</div>' if curves else "",
        wrong="".join(_wrong(task) for task in result.tasks),
    )  # fmt: skip


def _warnings(result: Result, baseline: Result | None) -> str:
    lines = "".join(f"<li>{where}{escape(w.task)}: {escape(w.why)}</li>" for where, w in warned(result, baseline))
    head = "Warnings: these figures may be of the measurement, not of the model."
    return f'<p class="bad"><b>{head}</b></p><ul>{lines}</ul>' if lines else ""


def _answers(result: Result) -> str:
    """How answers ended, and whether they were answers."""
    counted = [(task.name, task.answers) for task in result.tasks if task.answers is not None]
    if not counted:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("task", "n", *(name for name, _ in ENDS)))
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{found.n:,}</td>"
        + "".join(_share(getattr(found, field)) for _, field in ENDS) + "</tr>"
        for name, found in counted
    )  # fmt: skip
    return (
        f'<h2>Answers</h2><div class="card scroll"><table class="num"><thead><tr>{head}</tr></thead><tbody>{rows}'
        "</tbody></table></div>"
    )


def _share(value: float) -> str:
    return f"<td>{value:.0%}</td>"


def _gate(judged: Sequence[Verdict]) -> str:
    if not judged:
        return ""
    failed = [v for v in judged if not v.passed]
    if not failed:
        return f"<p><b>Gate: all {len(judged)} rules hold.</b></p>"
    lines = "".join(f"<li>{escape(v.why)}</li>" for v in failed)
    return f"<p><b>Gate: {len(failed)} of {len(judged)} rules do not hold.</b></p><ul>{lines}</ul>"


def _rows(task: TaskResult) -> str:
    left = f'<br><span class="soft">{task.left_out} left out: longer than the context</span>' if task.left_out else ""
    head = f'<td title="{escape(task.source, quote=True)}">{escape(task.name)}{left}</td>'
    return "".join(
        f"<tr>{head if i == 0 else '<td></td>'}<td>{escape(v.name)}</td><td>{shown(v.value, v.kind)}</td>"
        f'<td>{between(v)}</td><td>{v.n:,}</td><td class="gauge">{_bar(v)}</td></tr>'
        for i, v in enumerate(task.values)
    )


def _bar(v: Value) -> str:
    """The value as a mark on its interval; nothing for what is no share."""
    if v.kind not in ("rate", "mean"):
        return ""
    low, high = v.interval or (v.value, v.value)
    return (
        '<svg viewBox="0 0 200 14" role="img" aria-label="interval"><rect class="track" x="0" y="5" width="200" '
        f'height="4" rx="2"/><rect class="span" x="{200 * low:.1f}" y="2" width="{max(1.0, 200 * (high - low)):.1f}" '
        f'height="10" rx="2"/><rect class="mid" x="{min(197.0, 200 * v.value):.1f}" y="0" width="3" height="14"/></svg>'
    )


def _changed(changed: Sequence[Difference]) -> str:
    if not changed:
        return ""
    rows = "".join(
        f"<tr><td>{escape(d.task)}</td><td>{escape(d.metric.name)}</td><td>{shown(d.before.value, d.metric.kind)}</td>"
        f"<td>{shown(d.metric.value, d.metric.kind)}</td><td{' class=bad' if d.surely_worse_by > 0 else ''}>"
        f"{signed(d.value, d.metric.kind)}</td><td>{spread_of(d)}</td>"
        f"<td>{escape(p_of(d))}</td></tr>"
        for d in changed
    )
    heads = ("task", "metric", "before", "now", "difference", "95 %", "p (McNemar)")
    head = "".join(f"<th>{h}</th>" for h in heads)
    return (
        f'<h2>Against the baseline</h2><div class="card scroll"><table class="num named"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _map(task: TaskResult) -> str:
    down, across = task.axes
    head = f"{task.name}: {task.values[0].name}, {down} (down) by {across} (across)"
    return f"<h2>{escape(head)}</h2>{heat_map(task)}"


def heat_map(task: TaskResult, columns: Sequence[Tag] = ()) -> str:
    """The headline metric by the task's two axes. `columns`: values of the second one, where they are to be the same on
    several maps."""
    from penstock.eval.result import grouped

    cells = grouped(task, task.values[0].name, task.axes)
    down = list(dict.fromkeys(key[0] for key in cells))
    across = list(columns) or sorted({key[1] for key in cells}, key=lambda tag: (isinstance(tag, str), tag))
    top = "".join(f"<th>{escape(tag_text(task.axes[1], tag))}</th>" for tag in across)
    body = ""
    for row in down:
        body += f"<tr><th>{escape(tag_text(task.axes[0], row))}</th>"
        body += "".join(_cell(cells.get((row, column))) for column in across) + "</tr>"
    return (
        f'<div class="card scroll"><table class="map num"><thead><tr><th></th>{top}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _cell(v: Value | None) -> str:
    """Red is 0 %, green 100 %; half transparent, so that it stands on a light and on a dark page."""
    if v is None:
        return "<td></td>"
    hue = round(120 * min(1.0, max(0.0, v.value)))
    colour = f"background:hsl({hue} 70% 45% / 0.45)"
    return f'<td class="cell" style="{colour}" title="{between(v)}, n {v.n}">{v.value:.0%}</td>'


def _curve(task: TaskResult) -> str:
    """A line over numbers, with its interval as two thin ones; bars over names."""
    from penstock.eval.result import grouped

    head, axis = task.values[0], task.axes[0]
    cells = {key[0]: value for key, value in grouped(task, head.name, [axis]).items()}
    title, note = f"{task.name}: {head.name}", f"by {axis}; n {sum(v.n for v in cells.values())}"
    if any(isinstance(tag, str) for tag in cells) or len(cells) < 2:
        rows = "".join(
            f"<tr><td>{escape(str(tag))}</td><td>{shown(v.value, v.kind)}</td><td>{v.n}</td>"
            f'<td class="gauge">{_bar(v)}</td></tr>'
            for tag, v in cells.items()
        )
        drawn = f'<div class="scroll"><table class="num"><tbody>{rows}</tbody></table></div>'
    else:
        xs = [float(tag) for tag in cells]
        values = list(cells.values())
        ends = [v.interval or (v.value, v.value) for v in values]
        x_format = percent if axis in ("position", "depth") else "{:g}".format
        chart = Chart(title, x_format=x_format, y_format=percent, y_max=1.0)
        dots = [(x, v.value, "") for x, v in zip(xs, values, strict=True)]
        chart.lines = [
            Line("95 %, low", xs, [low for low, _ in ends], 7), Line("95 %, high", xs, [high for _, high in ends], 7),
            Line(head.name, xs, [v.value for v in values], 0, dots),
        ]  # fmt: skip
        drawn = chart.svg()
        note += "; the outer lines are the interval of 95 %"
    return f"<figure><figcaption><h3>{escape(title)}</h3><span>{escape(note)}</span></figcaption>{drawn}</figure>"


def _wrong(task: TaskResult) -> str:
    """The first answers that missed the headline metric."""
    head = task.values[0]
    if task.kind != "generate" or head.kind not in ("rate", "mean"):
        return ""
    missed: list[Scored] = [e for e in task.examples if e.scores[head.name] < 0.5][:_WRONG]
    if not missed:
        return ""
    rows = "".join(f"<tr><td>{escape(e.expected[:_SAID])}</td><td>{escape(e.said[:_SAID])}</td></tr>" for e in missed)
    return (
        f"<details><summary>{escape(task.name)}: the first wrong answers</summary><div class='card scroll'>"
        f"<table class='wrap'><thead><tr><th>expected</th><th>said</th></tr></thead><tbody>{rows}</tbody></table></div>"
        "</details>"
    )
