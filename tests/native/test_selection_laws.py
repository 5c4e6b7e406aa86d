"""KV selectors on native kernels: a request's tokens are those it gets alone, whatever else happens.

`tests/engine/test_kv_selection.py` holds the same on the reference operations against a naive model; here the oracle is
the engine itself, with one request at a time, in one chunk, without a prefix cache.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from tests.engine.harness import Knobs, disturbed, real_engine, run
from tests.engine.test_kv_selection import CONTROLS, draw_knobs, settings_of, workload
from tests.native.running import pytestmark_native
from tests.native.test_model import weights_as

pytestmark = pytestmark_native
CASES = [
    ("streaming", "float32", "float32"), ("streaming", "bfloat16", "int8"), ("window", "bfloat16", "bfloat16"),
    ("h2o", "float32", "int8"), ("snapkv", "float32", "float32"), ("snapkv", "bfloat16", "bfloat16"),
    ("pyramidkv", "float32", "float32"), ("adakv", "float16", "float16"), ("fastgen", "float32", "float32"),
    ("quest", "float32", "float32"), ("quest", "bfloat16", "bfloat16"), ("quest", "bfloat16", "int8"),
    ("infinigen", "float32", "float32"), ("infinigen", "bfloat16", "int8"),
]  # fmt: skip


def set_up(knobs: Knobs, kv_dtype: str) -> Knobs:
    knobs.ops, knobs.kv_dtype = "native", kv_dtype
    return knobs


@cache
def alone(name: str, model: str, dtype: str, kv_dtype: str, block_size: int) -> dict[str, Any]:
    spec, weights = weights_as(model, dtype)
    found = {}
    for r in workload(spec.vocab_size):
        knobs = Knobs(
            block_size=block_size, num_blocks=256, budget=256, prefix_cache="none", selector=name, kept="40%",
            selector_config=settings_of(name),
        )  # fmt: skip
        core = real_engine(spec, weights, set_up(knobs, kv_dtype))
        found[r.request_id] = run(core, [r])[r.request_id].tokens
    return found


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), CASES)
def test_tokens_are_those_of_the_request_alone(name: str, dtype: str, kv_dtype: str) -> None:
    rng = random.Random(f"{name}-{dtype}-{kv_dtype}")
    model = rng.choice(["llama_gqa", "llama_mha"])
    spec, weights = weights_as(model, dtype)
    for _ in range(4):
        knobs = set_up(draw_knobs(rng, name, "40%", 0), kv_dtype)
        # Quest's pages are blocks, so what it reads depends on their size.
        block_size = knobs.block_size if name == "quest" else 4
        want = alone(name, model, dtype, kv_dtype, block_size)
        core = real_engine(spec, weights, knobs)
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, times=12, note=knobs)
        assert {request_id: collector.requests[request_id].tokens for request_id in want} == want, knobs


def test_F13_B18_at_a_full_budget_everybody_reads_the_same() -> None:
    spec, weights = weights_as("llama_gqa", "float32")
    tokens = []
    for selector in ("none", "quest", "infinigen"):
        given = None if selector == "none" else settings_of(selector)
        knobs = Knobs(block_size=2, num_blocks=256, selector=selector, kept="100%", selector_config=given, ops="native")
        found = run(real_engine(spec, weights, knobs), workload(spec.vocab_size))
        tokens.append({request_id: c.tokens for request_id, c in found.items()})
    assert tokens[0] == tokens[1] == tokens[2]


def test_B18_what_is_read_is_counted() -> None:
    spec, weights = weights_as("llama_gqa", "float32")
    counted = {}
    for kept in ("100%", "40%"):
        knobs = Knobs(
            block_size=4, num_blocks=256, selector="infinigen", kept=kept, ops="native",
            selector_config=settings_of("infinigen"),
        )  # fmt: skip
        core = real_engine(spec, weights, knobs)
        run(core, workload(spec.vocab_size))
        counted[kept] = core.stats.num_chosen_tokens, core.stats.num_choosable_tokens
    assert counted["100%"] == (0, 0), "what reads everything chooses nothing"
    read, seen = counted["40%"]
    assert 0 < read <= 0.45 * seen
