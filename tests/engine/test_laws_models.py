"""The laws on real (tiny, random) models: same greedy tokens and same seeded samples as the naive no-cache loop,
whatever the chunk, budget, block size, prefix state, eviction, preemption, batch company, fork order and aborts.

Every spec of `tests.specs` takes part: GQA, MHA, MQA, biased, recurrent slots, two-plane latent, sliding windows (C84,
G26: what left a window is given up, and nobody's tokens change).
"""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from penstock.core.model_spec import Layer, cache_groups
from penstock.core.request import Abort, Control, Request
from tests import specs
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, drain, real_engine, request, run, tiny
from tests.engine.naive import Logits, beam_search, generate, log_softmax, model_logits
from tests.oracle import NaiveModel
from tests.sampled import draws, some

SHOWN = some(specs.ALL, shows=specs.kinds)
"""These show every kind of layer and of cache; of the others a drawn run each is enough."""
CONTROLS = ["preempt", "preempt", "ragged", "reset_prefix_cache"]


@cache
def oracle(name: str, kv_dtype: str = "float32", block_size: int = 4, rotation: str = "none") -> Logits:
    """`block_size`: what formats that encode whole blocks depend on, and nothing else."""
    spec, weights = tiny(name)
    return model_logits(NaiveModel(spec, weights, kv_dtype, block_size=block_size, rotation=rotation))


def workload(vocab: int) -> list[Request]:
    """Prompts longer than blocks, shared prefixes, greedy and sampled, several samples, beams, penalties."""
    rng = random.Random(7)
    stem = [rng.randrange(3, vocab) for _ in range(21)]
    other = [rng.randrange(3, vocab) for _ in range(9)]
    return [
        request(stem, request_id="greedy", max_tokens=12),
        request(stem[:16] + other, request_id="shared", max_tokens=9, temperature=0.9, seed=11),
        request(stem + other, request_id="n", n=3, max_tokens=8, temperature=1.1, seed=5, top_p=0.9),
        request(other, request_id="penalised", max_tokens=14, repetition_penalty=1.4, frequency_penalty=0.3),
        request(stem[:16], request_id="beam", beam_width=3, max_tokens=6),
        request(
            other[:3], request_id="masked", max_tokens=10, temperature=0.8, seed=3, top_k=8, min_p=0.02,
            bad_sequences=[[5], [7, 9]], min_tokens=4, stop_ids=[4], eos=[4], logit_bias={6: 1.5},
        ),
        request(stem[:20], request_id="logprobs", max_tokens=5, num_logprobs=3, num_prompt_logprobs=2),
    ]  # fmt: skip


@cache
def expected(
    name: str, kv_dtype: str = "float32", block_size: int = 4, rotation: str = "none"
) -> dict[str, list[tuple[list[int], str]]]:
    logits = oracle(name, kv_dtype, block_size, rotation)
    return {
        r.request_id: [generate(logits, r, i) for i in range(r.n)]
        for r in workload(tiny(name)[0].vocab_size)
        if r.beam is None
    }


def draw_knobs(rng: random.Random, kv_dtype: str = "float32") -> Knobs:
    return Knobs(
        kv_dtype=kv_dtype,
        block_size=rng.choice([1, 2, 4, 8, 16]),
        num_blocks=rng.choice([48, 64, 128]),
        window_blocks=rng.choice([0, 0, 48]),
        num_slots=rng.choice([4, 8, 24]),
        budget=rng.choice([1, 2, 5, 16, 64, 256]),
        max_num_seqs=rng.choice([1, 3, 8]),
        policy=rng.choice(["fcfs", "prefill-first", "static"]),
        prefix_cache=rng.choice(["radix", "radix", "hash", "none"]),
        eviction=rng.choice(["lru", "fifo", "flops"]),
        attention="ref",
        depth=rng.choice([1, 1, 2]),
        wire=rng.random() < 0.5,
        threshold=rng.choice([0, 0, 4]),
        checkpoint_tokens=rng.choice([4, 8, 512]),
        checkpoint_rule=rng.choice(["distance", "branch"]),
        host_blocks=rng.choice([0, 8, 64]),
        preemption=rng.choice(["swap", "recompute"]),
        conservativeness=rng.choice([0.0, 0.0, 1.0]),
    )


def check(
    name: str, collector: Collector, kv_dtype: str = "float32", block_size: int = 4, rotation: str = "none"
) -> None:
    for request_id, samples in expected(name, kv_dtype, block_size, rotation).items():
        got = collector.requests[request_id]
        assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, request_id


@pytest.mark.parametrize("name", specs.ALL)
def test_tokens_do_not_depend_on_anything_but_the_request(name: str) -> None:
    in_turmoil(name, draws(3 if name in SHOWN else 1, 10))


@pytest.mark.parametrize("kv_dtype", ["int8"])
@pytest.mark.parametrize("name", ["llama_gqa", "slots", "latent", "windowed", "scores", "blocks"])
def test_8_bit_kv_obeys_the_same_laws(name: str, kv_dtype: str) -> None:
    in_turmoil(name, draws(1, 4), kv_dtype)


