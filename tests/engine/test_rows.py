"""Catalogue rows of the core, each asserted in its own words ("it works when"), in counts that no clock can blur."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.batch import SchedulerOutput
from penstock.core.model_spec import Attention, FeedForward, Layer, weight_shapes
from penstock.core.request import Abort, Control, Request
from penstock.core.sampling import RepetitionDetectionParams
from penstock.core.sequence import Sequence
from penstock.engine.core import EngineCore
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, real_engine, request, run, tiny
from tests.engine.naive import beam_search, circles, fake_logits, generate


def random_prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(n)]


def watch(core: EngineCore, see: Callable[[SchedulerOutput], None]) -> None:
    """Call `see` with every step's work on its way to the executor."""
    submit = core.executor.submit

    def spy(output: SchedulerOutput) -> None:
        see(output)
        submit(output)

    core.executor.submit = spy  # type: ignore[method-assign]


def storage_bytes(core: EngineCore) -> int:
    """Bytes of the arrays that hold the KV cache, read from the arrays."""
    planes = core.executor._runner.storage.planes  # type: ignore[attr-defined]
    return sum(array.nbytes for group in planes for array in group.values())


def skewed_load(rng: random.Random, n: int) -> list[Request]:
    """Most answers are short, a few are long: what request-level batching is worst at."""
    return [
        request(random_prompt(rng, rng.randrange(4, 12)), max_tokens=rng.choice([2, 3, 4, 5, 6, 8, 60]))
        for _ in range(n)
    ]


@pytest.mark.parametrize("stop_at", ["eos", "stop_id", "length", "ignored_eos", "min_tokens"])
def test_A01_stop_length_and_eos_rules(stop_at: str) -> None:
    free = request([5, 6, 7], max_tokens=12)
    tokens = generate(fake_logits, free)[0]
    token = next(t for i, t in enumerate(tokens) if i >= 2 and t not in tokens[:i])
    cut = tokens.index(token) + 1
    kw = {
        "eos": {"eos": [token]},
        "stop_id": {"stop_token_ids": [token]},
        "length": {},
        "ignored_eos": {},
        "min_tokens": {"stop_token_ids": [token], "stop_ids": [token], "min_tokens": cut + 1},
    }[stop_at]
    core, _ = fake_engine(Knobs())
    r = request([5, 6, 7], max_tokens=12, **kw)
    got = run(core, [r])[r.request_id]
    if stop_at in ("eos", "stop_id"):
        assert (got.tokens[0], got.reasons[0]) == (tokens[:cut], "stop")
    elif stop_at == "min_tokens":
        assert token not in got.tokens[0][:cut]
        assert len(got.tokens[0]) > cut
        assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, r)
    else:
        assert (got.tokens[0], got.reasons[0]) == (tokens, "length")


@pytest.mark.parametrize("knobs", [Knobs(), Knobs(depth=2), Knobs(num_drafts=4), Knobs(num_blocks=24, max_num_seqs=8)])
def test_a_sample_that_runs_in_circles_ends(knobs: Knobs) -> None:
    """By its tokens alone: alone or among others, with drafts, preemption and steps in flight."""
    asked = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3)
    few: dict[str, Any] = {"allowed_ids": [5, 6]}  # of which circles are soon made
    requests = [
        request([7, 8, 9 + i], max_tokens=40, repetition=asked, min_tokens=20 * (i == 5), **few) for i in range(6)
    ]
    core, _ = fake_engine(knobs)
    got = run(core, requests)
    for r in requests:
        found = got[r.request_id]
        assert (found.tokens[0], found.reasons[0]) == generate(fake_logits, r)
        assert found.reasons[0] == "repetition"
        assert len(found.tokens[0]) < 40
    free = request([7, 8, 9], max_tokens=40, **few)
    assert run(fake_engine(knobs)[0], [free])[free.request_id].reasons[0] == "length"


