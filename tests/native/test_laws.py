"""The metamorphic laws on native kernels: tokens depend on nothing but the request.

As tests/engine/test_laws_models.py, with the native program of the same weights, run on whole texts, as the oracle.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from penstock.ops.native.library import ISA_VARIABLE
from tests import specs
from tests.engine.harness import disturbed, real_engine
from tests.engine.naive import beam_search, generate
from tests.engine.test_laws_models import CONTROLS, SHOWN, draw_knobs, reach_of, workload
from tests.native.running import ISAS, pytestmark_native
from tests.native.test_model import NATIVE, logits_alone, weights_as
from tests.sampled import draws

pytestmark = pytestmark_native
CASES = [(name, "float32", "float32") for name in NATIVE]
CASES += [("llama_gqa", "bfloat16", "bfloat16"), ("scores", "float16", "float16"), ("windowed", "bfloat16", "float32")]
CASES += [("llama_gqa", "bfloat16", "int8"), ("scores", "float32", "int8"), ("all_windowed", "float16", "int8")]


@cache
def expected(name: str, dtype: str, kv_dtype: str) -> tuple[dict[str, Any], Any]:
    isa = os.environ.get(ISA_VARIABLE) or ISAS[-1]  # the engine's
    logits = logits_alone(name, isa, dtype=dtype, kv_dtype=kv_dtype, max_tokens=64)
    requests = workload(specs.make(name)[0].vocab_size)
    tokens = {r.request_id: [generate(logits, r, i) for i in range(r.n)] for r in requests if r.beam is None}
    return tokens, beam_search(logits, next(r for r in requests if r.beam is not None))


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), CASES)
def test_tokens_depend_on_nothing_but_the_request(name: str, dtype: str, kv_dtype: str) -> None:
    in_turmoil(name, dtype, kv_dtype, random.Random(f"native-{name}-{dtype}"), draws(1 + (name in SHOWN), 5))


def in_turmoil(
    name: str, dtype: str, kv_dtype: str, rng: random.Random, num: int, controls: Sequence[str] = CONTROLS, **fixed: Any
) -> None:  # fmt: skip
    """Engines with knobs drawn at random, but for those that are `fixed`, disturbed as they run."""
    spec, weights = weights_as(name, dtype)
    tokens, beams = expected(name, dtype, kv_dtype)
    for draw in range(num):
        knobs = replace(draw_knobs(rng), ops="native", kv_dtype=kv_dtype, **fixed)
        knobs.num_blocks = max(knobs.num_blocks, 64 // knobs.block_size + 1)
        if knobs.window_blocks:
            before = max((reach_of(layer) for layer in spec.layers), default=1) - 1
            most = -(-(before + knobs.budget * knobs.depth) // knobs.block_size) + 1
            knobs.window_blocks = min(knobs.num_blocks, most)
        core = real_engine(spec, weights, knobs)
        collector = disturbed(core, workload(spec.vocab_size), rng, controls, note=knobs)
        core.executor.close()
        for request_id, samples in tokens.items():
            got = collector.requests[request_id]
            assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (draw, request_id, knobs)
        found = collector.requests["beam"].beams
        assert [(b[0], b[2]) for b in found] == [(b[0], b[2]) for b in beams], (draw, knobs)
