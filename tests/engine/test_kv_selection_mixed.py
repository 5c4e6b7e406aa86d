"""LeanKV's parts together (row B26): keys in more bits than values, and heads that keep different tokens of these."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from penstock.select import KV_SELECTORS
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, drain, real_engine, run, tiny
from tests.engine.test_kv_selection import CONTROLS, crowd, draw_knobs, settings_of, workload

LEAN = '{"dtype": {"k": "int8", "v": "int4"}}'


def engine(name: str, kept: str, **more: Any) -> Any:
    spec, weights = tiny("llama_gqa")
    usual: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "budget": 256, "kv_dtype": LEAN, "selector": name}
    given = None if name == "none" else settings_of(name)
    return real_engine(spec, weights, Knobs(**(usual | {"kept": kept, "selector_config": given} | more)))


@cache
def alone(name: str, kept: str) -> dict[str, Any]:
    found = {}
    for r in workload(tiny("llama_gqa")[0].vocab_size):
        got = run(engine(name, kept, prefix_cache="none"), [r])[r.request_id]
        found[r.request_id] = got.tokens
    return found


@pytest.mark.parametrize("name", ["adakv", "h2o", "pyramidkv", "leankv"])
def test_B26_pages_of_two_formats_leak_nothing(name: str) -> None:
    """Pages are filled with what is no number when nobody has them: a page that is read beyond its own is seen. All
    laws of memory are checked after every step, and in the end nobody holds a block."""
    spec, weights = tiny("llama_gqa")
    rng = random.Random(f"lean-{name}")
    for _ in range(4):
        knobs = draw_knobs(rng, name, "40%", 0)
        knobs.kv_dtype = LEAN
        if KV_SELECTORS.traits(name).halves:
            knobs.block_size, knobs.num_blocks = 4, 64 * rng.choice([1, 4])  # what is coarse fills blocks
        core = real_engine(spec, weights, knobs)
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, times=12, note=knobs)
        assert core.kv.selections is not None
        assert core.kv.selections.num_cut > 0
        got = {request_id: collector.requests[request_id].tokens for request_id in alone(name, "40%")}
        assert got == alone(name, "40%"), knobs
        assert_idle(core)


def test_B26_at_a_full_budget_nothing_changes() -> None:
    for name in ("adakv", "leankv"):
        assert alone(name, "100%") == alone("none", "100%")
        assert alone(name, "40%") != alone("none", "100%"), "a cut one differs, so this can fail"


def test_B26_bytes_by_the_allocator() -> None:
    """Keys by 8 and values by 4 bits, then a quarter of the tokens: bytes of a block, and how many run at once."""
    size, peak = {}, {}
    for name, kv_dtype in (("none", "float32"), ("none", LEAN), ("adakv", LEAN), ("leankv", LEAN)):
        core = engine(name, "25%", kv_dtype=kv_dtype, num_blocks=96, budget=64, max_num_seqs=32)
        collector = Collector()
        for r in crowd(14, 96, 24):
            core.add(r)
        drain(core, collector)
        assert all(len(c.tokens[0]) == 24 for c in collector.requests.values())
        (group,) = core.kv.groups
        size[name, kv_dtype] = group.slab_bytes(4)
        peak[name, kv_dtype] = core.stats.peak_running
    assert size["adakv", LEAN] == size["none", LEAN] < 0.6 * size["none", "float32"]
    assert peak["adakv", LEAN] >= 2.5 * peak["none", LEAN], "what heads give up lets others in"
    assert size["leankv", LEAN] == size["adakv", LEAN], "pages of both formats are as large"
    assert peak["leankv", LEAN] >= 2.5 * peak["none", LEAN], "tokens at half the bits take no more room"