def test_circles_are_found_as_the_definition_says() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 4))]
        output = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        low = rng.randrange(4)
        asked = RepetitionDetectionParams(
            max_pattern_size=low + rng.randrange(1, 4), min_pattern_size=low, min_count=rng.randrange(2, 5)
        )
        r = request(prompt, repetition=asked)
        assert r.circles(array("I", prompt + output)) == circles(output, asked), (output, asked)


def test_A05_continuous_batching_beats_static_on_a_skewed_load() -> None:
    """Exact under random arrivals, and at least 1.5x the tokens per step of request-level batching, >= 100 requests."""
    load = skewed_load(random.Random(3), 120)
    results = {}
    for policy in ("fcfs", "static:size=8"):
        core, _ = fake_engine(Knobs(policy=policy, num_blocks=256, budget=64, max_num_seqs=8))
        rng = random.Random(1)
        collector = Collector()
        todo = list(load)
        steps = 0
        while todo or core.has_work:
            for _ in range(rng.randrange(0, 4)):
                if todo:
                    core.add(todo.pop(0))
            collector.take(core.step())
            steps += 1
        assert_idle(core)
        for r in load:
            got = collector.requests[r.request_id]
            assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, r)
        results[policy] = sum(r.max_tokens for r in load) / core.stats.num_steps
    assert results["fcfs"] >= 1.5 * results["static:size=8"], results


def test_A06_mixed_batches_run_prefill_and_decode_rows_in_one_step() -> None:
    core, _ = fake_engine(Knobs(budget=16, num_blocks=128))
    mixed = []
    watch(core, lambda o: mixed.append({r.num_tokens > 1 for r in o.scheduled} == {True, False}))
    a, b = request([3, 4, 5], max_tokens=20), request([6] * 40, max_tokens=4)
    core.add(a)
    for _ in range(3):
        core.step()
    core.add(b)
    collector = Collector()
    drain(core, collector)
    assert sum(mixed) >= 2
    assert (collector.requests[b.request_id].tokens[0]) == generate(fake_logits, b)[0]


def test_A07_fcfs_under_memory_pressure_over_10k_events() -> None:
    """No admitted request is ever lost; the queue drains in arrival order; memory laws hold after every event."""
    rng = random.Random(11)
    core, _ = fake_engine(Knobs(num_blocks=20, block_size=4, budget=24, max_num_seqs=6, prefix_cache="radix"))
    entered: list[int] = []
    known = set()

    def see(output: SchedulerOutput) -> None:
        for row in output.added:
            if row.seq_id not in known:
                known.add(row.seq_id)
                entered.append(row.seq_id)
        still_waiting = [s.seq_id for s in core.scheduler.waiting]
        for row in output.added:  # those who come back from a preemption, too
            assert row.seq_id < min(still_waiting, default=row.seq_id + 1), "somebody older was left waiting"

    preempt = core.scheduler.preempt
    forced = 0

    def take_memory(seq: Sequence) -> None:
        nonlocal forced
        if scheduling:
            forced += 1
            assert seq.seq_id == max(s.seq_id for s in core.scheduler.running), "the youngest yields its memory"
        preempt(seq)

    core.scheduler.preempt = take_memory  # type: ignore[method-assign]
    schedule, scheduling = core.scheduler.schedule, False

    def scheduled(*args: Any, **kw: Any) -> SchedulerOutput | None:
        nonlocal scheduling
        scheduling = True
        try:
            return schedule(*args, **kw)
        finally:
            scheduling = False

    core.scheduler.schedule = scheduled  # type: ignore[method-assign]
    watch(core, see)
    collector = Collector()
    requests: dict[str, Request] = {}
    aborted = set()
    events = 0
    while events < 10_000:
        chance = rng.random()
        if chance < 0.12 and len(core.groups) < 40:
            r = request(random_prompt(rng, rng.randrange(1, 30)), max_tokens=rng.randrange(1, 24))
            requests[r.request_id] = r
            core.add(r)
        elif chance < 0.14 and core.groups:
            victim = rng.choice(sorted(core.groups))
            core.add(Abort(request_id=victim))
            aborted.add(victim)
        elif chance < 0.16 and core.groups:
            core.add(Control(kind="preempt", request_id=rng.choice(sorted(core.groups))))
        elif core.has_work:
            collector.take(core.step())
        events += 1
    drain(core, collector)
    assert_idle(core)
    assert entered == sorted(entered), "somebody overtook"  # ids are given in order of arrival (n = 1)
    assert core.stats.num_preemptions > 50
    assert forced > 20, "no memory pressure"
    for request_id, r in requests.items():
        got = collector.requests[request_id]
        tokens, reason = generate(fake_logits, r)
        if got.reasons[0] == "abort":
            assert request_id in aborted
            assert got.tokens.get(0, []) == tokens[: len(got.tokens.get(0, []))]
        else:
            assert (got.tokens[0], got.reasons[0]) == (tokens, reason)


