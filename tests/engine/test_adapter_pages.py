"""J26, whole: adapters lie in blocks of the KV pool, and no token depends on it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.adapter import AdapterRef
from penstock.core.request import Request
from penstock.engine.record import Recorder, load, replay
from penstock.kv.adapter_pages import blocks_of
from penstock.ops.adapter_units import shape_of
from tests import specs
from tests.adapting import made
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, drain, plain_core, real_engine, request
from tests.engine.naive import generate
from tests.engine.test_adapters import COUNT, OPS, PROMPT, adapted, check, logits, numbered, parts
from tests.engine.test_laws_models import CONTROLS, draw_knobs, workload
from tests.native.running import ISAS
from tests.native.test_adapters import paged
from tests.sampled import draws

NAME = "llama_gqa"


@cache
def ref_of(number: int) -> AdapterRef:
    return AdapterRef(b"adapter %d" % number, str(number), 1000, f"named {number}", units_of(parts(NAME, number)))


def units_of(own: Any) -> int:
    return sum(shape_of(part).num_units for part in own.values())


def sized(asked: Request, ref: AdapterRef | None = None) -> Request:
    """The request with an adapter that says how much it takes."""
    adapter = asked.rules.adapter
    if adapter is None:
        return asked
    rules = msgspec.structs.replace(asked.rules, adapter=ref or ref_of(int(adapter.path)))
    return msgspec.structs.replace(asked, rules=rules)


def knobs_of(ops: str = "ref", **more: Any) -> Knobs:
    own: dict[str, Any] = {
        "block_size": 16, "num_blocks": 64, "budget": 64, "wire": True, "adapters": 2, "adapters_held": 64
    }  # fmt: skip
    return Knobs(ops=ops, adapter_pool=True, **own | more)


def engine(knobs: Knobs, load: Any = None, **more: Any) -> Any:
    spec, weights = specs.make(NAME)
    return real_engine(spec, weights, knobs, load_adapter=load or (lambda ref: parts(NAME, int(ref.path))), **more)


def asking(number: int | None, ids: Any = PROMPT, **more: Any) -> Request:
    return sized(adapted(request(list(ids), **more), number))


def finish(core: Any, *asked: Request) -> Collector:
    collector = Collector()
    for r in asked:
        core.add(r)
    drain(core, collector)
    assert_idle(core)
    return collector


@pytest.mark.parametrize("ops", OPS)
def test_J26_with_one_pool_tokens_depend_on_the_request_and_its_adapter_alone(ops: str, tmp_path: Path) -> None:
    """Preempted, forked, swapped, made ragged, drafted for, with two steps in flight, found in caches and stores."""
    spec, _ = specs.make(NAME)
    given_up = 0
    for draw in range(draws(3, 12)):
        rng = random.Random(f"pool-{draw}")
        numbers, knobs = numbered(NAME, rng), draw_knobs(rng)
        knobs.ops, knobs.adapters, knobs.adapters_held, knobs.adapter_pool = ops, rng.choice([1, 2, 4]), 4, True
        knobs.block_size, knobs.num_blocks, knobs.prefix_cache = 16, 20, rng.choice(["radix", "radix", "hash"])
        if draw % 3 == 1:
            knobs.num_drafts, knobs.depth = 3, 1
        if draw % 3 == 2:
            knobs.kv_offload, knobs.prefix_cache, knobs.host_blocks = f"disk:{tmp_path},1GiB", "radix", 0
        drafting = {"speculation": {"method": "ngram", "num_speculative_tokens": 3}} if knobs.num_drafts else {}
        core = engine(knobs, **drafting)
        assert core.kv.adapters is not None
        asked = [sized(adapted(r, numbers[r.request_id])) for r in workload(spec.vocab_size)]
        collector = disturbed(core, asked, rng, CONTROLS, note=knobs)
        check(NAME, ops, numbers, collector, (numbers, knobs))
        given_up += core.stats.num_adapters_given_up
    assert given_up, "a pool that nobody fills proves nothing"
