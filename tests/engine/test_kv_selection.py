"""KV selectors in the engine: what is served is what the naive model with a cut cache says, whatever the chunk, block
size, batch company, prefix state, preemption and forks; what is dropped is free for others."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from penstock.config import from_kwargs
from penstock.config.held import most_blocks
from penstock.config.selection import Keeping, parse_selection
from penstock.core.request import Abort, Request
from penstock.launch.selection import NO_KINDS, keeping_of
from penstock.select import KV_SELECTORS
from penstock.select.bench import SelectionBench
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, drain, real_engine, request, tiny
from tests.engine.naive import Logits, beam_search, generate, model_logits
from tests.oracle import NaiveModel
from tests.sampled import draws, some
from tests.selective import SelectiveModel

MODELS = ["llama_gqa", "llama_mha"]
OPTIONS: dict[str, Any] = {
    "sinks": 2, "recent": 3, "interval": 5, "observe": 4, "pool": 3, "history": 16, "reach": 0.5,
    "dense_layers": 1,
}  # fmt: skip
CUTTING = [name for name in KV_SELECTORS if KV_SELECTORS.traits(name).drops != "nothing" and name != "retrieval"
           and not KV_SELECTORS.traits(name).halves]  # fmt: skip
CONTROLS = ["preempt", "preempt", "reset_prefix_cache"]


def settings_of(name: str, *, prompt_interval: int = 0) -> str:
    return json.dumps({**OPTIONS, "prompt_interval": prompt_interval})


def keeping_for(name: str, budget: str, options: str) -> Keeping:
    given = {"kv_selector": name, "kv_budget": budget, "kv_selector_config": options}
    keeping = keeping_of(from_kwargs(model="unused", **given))
    assert keeping is not None
    return keeping


def workload(vocab: int) -> list[Request]:
    rng = random.Random(11)
    stem = [rng.randrange(3, vocab) for _ in range(18)]
    other = [rng.randrange(3, vocab) for _ in range(9)]
    return [
        request(stem, request_id="greedy", max_tokens=13),
        request(stem[:12] + other, request_id="shared", max_tokens=9, temperature=0.9, seed=11),
        request(stem + other, request_id="n", n=2, max_tokens=7, temperature=1.1, seed=5),
        request(other[:7], request_id="short", max_tokens=14),
    ]


@cache
def oracle(model: str, name: str, budget: str, prompt_interval: int, block_size: int) -> Any:
    spec, weights = tiny(model)
    config = parse_selection(name, budget, settings_of(name, prompt_interval=prompt_interval))
    assert config is not None
    selector = KV_SELECTORS.get(name)(SelectionBench(config, spec, *NO_KINDS, lambda: ""))
    return model_logits_of(SelectiveModel(spec, weights, selector, config, block_size=block_size))


def model_logits_of(model: SelectiveModel) -> Any:
    by_prompt: dict[int, Logits] = {}

    def of(prompt_len: int) -> Logits:
        if prompt_len not in by_prompt:
            inner = model_logits(model)

            def logits(tokens: tuple[int, ...]) -> Any:
                model.prompt_len = prompt_len
                return inner(tokens)

            by_prompt[prompt_len] = logits
        return by_prompt[prompt_len]

    return of


@cache
def expected(model: str, name: str, budget: str, prompt_interval: int, block_size: int) -> dict[str, Any]:
    logits: Any = oracle(model, name, budget, prompt_interval, block_size)
    return {
        r.request_id: [generate(logits(len(r.prompt_token_ids)), r, i) for i in range(r.n)]
        for r in workload(tiny(model)[0].vocab_size)
    }


def draw_knobs(rng: random.Random, name: str, budget: str, prompt_interval: int) -> Knobs:
    block_size = 4 if KV_SELECTORS.traits(name).drops == "blocks" else rng.choice([1, 2, 4, 8])
    return Knobs(
        block_size=block_size,
        num_blocks=256 // block_size * rng.choice([1, 1, 4]),
        budget=rng.choice([1, 5, 16, 64, 256]),
        max_num_seqs=rng.choice([1, 3, 8]),
        policy=rng.choice(["fcfs", "prefill-first", "static"]),
        prefix_cache=rng.choice(["radix", "radix", "hash", "none"]),
        depth=rng.choice([1, 1, 2]),
        wire=rng.random() < 0.5,
        threshold=rng.choice([0, 0, 4]),
        attention=rng.choice(["ref"]),
        selector=name,
        kept=budget,
        selector_config=settings_of(name, prompt_interval=prompt_interval),
    )


@pytest.mark.parametrize(
    ("name", "budget", "prompt_interval"), some(product(CUTTING, ("100%", "40%", "12"), (0, 8)), 14)
)
def test_F01_F03_F04_F05_F06_F22_F23_tokens_are_those_of_the_naive_model_with_a_cut_cache(
    name: str, budget: str, prompt_interval: int
) -> None:
    rng = random.Random(f"{name}-{budget}-{prompt_interval}")
    model = rng.choice(MODELS)
    spec, weights = tiny(model)
    for _ in range(draws(2, 4)):
        knobs = draw_knobs(rng, name, budget, prompt_interval)
        core = real_engine(spec, weights, knobs)
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, times=12, note=knobs)
        assert core.kv.selections is not None
        assert (core.kv.selections.num_cut > 0) == (budget != "100%" or KV_SELECTORS.traits(name).always), knobs
        for request_id, samples in expected(model, name, budget, prompt_interval, 4).items():
            got = collector.requests[request_id]
            assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (request_id, knobs)


@pytest.mark.parametrize("name", [n for n in CUTTING if n != "streaming"])  # which turns keys when they are read
def test_layers_that_share_keys_and_values_are_cut_together(name: str) -> None:
    """C10: the layer that keeps them chooses, those that read them see what is left; all of it is the naive model's."""
    rng = random.Random(f"shared-{name}")
    spec, weights = tiny("shared_kv")
    whole = model_logits(NaiveModel(spec, weights))
    for budget in ("100%", "40%"):
        found = []
        for _ in range(2):
            knobs = replace(draw_knobs(rng, name, budget, 0), block_size=4)
            core = real_engine(spec, weights, knobs)
            assert core.kv.selections is not None
            collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, times=12, note=knobs)
            assert (core.kv.selections.num_cut > 0) == (budget != "100%" or KV_SELECTORS.traits(name).always), knobs
            found.append({i: (got.tokens, got.reasons) for i, got in collector.requests.items()})
        assert found[0] == found[1]
        if not KV_SELECTORS.traits(name).always and budget == "100%":
            for r in workload(spec.vocab_size):
                tokens, reasons = found[0][r.request_id]
                assert [(tokens[i], reasons[i]) for i in range(r.n)] == [generate(whole, r, i) for i in range(r.n)]