KIVI = '{"dtype": "kivi2", "recent": 6}'
SINKS = '{"dtype": {"k": "channel4", "v": "int2"}, "recent": 3, "sinks": 5}'
MIXED = '{"dtype": {"k": ["int4", "int8"], "v": "int2"}, "layers": {"1": "int4"}}'


@pytest.mark.parametrize(
    ("name", "kv_dtype", "block_size", "rotation"),
    [
        ("llama_gqa", "int4", 0, "none"), ("latent", "int4", 0, "none"), ("windowed", "int2", 0, "none"),
        ("llama_gqa", MIXED, 0, "none"), ("llama_gqa", "int4", 0, "hadamard"), ("llama_gqa", KIVI, 4, "none"),
        ("llama_gqa", KIVI, 16, "hadamard"), ("slots", KIVI, 8, "none"), ("windowed", KIVI, 4, "none"),
        ("llama_gqa", SINKS, 4, "none"), ("slots", SINKS, 8, "none"), ("shared_kv", SINKS, 4, "none"),
        ("shared_kv", "int4", 0, "hadamard"), ("streams", KIVI, 4, "none"),
    ],
)  # fmt: skip
def test_F36_F37_F39_F41_codecs_obey_the_same_laws(name: str, kv_dtype: str, block_size: int, rotation: str) -> None:
    """Alone, in batches, cut into chunks, after prefix hits, preempted, swapped, forked, ragged: the same tokens.
    What encodes whole blocks may depend on their size (0: any), and on nothing else."""
    in_turmoil(name, draws(1, 3), kv_dtype, block_size, rotation)


def in_turmoil(name: str, num: int, kv_dtype: str = "float32", block_size: int = 0, rotation: str = "none") -> None:
    """Engines with knobs drawn at random, disturbed as they run, give the naive model's tokens."""
    spec, weights = tiny(name)
    rng = random.Random(f"laws-{name}")
    for draw in range(num):
        knobs = draw_knobs(rng, kv_dtype)
        knobs.block_size, knobs.kv_rotation = block_size or knobs.block_size, rotation
        if knobs.block_size * knobs.num_blocks < 64:
            knobs.num_blocks = 64 // knobs.block_size + 1
        if knobs.window_blocks:  # what one sequence may hold at a time, and no more
            windows = [g.spec.window or 1 for g in cache_groups(spec, kv_dtype)]
            before = max(windows, default=1) - 1
            most = -(-(before + knobs.budget * knobs.depth) // knobs.block_size) + 1
            knobs.window_blocks = min(knobs.num_blocks, most)
        core = real_engine(spec, weights, knobs)
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, note=knobs)
        how = (kv_dtype, block_size or 4, rotation)
        check(name, collector, *how)
        assert_beams(name, collector, f"draw {draw}: {knobs}", *how)


def assert_beams(name: str, collector: Collector, note: str = "", *how: Any) -> None:
    """`how`: as `expected` takes it behind the name."""
    beam = next(r for r in workload(tiny(name)[0].vocab_size) if r.beam is not None)
    want = _beams(name, *how)
    got = collector.requests[beam.request_id].beams
    assert [(g[0], g[2]) for g in got] == [(w[0], w[2]) for w in want], note
    for g, w in zip(got, want, strict=True):
        assert g[1] == pytest.approx(w[1], abs=1e-3)


@cache
def reach_of(layer: Layer) -> int:
    """Tokens that the layer's window keeps; 1 if it has none."""
    return (getattr(layer.mixer, "reach", None) or 1) if layer.mixer is not None else 1


@cache
def _beams(name: str, *how: Any) -> list[tuple[list[int], float, str]]:
    beam = next(r for r in workload(tiny(name)[0].vocab_size) if r.beam is not None)
    return beam_search(oracle(name, *how), beam)


PREEMPTED = [
    "llama_gqa", "slots", "latent", "windowed", "all_windowed", "mamba", "mamba2_hybrid", "rwkv4", "rwkv6", "rwkv7",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "prefix_cache", "mode"), some(product(PREEMPTED, ("radix", "none"), ("recompute", "swap")))
)
def test_A08_forced_preemption_at_every_step_index(name: str, prefix_cache: str, mode: str) -> None:
    """Everybody loses all device memory at step k, for every k there is; recomputed or brought back from the host."""
    spec, weights = tiny(name)
    knobs = Knobs(block_size=4, budget=12, prefix_cache=prefix_cache, host_blocks=64, preemption=mode)
    wanted = {"greedy", "n", "masked"}
    k = 0
    while True:
        core = real_engine(spec, weights, knobs)
        collector = Collector()
        todo = [r for r in workload(spec.vocab_size) if r.request_id in wanted]
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
        for request_id in wanted:
            got = collector.requests[request_id]
            samples = expected(name)[request_id]
            assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (k, request_id)
        if k >= step:
            break
        assert core.stats.num_preemptions > 0 or k == 0
        assert (core.stats.num_swaps > 0) == (mode == "swap" and core.stats.num_preemptions > 0)
        k += 1
    assert k > 10


