"""Catalogue rows of measuring and loading, each in its own words."""

from __future__ import annotations

import csv
import random
from datetime import datetime
from itertools import islice, pairwise

import pytest

from penstock.engine.core import EngineCore
from penstock.kv.waste import waste
from penstock.sim.memory import SlotUse
from penstock.sim.traces import open_trace
from tests.engine.harness import Collector, Knobs, fake_engine, request
from tests.shared import shared


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


def test_K19_replay_keeps_the_inter_arrival_times_of_the_azure_traces() -> None:
    for name in ("azure2023_conv.csv", "azure2023_code.csv"):
        path = shared("data", "traces", name)
        with open(path, newline="", encoding="utf-8") as f:
            rows = list(islice(csv.DictReader(f), 3000))
        times = [datetime.fromisoformat(r["TIMESTAMP"][:26]) for r in rows]
        requests = list(islice(iter(open_trace(path)), 3000))
        assert [(q.num_prompt, q.num_output) for q in requests] == [
            (int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows
        ]
        for (a, b), (p, q) in zip(pairwise(times), pairwise(requests), strict=True):
            assert q.arrival_s - p.arrival_s == pytest.approx((b - a).total_seconds(), rel=0.01, abs=2e-6)


def counted(core: EngineCore) -> tuple[int, int, int]:
    """(filled, empty, other) slots, cell by cell: of the blocks in the tables of those who run, and of all the rest."""
    size, group = core.kv.block_size, core.kv.main_group
    assert group is not None
    cells: dict[tuple[int, int], bool] = {}
    for seq in core.scheduler.running:
        for at, block in enumerate(seq.tables[group].ids if seq.tables else ()):
            for i in range(size):
                full = at * size + i < seq.num_computed + seq.num_inflight
                cells[block, i] = cells.get((block, i), False) or full
    filled = sum(cells.values())
    return filled, len(cells) - filled, core.kv.stats().groups[group].total * size - len(cells)


@pytest.mark.parametrize("allocator", ["paged", "contiguous", "contiguous-pow2", "contiguous-oracle"])
@pytest.mark.parametrize("samples", [1, 3])
def test_K08_every_part_is_what_a_count_of_the_cells_says(allocator: str, samples: int) -> None:
    """The sum alone cannot tell: what is missing in one part would be counted as used. Blocks are shared by samples
    and by prompts that begin alike; the simulator's shares are the same parts."""
    rng = random.Random(5)
    k = Knobs(kv_allocator=allocator, block_size=4, num_blocks=64, max_model_len=64, budget=24)
    core, _ = fake_engine(k)
    use = SlotUse(core.kv)
    for i in range(20):
        prompt = [3 + j % 7 for j in range(rng.randrange(0, 12))] + [3 + i % 9] * rng.randrange(1, 18)
        core.add(request(prompt, max_tokens=rng.randrange(1, 24), n=samples))
    collector, shared_tails = Collector(), 0
    while core.has_work:
        collector.take(core.step())
        running, total = core.scheduler.running, core.kv.stats().groups[0].total * 4
        head = core.scheduler.waiting[0] if core.scheduler.waiting else None
        parts = waste(core.kv, running, head)
        filled, empty, other = counted(core)
        assert (parts.used, parts.reserved + parts.internal) == (filled, empty)
        assert parts.external + parts.cached + parts.free == other
        coming = sum(max(0, s.prompt_len + s.request.max_tokens - 1 - s.num_computed) for s in running if s.tables)
        assert parts.reserved <= coming
        if allocator == "paged":
            assert (parts.external, parts.internal <= 3 * len(running)) == (0, True)
            tails = [s.tables[0].ids[-1] for s in running if s.tables]
            shared_tails += len(set(tails)) < len(tails)
        assert use.shares(running, head) == pytest.approx([part / total for part in parts[:5]])
    assert (shared_tails > 0) == (allocator == "paged" and samples > 1)
