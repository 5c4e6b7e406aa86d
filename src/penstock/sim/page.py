"""The template of the report page: one file, no scripts, nothing loaded from anywhere."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #ffffff; --ink: #1b1f24; --soft: #5b6470; --rule: #e3e5e8;
  --grid: #ebedf0; --good: #0b6e4f; --c0: #0b62c4; --c1: #d1570a; --c2: #12805c; --c3: #b1307f; --c4: #7a5a00;
  --c5: #5b3fb5; --c6: #007c91; --c7: #4d4d4d; --a0: #0b62c4; --a1: #f0a202; --a2: #d1350f; --a3: #7d2fb0;
  --a4: #b9cfe4; }
@media (prefers-color-scheme: dark) { :root { --bg: #101317; --card: #171b21; --ink: #e8eaed; --soft: #9aa4b1;
  --rule: #2a3038; --grid: #232932; --good: #5fd3a6; --c0: #6cb0ff; --c1: #ff9d5c; --c2: #54d0a0; --c3: #f07fc0;
  --c4: #e0c050; --c5: #b7a1ff; --c6: #4fd0e6; --c7: #c0c0c0; --a0: #3f8be0; --a1: #f2b63c; --a2: #f0623f;
  --a3: #b77be6; --a4: #33475c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.65rem; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 1.12rem; margin: 34px 0 12px; } h3 { font-size: 0.95rem; margin: 0; } h3.run { margin: 14px 0 6px; }
p { margin: 0 0 8px; } .soft { color: var(--soft); } .num { font-variant-numeric: tabular-nums; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin-top: 20px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 1.35rem; line-height: 1.25; }
.tile span { color: var(--soft); font-size: 0.83rem; display: block; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 8px; display: flex; flex-direction: column; }
figure > svg { margin-top: auto; } figcaption { display: flex; flex-wrap: wrap; gap: 0 10px; align-items: baseline; }
figcaption span { color: var(--soft); font-size: 0.83rem; }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, "Segoe UI", Roboto, sans-serif; }
svg text { fill: var(--soft); } svg .label { fill: var(--ink); font-weight: 600; } svg .small { font-size: 11px; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); } .mark { stroke: var(--ink); stroke-dasharray: 2 4; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
.c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } .c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); }
.line.c1, .key.c1 { stroke-dasharray: 7 3; } .line.c2, .key.c2 { stroke-dasharray: 2 3; }
.line.c3, .key.c3 { stroke-dasharray: 10 3 2 3; } .line.c5, .key.c5 { stroke-dasharray: 7 3; }
.line.c6, .key.c6 { stroke-dasharray: 2 3; } .dot { fill: var(--card); stroke-width: 2; }
.a0 { fill: var(--a0); } .a1 { fill: var(--a1); } .a2 { fill: var(--a2); } .a3 { fill: var(--a3); }
.a4 { fill: var(--a4); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 0.85rem; margin: 0 0 10px; padding: 0;
  list-style: none; }
.legend svg { display: inline-block; width: 26px; height: 10px; margin-right: 6px; } .key { stroke-width: 2.5; }
figure .legend { margin: 2px 0 0; } figure .legend svg { width: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); gap: 14px;
  margin-bottom: 14px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; } tbody th { font-weight: 400; }
tr.group th { color: var(--soft); font-size: 0.8rem; padding-top: 14px; text-align: left; }
thead th { vertical-align: bottom; white-space: normal; } .cards th:first-child { white-space: normal; }
td.best { color: var(--good); font-weight: 700; }
.wrap td, .wrap th { white-space: normal; text-align: left; vertical-align: top; }
.card { padding: 6px 10px; } details { margin-top: 12px; } summary { cursor: pointer; font-weight: 600; }
.bar { display: flex; height: 22px; border-radius: 5px; overflow: hidden; border: 1px solid var(--rule);
  background: var(--card); }
.bar svg { width: 100%; height: 22px; } dl { margin: 8px 0; } dt { font-weight: 600; }
dd { margin: 0 0 8px; color: var(--soft); }
@media (max-width: 700px) { .tiles { grid-template-columns: repeat(2, 1fr); } main { padding: 18px 12px 40px; }
th, td { padding: 5px 7px; }
  tbody th { white-space: normal; } h1 { font-size: 1.35rem; } }
@media print { body { background: #fff; } figure, .tile { break-inside: avoid; } }
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="penstock {{ version }}">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
<h1>{{ title }}</h1>
{% for line in intro %}<p class="soft">{{ line }}</p>
{% endfor %}</header>
{% macro legend(entries) %}<ul class="legend">
{% for e in entries %}<li><svg viewBox="0 0 26 10" aria-hidden="true">{% if e.area %}\
<rect class="a{{ e.style }}" width="26" \
height="10" rx="2"/>{% else %}<line class="key c{{ e.style }}" x1="0" x2="26" y1="5" y2="5"/>{% endif %}\
</svg>{{ e.label }}</li>
{% endfor %}</ul>{% endmacro %}
{% macro charts(items) %}<div class="charts">
{% for c in items %}<figure><figcaption><h3>{{ c.title }}</h3><span>{{ c.note }}</span></figcaption>
{% if c.legend %}{{ legend(c.legend) }}{% endif %}{{ c.svg }}</figure>
{% endfor %}</div>{% endmacro %}
{% if tiles %}<div class="tiles num">
{% for t in tiles %}<div class="tile"><span>{{ t.name }}</span><b>{{ t.value }}</b><span>{{ t.more }}</span></div>
{% endfor %}</div>{% endif %}

<h2>Headline</h2>
{% if percentiles %}<div class="card scroll" style="margin-bottom:14px"><table class="num"><thead><tr>\
<th scope="col"></th>\
{% for p in percentiles.head %}<th scope="col">{{ p }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in percentiles.rows %}<tr><th scope="row">{{ row.name }}</th>{% for cell in row.cells %}\
<td>{{ cell }}</td>\
{% endfor %}</tr>
{% endfor %}</tbody></table></div>
<div class="cards">{% for g in groups %}<div class="card"><table class="num"><thead><tr><th scope="col">{{ g.name }}\
</th><th></th>\
</tr></thead><tbody>{% for row in g.rows %}<tr><th scope="row">{{ row.name }}</th><td>{{ row.cells[0].text }}</td></tr>
{% endfor %}</tbody></table></div>
{% endfor %}</div>
{% else %}<div class="card scroll"><table class="num">
<thead><tr><th scope="col"></th>{% for r in runs %}<th scope="col">{{ r }}</th>{% endfor %}</tr></thead>
<tbody>
{% for g in groups %}<tr class="group"><th scope="rowgroup" colspan="{{ runs|length + 1 }}">{{ g.name }}</th></tr>
{% for row in g.rows %}<tr><th scope="row">{{ row.name }}</th>{% for cell in row.cells %}<td\
{% if cell.best %} class="best"{% endif %}>\
{{ cell.text }}</td>{% endfor %}</tr>
{% endfor %}{% endfor %}</tbody></table></div>{% endif %}

<h2>Latency</h2>
{% if runs|length > 1 %}{{ legend(run_legend) }}{% endif %}
{{ charts(latency) }}

<h2>Over time</h2>
{% if runs|length > 1 %}{{ legend(run_legend) }}{% endif %}
{{ charts(over_time) }}

<h2>Where the KV memory went</h2>
<p class="soft">Mean over time, as shares of the pool of {{ kv_tokens }} token slots.</p>
{{ legend(memory_legend) }}
<div class="card scroll"><table class="num">
<thead><tr><th scope="col"></th><th scope="col"></th>{% for name in memory_names %}<th scope="col">{{ name }}</th>\
{% endfor %}</tr></thead>
<tbody>{% for m in memory %}<tr><th scope="row">{{ m.label }}</th><td style="min-width:200px;width:40%">\
<div class="bar">{{ m.bar }}</div></td>\
{% for share in m.shares %}<td>{{ share }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>

{% if tenants %}<h2>Tenants</h2>
{% for t in tenants %}{% if runs|length > 1 %}<h3 class="run">{{ t.label }}</h3>{% endif %}
<div class="card scroll"><table class="num"><thead><tr>{% for h in t.head %}<th scope="col">{{ h }}</th>{% endfor %}\
</tr></thead>
<tbody>{% for row in t.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endfor %}{% endif %}

<h2>Settings and decisions</h2>
<div class="card scroll"><table><thead><tr><th scope="col"></th>{% if same_settings %}<th scope="col">{{ "all runs" if \
runs|length > 1 else runs[0] }}</th>{% else %}{% for r in runs %}<th scope="col">{{ r }}</th>{% endfor %}{% endif %}\
</tr></thead>
<tbody>{% for s in settings %}<tr><th scope="row">{{ s.name }}</th>{% for v in s["values"] %}<td>{{ v }}</td>\
{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% for d in decisions %}<details><summary>What Penstock decided by itself{{ d.label }}</summary>
<div class="card scroll"><table class="wrap"><thead><tr><th scope="col">decision</th><th scope="col">value</th>\
<th scope="col">why</th></tr></thead>
<tbody>{% for item in d.rows %}<tr><td>{{ item.name }}</td><td class="num">{{ item.value }}</td><td>{{ item.why }}\
</td></tr>
{% endfor %}</tbody></table></div></details>
{% endfor %}
<details><summary>Definitions</summary>
<dl>{% for name, text in definitions %}<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}</dl></details>
<p class="soft" style="margin-top:28px">{{ footer }}</p>
</main>
</body>
</html>
"""