def test_abort_storm_leaves_the_others_alone() -> None:
    spec, weights = tiny("llama_gqa")
    rng = random.Random(99)
    core = real_engine(spec, weights, Knobs(block_size=4, num_blocks=40, budget=16, max_num_seqs=6))
    collector = Collector()
    keep = [r for r in workload(spec.vocab_size) if r.beam is None]
    victims = [
        request([rng.randrange(3, 61) for _ in range(rng.randrange(1, 30))], max_tokens=20, n=rng.choice([1, 2]))
        for _ in range(60)
    ]
    for r in keep:
        core.add(r)
    pending = list(victims)
    while core.has_work or pending:
        if pending:
            core.add(pending.pop())
        for request_id in sorted(core.groups):
            if request_id.startswith("r") and rng.random() < 0.3:
                core.add(Abort(request_id=request_id))
        collector.take(core.step())
    assert_idle(core)
    check("llama_gqa", collector)
    assert all(r.request_id in collector.requests for r in victims), "an aborted request got no answer"
    assert core.stats.num_aborted > 20


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8"])
def test_kv_of_fewer_bits_obeys_the_same_laws(kv_dtype: str) -> None:
    spec, weights = tiny("llama_gqa")
    for budget, block_size in ((4, 4), (256, 16)):
        core = real_engine(spec, weights, Knobs(budget=budget, block_size=block_size, kv_dtype=kv_dtype))
        collector = Collector()
        for r in workload(spec.vocab_size):
            if r.beam is None:
                core.add(r)
        drain(core, collector)
        check("llama_gqa", collector, kv_dtype)


def test_online_attention_serves_the_same_greedy_tokens() -> None:
    spec, weights = tiny("llama_gqa")
    prompt = [3 + i % 50 for i in range(300)]  # longer than one split of 256 positions
    r = request(prompt, max_tokens=8)
    full = run(real_engine(spec, weights, Knobs(num_blocks=128, budget=64)), [r])
    online = run(real_engine(spec, weights, Knobs(num_blocks=128, budget=7, attention="ref-online")), [r])
    assert full[r.request_id].tokens == online[r.request_id].tokens


@pytest.mark.parametrize("name", ["llama_gqa", "slots", "mamba2", "rwkv7"])
@pytest.mark.parametrize("budget", [3, 64])
def test_logprobs_equal_the_naive_ones(name: str, budget: int) -> None:
    """Raw logprobs of output and prompt, also after a preemption in the middle of the prompt."""
    spec, weights = tiny(name)
    logits = oracle(name)
    r = next(w for w in workload(spec.vocab_size) if w.request_id == "logprobs")
    core = real_engine(spec, weights, Knobs(budget=budget))
    # Warm the prefix cache first: prompt logprobs must not be swallowed by a hit.
    run(core, [request(r.prompt_token_ids, max_tokens=1)])
    collector = Collector()
    core.add(r)
    collector.take(core.step())
    core.add(Control(kind="preempt", request_id=r.request_id))
    drain(core, collector)
    got = collector.requests[r.request_id]
    prompt = list(r.prompt_token_ids)
    assert [e.token_id for e in got.prompt_logprobs] == prompt[1:]
    history = prompt + got.tokens[0]
    entries = got.prompt_logprobs + got.logprobs[0]
    for position, entry in enumerate(entries, 1):
        row = log_softmax([float(x) for x in logits(tuple(history[:position]))])
        assert entry.token_id == history[position]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-5)
        ranked = sorted(range(len(row)), key=lambda t: (-row[t], t))
        assert entry.rank == ranked.index(entry.token_id) + 1
        k = 2 if position < len(prompt) else 3
        assert entry.top_ids == ranked[:k]
        assert entry.top_logprobs == pytest.approx([row[t] for t in ranked[:k]], abs=1e-5)


def test_nan_logits_end_only_their_own_request() -> None:
    """FEATURES 4.3 row 59: a NaN in one row is that row's error."""
    spec, weights = tiny("llama_gqa")
    broken = dict(weights)
    embed = weights["embed"].copy()
    embed[60] = np.nan  # whoever reads token 60 gets NaN logits
    broken["embed"] = embed
    core = real_engine(spec, broken, Knobs())
    good = request([5, 6, 7, 8, 9], max_tokens=6)
    bad = request([5, 6, 60, 8], max_tokens=6)
    got = run(core, [good, bad])
    assert got[bad.request_id].error is not None
    assert "NaN" in got[bad.request_id].error
    assert got[good.request_id].tokens[0] == generate(oracle("llama_gqa"), good)[0]
    assert core.stats.num_errors == 1


def test_blocks_of_a_failed_row_never_enter_the_prefix_cache() -> None:
    spec, weights = tiny("llama_gqa")
    embed = weights["embed"].copy()
    embed[60] = np.nan
    core = real_engine(spec, {**weights, "embed": embed}, Knobs(block_size=4))
    prompt = [5, 6, 60, 8, 9, 10, 11, 12, 13]
    got = run(core, [request(prompt, request_id="bad", max_tokens=2)])
    assert got["bad"].error is not None
    assert core.kv.stats().groups[0].evictable == 0, "a sick block was kept for others"
