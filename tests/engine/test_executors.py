"""The laws of the engine do not depend on where its rank lives: representative ones, over ranks in processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from penstock import LLM, SamplingParams
from penstock.base.clock import MonotonicClock
from penstock.engine.core import EngineCore
from penstock.executor.multiproc import MultiprocExecutor
from penstock.executor.rank import RankSpec
from penstock.launch.assemble import engine_core
from tests import ranks, specs
from tests.engine.fake_model import spec as fake_spec
from tests.engine.harness import Knobs, config_for, disturbed, plan_for, request, run, tiny
from tests.engine.naive import fake_logits, generate
from tests.engine.test_laws_models import CONTROLS, check, workload

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "controller": "fixed"}


@contextmanager
def engine(model: str, k: Knobs, speculation: dict[str, Any] | None = None) -> Iterator[EngineCore]:
    """Over a process that runs `model` (see `tests.ranks`)."""
    spec = fake_spec(slots=False) if model == "fake" else tiny(model.partition(":")[2])[0]
    config, plan = config_for(k, speculation), plan_for(spec, k)
    described = RankSpec(config=config.as_kwargs(), plan=plan, model=model, poison=True)
    executor = MultiprocExecutor(described, depth=k.depth, command=ranks.COMMAND)
    try:
        yield engine_core(config, plan, executor, MonotonicClock(), check_invariants=True)
    finally:
        executor.close()


@pytest.mark.parametrize(("name", "depth"), [("llama_gqa", 2), ("slots", 1), ("windowed", 2)])
def test_tokens_do_not_depend_on_anything_but_the_request(name: str, depth: int) -> None:
    """Those of the naive loop, with little memory, preemptions and swaps; greedy, sampled, n, beams, masks."""
    knobs = Knobs(num_blocks=48, num_slots=8, budget=16, max_num_seqs=3, depth=depth, host_blocks=16, preemption="swap")
    with engine(f"tiny:{name}", knobs) as core:
        requests = workload(tiny(name)[0].vocab_size)
        collector = disturbed(core, requests, random.Random(f"{name}-{depth}"), CONTROLS)
    check(name, collector)
    assert core.stats.num_preemptions


def test_drafts_change_nothing() -> None:
    with engine("tiny:llama_gqa", Knobs(depth=1), NGRAM) as core:
        collector = disturbed(core, workload(tiny("llama_gqa")[0].vocab_size), random.Random(1), CONTROLS)
    check("llama_gqa", collector)
    assert core.stats.num_draft_tokens > core.stats.num_accepted_tokens > 0


def test_a_selection_chooses_the_same_as_in_this_process() -> None:
    from tests.engine.harness import real_engine

    knobs = Knobs(selector="snapkv", kept="8", selector_config='{"sinks": 1, "recent": 2, "observe": 2, "interval": 4}')
    requests = [request(range(3, 40), request_id="a", max_tokens=12), request(range(9, 30), request_id="b")]
    here = run(real_engine(*tiny("llama_gqa"), knobs), requests)
    with engine("tiny:llama_gqa", knobs) as core:
        there = run(core, requests)
    everything = run(real_engine(*tiny("llama_gqa"), Knobs()), requests)
    assert {name: r.tokens for name, r in there.items()} == {name: r.tokens for name, r in here.items()}
    assert there["a"].tokens != everything["a"].tokens, "nothing was given up"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_suspicious_model_finds_nothing(depth: int) -> None:
    """The mock model checks every page it reads; it lives in the other process."""
    rng = random.Random(depth)
    requests = [
        request([rng.randrange(3, 20) for _ in range(rng.randrange(1, 30))], max_tokens=rng.randrange(1, 20), n=n)
        for n in (1, 1, 2, 1, 3, 1, 1, 2)
    ]
    with engine("fake", Knobs(num_blocks=40, budget=8, depth=depth)) as core:
        collector = disturbed(core, requests, rng, ["preempt", "ragged"])
    for r in requests:
        got = collector.requests[r.request_id]
        assert [(got.tokens[i], got.reasons[i]) for i in range(r.n)] == [
            generate(fake_logits, r, i) for i in range(r.n)
        ]


@pytest.mark.parametrize("name", specs.ALL)
def test_a_description_survives_the_wire(name: str) -> None:
    """Pages, windows, slots, planes of every kind, rounded or not; draft models."""
    spec = tiny(name)[0]
    for knobs in (Knobs(), Knobs(kv_dtype="int8", host_blocks=4, depth=2)):
        plan = plan_for(spec, knobs, [tiny("llama_gqa")[0]])
        described = RankSpec(config=config_for(knobs, NGRAM).as_kwargs(), plan=plan, model="a/b", drafts=("c",))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(described), type=RankSpec) == described


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": '{"method": "draft-model", "model": "pico", "num_speculative_tokens": 3}'},
        {"kv_selector": "fastgen", "kv_budget": "24", "ops": "native"},
        {"quantization": "int4-w4a8:64", "ops": "native", "rope_scaling": '{"rope_type": "linear", "factor": 2.0}'},
    ],
)
def test_a_model_on_disk_is_the_same_in_either_process(settings: dict[str, Any]) -> None:
    """With all that comes from files: a draft model, what tokens look like, packed weights, a stretched context."""
    prompts = ["Once upon a time, there was a small, old dog. It", "The sea"]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=24, ignore_eos=True)
    usual = {"num_gpu_blocks_override": 64, "threads": 1, "max_model_len": 256}
    told = []
    for executor in ("inproc", "multiproc"):
        llm = LLM("nano", executor=executor, **(usual | settings))
        told.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
        stats = llm.engine.core.stats
        assert bool(stats.num_draft_tokens) == ("speculative_config" in settings)
    assert told[0] == told[1]