DEFINITIONS = (
    (
        "Time",
        "Virtual seconds. The scheduler, the KV manager and the engine loop are the ones that serve; only the device "
        "is a formula for how long a step takes.",
    ),
    ("Percentiles", "Nearest rank: the smallest value that at least p % of all values do not exceed."),
    ("TTFT", "End of the step that yields a request's first token, minus its arrival."),
    (
        "TBT",
        "Time between two successive tokens of one request; all gaps of all requests (Sarathi-Serve, arXiv "
        "2403.02310).",
    ),
    ("TPOT", "(last token - first token) / (output tokens - 1), per request."),
    ("JCT", "Last token minus arrival. Normalized latency is JCT / output tokens (Orca, OSDI 2022)."),
    ("Queue time", "Start of the first step that works on a request, minus its arrival."),
    (
        "Goodput, attainment",
        "Requests whose TTFT and TPOT are both within the limits, per second and as a share of all that arrived, "
        "refused ones included (DistServe, arXiv 2401.09670).",
    ),
    (
        "Filled, reserved, internal, external",
        "Slots of the KV pool that hold a token; that are promised to tokens a running request will still write; that "
        "are allocated and never filled; that are free but cannot be handed out before a step in flight ends (after "
        "PagedAttention, arXiv 2309.06180, section 3).",
    ),
    (
        "Cached prefixes",
        "Blocks that no running request uses, kept for reuse and given up as soon as somebody needs room.",
    ),
    (
        "Prefix hits",
        "Prompt tokens that the first admission found in the prefix cache, as a share of all prompt tokens.",
    ),
)