def test_A10_chunked_prefill_never_stalls_decodes() -> None:
    """With a long prompt arriving mid-stream, the work between two tokens of a running request falls at least 2x
    against prefill-first, for equally many tokens in all."""
    worst, total = {}, {}
    for policy in ("fcfs", "prefill-first"):
        core, forward = fake_engine(Knobs(policy=policy, budget=32, num_blocks=256, max_num_seqs=8))
        runners = [request([3 + i] * 4, max_tokens=60, request_id=f"run{i}") for i in range(3)]
        for r in runners:
            core.add(r)
        collector = Collector()
        for _ in range(5):
            collector.take(core.step())
        core.add(request(random_prompt(random.Random(5), 300), max_tokens=4, request_id="long"))
        gap, largest = 0, 0
        while core.has_work:
            before = forward.num_tokens
            outputs = core.step()
            gap += forward.num_tokens - before
            collector.take(outputs)
            if any(o.request_id == "run0" and o.token_ids for o in outputs):
                largest = max(largest, gap)
                gap = 0
        worst[policy], total[policy] = largest, forward.num_tokens
        for r in runners:
            assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert worst["prefill-first"] >= 2 * worst["fcfs"], worst
    assert abs(total["fcfs"] - total["prefill-first"]) <= 0.1 * total["fcfs"], total


def test_B01_cache_makes_work_linear_and_its_bytes_follow_the_formula() -> None:
    core, forward = fake_engine(Knobs(num_blocks=64))
    prompt, n = [5] * 20, 30
    run(core, [request(prompt, max_tokens=n)])
    without_cache = sum(len(prompt) + i for i in range(n))
    assert forward.num_tokens == len(prompt) + n - 1
    assert without_cache > 10 * forward.num_tokens
    for name in ("llama_gqa", "llama_mha", "llama_mqa"):
        spec, weights = tiny(name)
        knobs = Knobs(num_blocks=32, block_size=8)
        measured = storage_bytes(real_engine(spec, weights, knobs))
        mixer = spec.layers[0].mixer
        formula = 2 * len(spec.layers) * mixer.num_kv_heads * mixer.head_dim * 4
        assert measured == formula * knobs.num_blocks * knobs.block_size, name  # read from the arrays


