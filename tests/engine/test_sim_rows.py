"""Catalogue rows of measuring and loading, each in its own words."""

from __future__ import annotations

import csv
import random
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path

import pytest

from penstock.kv.waste import waste
from penstock.sim.traces import open_trace
from tests.engine.harness import Collector, Knobs, fake_engine, request
from tests.shared import shared

SAMPLES = Path(__file__).resolve().parents[1] / "data" / "traces"


@pytest.mark.parametrize("allocator", ["paged", "contiguous", "contiguous-pow2", "contiguous-oracle", "virtual"])
def test_K08_allocator_counters_sum_to_the_capacity_at_every_step(allocator: str) -> None:
    rng = random.Random(3)
    core, _ = fake_engine(Knobs(kv_allocator=allocator, block_size=4, num_blocks=64, max_model_len=64, budget=24))
    load = [request([3 + i % 9] * rng.randrange(1, 30), max_tokens=rng.randrange(1, 24)) for i in range(25)]
    for r in load:
        core.add(r)
    collector = Collector()
    seen = set()
    while core.has_work:
        collector.take(core.step())
        head = core.scheduler.waiting[0] if core.scheduler.waiting else None
        parts = waste(core.kv, core.scheduler.running, head)
        assert min(parts) >= 0, parts
        assert sum(parts) == core.kv.stats().groups[0].total * 4
        seen |= {name for name, value in zip(parts._fields, parts, strict=True) if value}
    assert {"used", "free"} <= seen
    if allocator == "contiguous":
        assert {"reserved", "internal"} <= seen


@pytest.mark.parametrize("name", ["azure_columns.csv", "azure2023_conv.csv", "azure2023_code.csv"])
def test_K19_replay_keeps_the_inter_arrival_times_of_the_azure_traces(name: str) -> None:
    """The published files where they are at hand, and always a made-up one with their columns."""
    path = SAMPLES / name if name.startswith("azure_") else shared("data", "traces", name)
    with open(path, newline="", encoding="utf-8") as f:
        rows = list(islice(csv.DictReader(f), 3000))
    times = [datetime.fromisoformat(r["TIMESTAMP"][:26]) for r in rows]
    requests = list(islice(iter(open_trace(path)), 3000))
    assert [(q.num_prompt, q.num_output) for q in requests] == [
        (int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows
    ]
    for (a, b), (p, q) in zip(pairwise(times), pairwise(requests), strict=True):
        assert q.arrival_s - p.arrival_s == pytest.approx((b - a).total_seconds(), rel=0.01, abs=2e-6)