def long_engine(selector: str, kept: str, *, blocks: int = 40, **knobs: Any) -> Any:
    spec, weights = tiny("llama_gqa")
    given = None if selector == "none" else settings_of(selector)
    k = Knobs(
        block_size=4, num_blocks=blocks, budget=64, max_num_seqs=32, prefix_cache="radix", selector=selector, kept=kept,
        selector_config=given, **knobs,
    )  # fmt: skip
    return real_engine(spec, weights, k)


def crowd(count: int, length: int, max_tokens: int) -> list[Request]:
    rng = random.Random(3)
    return [
        request([rng.randrange(3, 61) for _ in range(length)], request_id=f"r{i:02d}", max_tokens=max_tokens)
        for i in range(count)
    ]


@pytest.mark.parametrize("name", ["window", "snapkv", "h2o", "adakv", "streaming"])
def test_F01_F03_F06_F23_what_is_dropped_lets_others_in(name: str) -> None:
    """F01 F03 F06 F23: real blocks come back. 96 blocks of 4 hold three prompts of 96 tokens with their answers."""
    peak = {}
    for selector, kept in (("none", "25%"), (name, "25%")):
        core = long_engine(selector, kept, blocks=96)
        collector = Collector()
        for r in crowd(14, 96, 24):
            core.add(r)
        drain(core, collector)
        assert_idle(core)
        assert all(len(c.tokens[0]) == 24 for c in collector.requests.values())
        peak[selector] = core.stats.peak_running
    assert peak["none"] <= 3
    assert peak[name] >= 2.5 * peak["none"], peak


def test_F01_a_stream_goes_on_for_ever_in_the_same_memory() -> None:
    """F01: ten times its budget and more, in blocks that would not hold a quarter of it."""
    core = long_engine("streaming", "24", blocks=16)
    most = 0
    collector = Collector()
    core.add(request([5, 9, 11, 7] * 4, request_id="long", max_tokens=300))
    while core.has_work:
        collector.take(core.step())
        most = max(most, core.kv.stats().groups[0].used)
    assert len(collector.requests["long"].tokens[0]) == 300
    assert most <= (24 + OPTIONS["interval"]) // 4 + 2
    assert_idle(core)


