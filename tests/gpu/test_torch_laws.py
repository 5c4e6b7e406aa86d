"""The engine's laws on torch: tokens depend on nothing but the request. `cpu-torch` runs what a GPU would run.

The oracles are those of the reference operations: naive models in numpy, on whole texts.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.core.request import Control
from tests import specs
from tests.engine import test_kv_selection as selection
from tests.engine import test_laws_models as laws
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, drain, real_engine, request, run, tiny
from tests.engine.naive import generate
from tests.gpu.test_torch_graphs import CAPTURED, PLAINLY
from tests.sampled import ALL, some

CODECS = [
    ("llama_gqa", "int8", 0, "none"), ("latent", "int8", 0, "none"), ("llama_gqa", "bfloat16", 0, "none"),
    ("windowed", "float16", 0, "none"), ("llama_gqa", "int4", 0, "hadamard"), ("llama_gqa", laws.MIXED, 0, "none"),
    ("windowed", "int2", 0, "none"), ("windowed", laws.KIVI, 4, "none"), ("slots", laws.SINKS, 8, "none"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Knobs that are drawn at random name torch."""

    def drawn(draw: Any) -> Any:
        def torched(*args: Any) -> Knobs:
            knobs: Knobs = draw(*args)
            knobs.ops = "torch"
            return knobs

        return torched

    monkeypatch.setattr(laws, "draw_knobs", drawn(laws.draw_knobs))
    monkeypatch.setattr(selection, "draw_knobs", drawn(selection.draw_knobs))


WITHOUT_GRAPHS = [name for name in specs.ALL if name in PLAINLY or name not in CAPTURED]


@pytest.mark.parametrize("name", specs.ALL if ALL else some(WITHOUT_GRAPHS, shows=specs.kinds))
def test_tokens_do_not_depend_on_anything_but_the_request(name: str) -> None:
    """The others keep the laws with graphs, and where none fits without: `test_torch_graphs`."""
    laws.in_turmoil(name, 1)


@pytest.mark.parametrize(("name", "kv_dtype", "block_size", "rotation"), CODECS)
def test_codecs_obey_the_same_laws(name: str, kv_dtype: str, block_size: int, rotation: str) -> None:
    laws.in_turmoil(name, 1, kv_dtype, block_size, rotation)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["llama_gqa", "mamba2_hybrid", "windowed"])
@pytest.mark.sampled
def test_preempted_in_the_middle_nobody_s_tokens_change(name: str, mode: str) -> None:
    spec, weights = tiny(name)
    todo = [r for r in laws.workload(spec.vocab_size) if r.request_id in ("greedy", "n", "masked")]
    for k in (1, 5, 9):
        core = real_engine(spec, weights, Knobs(budget=12, host_blocks=64, preemption=mode, ops="torch"))
        collector = Collector()
        for r in todo:
            core.add(r)
        step = 0
        while core.has_work:
            if step == k:
                for r in todo:
                    core.add(Control(kind="preempt", request_id=r.request_id))
            collector.take(core.step())
            step += 1
        assert_idle(core)
        assert core.stats.num_preemptions > 0
        assert (core.stats.num_swaps > 0) == (mode == "swap")
        for r in todo:
            got, samples = collector.requests[r.request_id], laws.expected(name)[r.request_id]
            assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (k, r.request_id)


def test_logprobs_are_those_of_the_reference() -> None:
    """Of outputs and prompts, from logits that stay on the device."""
    spec, weights = tiny("llama_gqa")
    found = []
    for ops in ("ref", "torch"):
        collector = Collector()
        core = real_engine(spec, weights, Knobs(budget=7, ops=ops))
        core.add(request([5, 9, 13, 17, 21, 8], request_id="r", max_tokens=6, num_logprobs=3, num_prompt_logprobs=2))
        drain(core, collector)
        found.append(collector.requests["r"])
    for got, want in zip(
        found[1].logprobs[0] + found[1].prompt_logprobs, found[0].logprobs[0] + found[0].prompt_logprobs, strict=True
    ):
        assert (got.token_id, got.rank, list(got.top_ids)) == (want.token_id, want.rank, list(want.top_ids))
        assert got.logprob == pytest.approx(want.logprob, abs=1e-5)


def test_nan_logits_end_only_their_own_request() -> None:
    spec, weights = tiny("llama_gqa")
    embed = weights["embed"].copy()
    embed[60] = float("nan")
    core = real_engine(spec, {**weights, "embed": embed}, Knobs(ops="torch"))
    good, bad = request([5, 6, 7, 8, 9], max_tokens=6), request([5, 6, 60, 8], max_tokens=6, temperature=0.5)
    got = run(core, [good, bad])
    assert "NaN" in (got[bad.request_id].error or "")
    assert got[good.request_id].tokens[0] == generate(laws.oracle("llama_gqa"), good)[0]


@pytest.mark.parametrize("name", ["streaming", "h2o", "snapkv", "adakv", "fastgen", "quest"])
def test_selectors_keep_what_they_keep_on_the_reference(name: str) -> None:
    """What is kept moves between the device's pages."""
    spec, weights = tiny("llama_gqa")
    tokens = []
    for ops in ("ref", "torch"):
        rng = random.Random(name)
        knobs = selection.draw_knobs(rng, name, "40%", 0)
        knobs.ops = ops
        core = real_engine(spec, weights, knobs)
        collector = disturbed(core, selection.workload(spec.vocab_size), rng, selection.CONTROLS, times=12, note=knobs)
        assert core.kv.selections is not None
        assert core.kv.selections.num_cut > 0 or name == "quest"
        tokens.append({request_id: c.tokens for request_id, c in collector.requests.items()})
    assert tokens[1] == tokens[0]
