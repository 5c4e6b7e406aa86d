"""The report: sound HTML that loads nothing, JSON that is JSON, charts that stay inside their frame."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from penstock.core.events import Decision, EngineStats
from penstock.report.chart import HEIGHT, WIDTH, Area, Chart, Line, linear_ticks, log_ticks
from penstock.report.numbers import number, percent, seconds
from penstock.sim.report import html_page, json_report, table
from penstock.sim.result import RequestColumns, SimResult
from penstock.sim.tap import COUNTERS, LEVELS
from penstock.sim.timeline import Timeline
from tests.pages import Page


def result(label: str, n: int = 200, seed: int = 0) -> SimResult:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.5, n))
    scheduled = arrival + rng.exponential(0.2, n) * (rng.random(n) < 0.5)
    first = scheduled + 0.05
    output = rng.integers(1, 50, n)
    timeline = Timeline(len(LEVELS), len(COUNTERS))
    for k in range(n):
        timeline.level(k / 2, (k + 1) / 2, [k % 7, k % 3, 0.3, 0.05, 0.02, 0.0, 0.4])
        timeline.count(k / 2, [output[k], 100, 1, 1])
    zeros = np.zeros(n, np.int64)
    return SimResult(
        label=label,
        workload="made up <script>alert(1)</script>",
        requests=RequestColumns(
            arrival, scheduled, first, first + 0.02 * (output - 1), zeros + 100, output, zeros + 32, zeros,
            rng.integers(0, 2, n),
        ),
        tenants=("<b>x</b>", "y"),
        gaps_s=rng.exponential(0.02, 3 * n),
        gap_counts=rng.integers(1, 4, 3 * n),
        series=timeline.series(),
        levels=LEVELS,
        counters=COUNTERS,
        memory=dict(zip(LEVELS[2:], (0.3, 0.05, 0.02, 0.0, 0.4), strict=True)),
        kv_peak=0.9,
        kv_tokens=4096,
        refused={"longer than the context of 9 tokens": 3},
        truncated=1,
        failed=0,
        stats=EngineStats(num_steps=n),
        span_s=float(arrival[-1]) if n else 0.0,
        busy_s=20.0,
        wall_s=0.5,
        skipped_lines=2,
        settings={"model": "m & n", "device": "d", "scheduling_policy": label},
        decisions=(Decision("block_size", 32, "because 1 < 2"),),
    )  # fmt: skip


RUNS = [result("fcfs"), result("<i>other</i>", seed=1), result("empty", n=0)]


@pytest.mark.parametrize("runs", [RUNS[:1], RUNS[:2], RUNS, RUNS[2:], [result(f"r{k}", 30, k) for k in range(11)]])
def test_pages_are_sound_and_load_nothing(runs: list[SimResult]) -> None:
    page = html_page(runs)
    read = Page(page)
    assert page.startswith("<!DOCTYPE html>")
    assert "i" not in read.tags, "labels are text"
    assert "://" not in page
    assert not re.search(r"url\(|@import|javascript:", page)
    assert "nan" not in re.sub(r"[A-Za-z]{2,}nan|nan[A-Za-z]{2,}", "", page).lower().replace("tenant", "")
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    text = " ".join(read.texts)
    assert "because 1 < 2" in text
    assert "alert(1)" in text
    assert html_page(runs) == page


def test_the_best_value_is_marked_and_ties_are_ties() -> None:
    fast = replace(RUNS[0], label="fast")
    slow = replace(RUNS[0], label="slow", gaps_s=RUNS[0].gaps_s * 2)
    page = html_page([fast, slow])
    row = re.search(r'<th scope="row">TBT p50</th>(.*?)</tr>', page, re.DOTALL)
    assert row is not None
    assert re.findall(r"<td( class=\"best\")?>", row[1]) == [' class="best"', ""]
    tie = re.search(r'<th scope="row">JCT p50</th>(.*?)</tr>', page, re.DOTALL)
    assert tie is not None
    assert "best" not in tie[1]


def test_json_is_json() -> None:
    report = json.loads(json_report(RUNS))
    assert [r["label"] for r in report["runs"]] == [r.label for r in RUNS]
    first = report["runs"][0]
    assert first["metrics"]["requests"]["refused"] == 3
    assert len(first["series"]["levels"]["running"]) == len(first["series"]["counts"]["arrivals"])
    assert sum(first["series"]["counts"]["arrivals"]) == 200
    assert first["cdf"]["ttft"]["share"][-1] == 1.0
    assert report["runs"][2]["metrics"]["latency_s"]["tbt"]["p99"] is None


def test_the_table_is_for_terminals() -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(table(RUNS))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "TTFT p99" in text
    assert "<i>other</i>" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (2.5e-4, "250 µs"), (0.0123, "12.3 ms"), (0.99999, "1 s"), (1.5, "1.5 s"), (119, "119 s"),
     (150, "2.5 min"), (7200, "2 h")],
)  # fmt: skip
def test_durations_for_people(value: float, text: str) -> None:
    assert seconds(value) == text


def test_numbers_for_people() -> None:
    assert [number(v) for v in (0, 0.5, 40, 999, 1000, 1250, 999_900, 2.5e9)] == [
        "0", "0.5", "40", "999", "1k", "1.25k", "1M", "2.5G",
    ]  # fmt: skip
    assert percent(0.0464) == "4.64 %"


def test_ticks_are_round_and_inside() -> None:
    assert linear_ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert log_ticks(0.01, 9) == pytest.approx([0.01, 0.1, 1.0])
    assert log_ticks(30, 4000) == pytest.approx([60, 600, 3600])
    rng = np.random.default_rng(0)
    for _ in range(300):
        low = 10 ** rng.uniform(-6, 4)
        high = low * 10 ** rng.uniform(0.2, 6)
        ticks = log_ticks(low, high)
        assert all(low * 0.99 <= t <= high * 1.01 for t in ticks)
        assert len(ticks) <= 12
        assert 1 <= len(linear_ticks(0, high)) <= 8


def test_charts_stay_inside_their_frame() -> None:
    xs = [0.0, 1.0, 50.0]
    chart = Chart(
        "t & t", seconds, percent, log_x=True, lines=[Line("a", xs, [0.0, 0.5, 1.0], 9, [(50.0, 1.0, "p99 50 s")])],
        marks=[(2.0, "SLO"), (1e9, "far")],
    )  # fmt: skip
    stack = Chart("s", area_xs=xs, areas=[Area("x", [1.0, 2.0, 3.0], 0), Area("y", [1.0, 1.0, 1.0], 1)])
    for drawn in (chart.svg(), stack.svg(), Chart("empty").svg(), Chart("empty", log_x=True).svg()):
        Page(drawn)
        for points in re.findall(r'points="([^"]*)"', drawn):
            for pair in points.split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= WIDTH
                assert 0 <= y <= HEIGHT
    assert "far" not in chart.svg()
    assert "t &amp; t" in chart.svg()