@pytest.mark.parametrize(
    ("name", "prompt_interval"), some(product([name for name in CUTTING if name != "fastgen"], (0, 8)))
)
def test_what_is_forgotten_does_not_depend_on_the_memory_that_others_leave(name: str, prompt_interval: int) -> None:
    """In a pool that holds the longest sequence and no more, with others that want it: the naive model's tokens."""
    rng = random.Random(f"tight-{name}-{prompt_interval}")
    spec, weights = tiny("llama_gqa")
    preempted = 0
    for budget in ("40%", "12"):
        keeping = keeping_for(name, budget, settings_of(name, prompt_interval=prompt_interval))
        longest = max(len(r.prompt_token_ids) + r.max_tokens for r in workload(spec.vocab_size))
        for _ in range(2):
            knobs = replace(
                draw_knobs(rng, name, budget, prompt_interval), block_size=4,
                num_blocks=most_blocks(keeping, longest, 4), max_num_seqs=8, policy="fcfs",
            )  # fmt: skip
            core = real_engine(spec, weights, knobs)
            collector = disturbed(core, workload(spec.vocab_size), rng, ["reset_prefix_cache"], times=2, note=knobs)
            preempted += core.stats.num_preemptions
            for request_id, samples in expected("llama_gqa", name, budget, prompt_interval, 4).items():
                got = collector.requests[request_id]
                assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (request_id, knobs)
    assert preempted, "memory was meant to be short"


@pytest.mark.parametrize("name", ["window", "snapkv", "adakv", "streaming"])
def test_a_prompt_that_is_cut_on_its_way_needs_no_memory_for_all_of_it(name: str) -> None:
    """F01 F06: 400 tokens through the memory of some 40, and others beside them, without a preemption."""
    options = settings_of(name, prompt_interval=16)
    keeping = keeping_for(name, "24", options)
    blocks = most_blocks(keeping, 420, 4)
    assert blocks * 4 < 60
    for count, room in ((1, blocks), (3, 3 * blocks + 9)):
        core = real_engine(
            *tiny("llama_gqa"),
            Knobs(block_size=4, num_blocks=room, budget=64, max_num_seqs=8, prefix_cache="radix", selector=name,
                  kept="24", selector_config=options),
        )  # fmt: skip
        collector = Collector()
        for r in crowd(count, 400, 20):
            core.add(r)
        most = 0
        while core.has_work:
            collector.take(core.step())
            most = max(most, len(core.scheduler.running))
        assert all(len(c.tokens[0]) == 20 for c in collector.requests.values())
        assert core.stats.num_preemptions == 0
        assert most == count
        assert_idle(core)


def test_a_prompt_takes_its_blocks_back_from_the_prefix_cache_before_it_keeps_what_it_should_forget() -> None:
    core = long_engine("snapkv", "80%", blocks=16)
    collector = Collector()
    core.add(request(list(range(3, 51)), request_id="big", max_tokens=10))
    drain(core, collector)
    assert len(collector.requests["big"].tokens[0]) == 10
    assert core.kv.selections.num_cut > 0
    assert_idle(core)


def test_an_ended_parents_choice_still_moves_for_its_forks() -> None:
    """The first sample of two ends with the very token behind the selection; the other goes on with what was kept."""
    model = "llama_gqa"
    spec, weights = tiny(model)
    prompt = workload(spec.vocab_size)[0].prompt_token_ids
    for aborted in (0, 1):
        logits: Any = oracle(model, "snapkv", "40%", 0, 4)
        knobs = Knobs(selector="snapkv", kept="40%", selector_config=settings_of("snapkv"))
        core = real_engine(spec, weights, knobs)
        collector = Collector()
        r = request(prompt, request_id="two", n=2, max_tokens=8, temperature=1.0, seed=9)
        core.add(r)
        while not collector.requests.get("two"):
            collector.take(core.step())
        core.add(Abort(request_id="two", index=aborted))
        drain(core, collector)
        got = collector.requests["two"].tokens[1 - aborted]
        assert got == generate(logits(len(prompt)), r, 1 - aborted)[0]
        assert_idle(core)


@pytest.mark.parametrize("name", ["snapkv", "streaming"])
def test_beams_are_those_of_the_naive_model(name: str) -> None:
    model = "llama_gqa"
    spec, weights = tiny(model)
    r = request(workload(spec.vocab_size)[0].prompt_token_ids, request_id="beam", beam_width=3, max_tokens=8)
    want = beam_search(oracle(model, name, "40%", 0, 4)(len(r.prompt_token_ids)), r)
    for depth in (1, 2):
        knobs = Knobs(selector=name, kept="40%", selector_config=settings_of(name), depth=depth)
        core = real_engine(spec, weights, knobs)
        collector = Collector()
        core.add(r)
        drain(core, collector)
        got = collector.requests["beam"].beams
        assert [(g[0], g[2]) for g in got] == [(w[0], w[2]) for w in want]
        assert core.kv.selections is not None
        assert core.kv.selections.num_cut > 0
        assert_idle(core)