def test_C02_C03_kv_bytes_shrink_with_the_kv_heads() -> None:
    sizes = {}
    for name in ("llama_mha", "llama_gqa", "llama_mqa"):
        spec, weights = tiny(name)
        sizes[name] = storage_bytes(real_engine(spec, weights, Knobs()))
    assert sizes["llama_gqa"] * 2 == sizes["llama_mha"]  # 2 of 4 heads
    assert sizes["llama_mqa"] * 4 == sizes["llama_mha"]  # 1 of 4 heads


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("share", [1, 2, 3, 6])
def test_C10_C13_kv_bytes_shrink_with_the_layers_that_keep_some(kv_heads: int, share: int) -> None:
    """Bytes read from the arrays: 2 G D numbers per token and layer that keeps keys and values, and nothing for those
    that read another's: halved by CLA2, and below one head per layer (MLKV) with one head and layers that share."""
    mixers = [
        Attention(num_heads=4, num_kv_heads=kv_heads, head_dim=8, kv_from=n - n % share if n % share else None)
        for n in range(6)
    ]
    layers = tuple(Layer(mixer=m, ffn=FeedForward(width=43)) for m in mixers)
    spec = msgspec.structs.replace(tiny("llama_gqa")[0], layers=layers)
    weights = {name: np.ones(shape, np.float32) for name, shape in weight_shapes(spec).items()}
    knobs = Knobs(block_size=4, num_blocks=64)
    slabs = storage_bytes(real_engine(spec, weights, knobs)) / (2 * kv_heads * 8 * 4 * 4 * (6 // share))
    assert slabs == storage_bytes(real_engine(*tiny("llama_gqa"), knobs)) / (2 * 2 * 8 * 4 * 4 * 2)


def test_B04_D02_samples_share_one_copy_of_the_prompt() -> None:
    """n samples hold one prompt copy and diverge by copy-on-write; each equals its own run with the same seed."""
    n, block = 6, 4
    prompt = [3 + i % 20 for i in range(18)]  # 4 full blocks and a half
    kw = {"temperature": 1.0, "seed": 77, "max_tokens": 3}
    core, forward = fake_engine(Knobs(block_size=block, num_blocks=64, prefix_cache="none", budget=64))
    r = request(prompt, n=n, **kw)
    core.add(r)
    collector = Collector()
    collector.take(core.step())
    collector.take(core.step())
    stats = core.kv.stats()
    used = stats.groups[0].used
    assert used == 4 + n, "the four full blocks once, one tail block per sample"
    assert stats.num_cow_copies == n - 1, "the last holder writes in place"
    assert forward.num_tokens == len(prompt) + n
    drain(core, collector)
    assert_idle(core)
    got = collector.requests[r.request_id]
    for i in range(n):
        assert (got.tokens[i], got.reasons[i]) == generate(fake_logits, r, i)


def test_B05_a_repeated_prefix_is_not_computed_again() -> None:
    for prefix_cache in ("hash", "radix"):
        core, forward = fake_engine(Knobs(prefix_cache=prefix_cache, block_size=4, budget=64))
        stem = [3 + i % 20 for i in range(20)]
        first = request([*stem, 7], max_tokens=1)
        run(core, [first])
        before = forward.num_tokens
        second = request([*stem, 9, 9], max_tokens=5)
        got = run(core, [second])[second.request_id]
        assert got.cached == 20
        assert forward.num_tokens - before == 2 + 4
        assert got.tokens[0] == generate(fake_logits, second)[0]


@pytest.mark.parametrize("load", ["multi_turn", "few_shot"])
def test_B06_radix_hit_rate_is_near_the_offline_maximum(load: str) -> None:
    rng = random.Random(21)
    block = 4

    def play(num_blocks: int) -> tuple[float, int]:
        """(hit rate, blocks evicted)"""
        core, _ = fake_engine(Knobs(block_size=block, num_blocks=num_blocks, budget=128, max_num_seqs=4))
        rng.seed(21)
        hits = asked = 0
        if load == "multi_turn":
            histories = [random_prompt(rng, 12) for _ in range(5)]
            for turn in range(5):
                for h in histories:
                    h += random_prompt(rng, 6)
                    got = run(core, [request(h, max_tokens=6)])
                    (c,) = got.values()
                    hits += c.cached
                    asked += len(h)
                    h += c.tokens[0]
                assert turn >= 0
        else:
            examples = random_prompt(rng, 40)
            for _ in range(30):
                p = examples + random_prompt(rng, 8)
                (c,) = run(core, [request(p, max_tokens=4)]).values()
                hits += c.cached
                asked += len(p)
        return hits / asked, core.kv.stats().num_evicted_blocks

    offline, _ = play(2000)
    # Small enough to evict: multi-turn holds four of the five conversations at their longest, few-shot the examples and
    # three requests.
    rate, evicted = play(80 if load == "multi_turn" else 24)
    assert evicted > 5, "the pool is so large that nothing is shown"
    assert rate >= 0.9 * offline
    assert offline > 0.5


def test_C61_no_padded_token_is_ever_computed() -> None:
    core, forward = fake_engine(Knobs(budget=64, num_blocks=256, prefix_cache="none"))
    rng = random.Random(2)
    load = [request(random_prompt(rng, rng.choice([1, 3, 40])), max_tokens=rng.choice([1, 9])) for _ in range(30)]
    run(core, load)
    assert core.stats.num_preemptions == 0
    assert forward.num_tokens == sum(len(r.prompt_token_ids) + r.max_tokens - 1 for r in load)


def test_beams_that_cannot_all_be_in_memory_still_finish() -> None:
    """A pool that holds barely one beam: siblings give up their memory while they wait, and nothing deadlocks."""
    for prefix_cache in ("none", "radix"):
        for num_blocks in (7, 8, 9, 12):
            core, _ = fake_engine(Knobs(block_size=4, num_blocks=num_blocks, budget=8, prefix_cache=prefix_cache))
            r = request([3 + i for i in range(18)], beam_width=4, max_tokens=8)
            got = run(core, [r], limit=3000)[r.request_id]
            assert [b[0] for b in got.beams] == [w[0] for w in beam_search(fake_logits, r)]


def test_two_requests_with_one_id_are_refused_before_anything_runs() -> None:
    core, _ = fake_engine(Knobs())
    core.add(request([5], request_id="same", max_tokens=3))
    with pytest.raises(ValueError, match="already in use"):
        core.add(request([6], request_id="same", max_tokens=3))
    drain(core, Collector())
    core.add(request([6], request_id="same", max_tokens=3))  # free again


def test_a_tainted_block_is_never_reused_by_a_clean_request() -> None:
    """Neither a request that is lossy from its start nor one that became lossy on its way feeds clean ones."""
    stem = [3 + i % 20 for i in range(24)]
    core, _ = fake_engine(Knobs(block_size=4, budget=8))
    run(core, [request(stem, max_tokens=2, taint="selector:x")])
    clean = request(stem, max_tokens=2)
    assert run(core, [clean])[clean.request_id].cached == 0
    again = request(stem, max_tokens=2, taint="selector:x")
    assert run(core, [again])[again.request_id].cached == 20

    core, _ = fake_engine(Knobs(block_size=4, budget=8))
    core.add(request(stem, request_id="late", max_tokens=2))
    core.step()
    core.add(Control(kind="taint", request_id="late"))  # 8 tokens were computed cleanly
    drain(core, Collector())
    clean = request(stem, max_tokens=2)
    assert run(core, [clean])[clean.request_id].cached == 8


def test_namespaces_do_not_share_blocks() -> None:
    stem = [3 + i % 20 for i in range(24)]
    core, _ = fake_engine(Knobs(block_size=4, budget=64))
    run(core, [request(stem, max_tokens=2, namespace=b"tenant-a")])
    for namespace, cached in ((b"tenant-b", 0), (b"", 0), (b"tenant-a", 20)):
        r = request(stem, max_tokens=2, namespace=namespace)
        assert run(core, [r])[r.request_id].cached == cached


def test_nobody_starves_behind_a_stream_of_newcomers() -> None:
    """A large old request finishes although younger, smaller ones keep coming: each waits a bounded time."""
    rng = random.Random(8)
    core, _ = fake_engine(Knobs(num_blocks=16, block_size=4, budget=16, max_num_seqs=4))
    old = request(random_prompt(rng, 40), max_tokens=20, request_id="old")
    collector = Collector()
    for _ in range(3):
        core.add(request(random_prompt(rng, 8), max_tokens=12))
    core.add(old)
    waited = 0
    while "old" not in collector.requests or not collector.requests["old"].reasons:
        core.add(request(random_prompt(rng, 8), max_tokens=12))
        collector.take(core.step())
        waited += 1
        assert waited < 120
    assert collector.requests["old"].tokens[0] == generate(fake_logits, old)[0]
    for request_id in sorted(core.groups):
        core.add(Abort(request_id=request_id))
    drain(core, collector)
    assert_idle(core)
