"""Rows C84 (Mistral) and G26 (sliding window): the KV bytes of a sequence stay constant, and its tokens are those of
full attention under a mask, whatever the prefix cache has kept, hollowed or given up.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from penstock.core.request import Control
from penstock.engine.core import EngineCore
from penstock.kv.waste import waste
from penstock.kv.window_pool import WindowPool
from tests import specs
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, real_engine, request, run, tiny
from tests.engine.naive import Logits, fake_logits, generate, model_logits
from tests.oracle import NaiveModel

WINDOW = 5
WINDOWED = [name for name in specs.ALL if "windowed" in name]


@cache
def masked(name: str) -> Logits:
    """Full attention over all tokens, every score outside of the window left out: no cache at all."""
    return model_logits(NaiveModel(*tiny(name)))


def windows_of(core: EngineCore) -> list[int]:
    return [g.index for g in core.kv.groups if g.spec.window is not None]


def hollowed(core: EngineCore) -> int:
    return sum(pool.num_hollowed for pool in core.kv.pools if isinstance(pool, WindowPool))


def most(knobs: Knobs) -> int:
    """Blocks that a sequence may hold of a window group: the window, the tokens of the steps in flight, one more."""
    return -(-(WINDOW - 1 + knobs.budget * knobs.depth) // knobs.block_size) + 1


def peaks(core: EngineCore, collector: Collector) -> dict[int, int]:
    """Step to the end; the most slabs of each group that were neither free nor only the cache's."""
    peak = dict.fromkeys(range(len(core.kv.groups)), 0)
    while core.has_work:
        collector.take(core.step())
        for g, stats in enumerate(core.kv.stats().groups):
            peak[g] = max(peak[g], stats.used + stats.quarantined)
    return peak


@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(WINDOW, None), (WINDOW, WINDOW)])
def test_C84_G26_rolling_buffer_bytes_are_constant(
    windows: tuple[int | None, ...], depth: int, prefix_cache: str
) -> None:
    """Forty windows of tokens, served by a pool that is made for one: it never needs more, however long it gets."""
    knobs = Knobs(num_blocks=80, block_size=4, budget=16, depth=depth, prefix_cache=prefix_cache)
    knobs.window_blocks = most(knobs)
    core, _ = fake_engine(knobs, windows=windows)
    r = request([3 + i % 20 for i in range(50)], max_tokens=40 * WINDOW)
    collector = Collector()
    core.add(r)
    peak = peaks(core, collector)
    assert (collector.requests[r.request_id].tokens[0], "length") == generate(fake_logits, r)
    for g in windows_of(core):
        assert 2 <= peak[g] <= most(knobs)
    for g in set(peak) - set(windows_of(core)):
        assert peak[g] >= (50 + 40 * WINDOW - 1) // 4, "full groups keep everything"
    assert core.stats.num_preemptions == 0
    assert_idle(core)


def test_G26_bytes_per_sequence_do_not_depend_on_its_length() -> None:
    """While it decodes, a sequence holds the window's tokens, in whole blocks: two of them, or three at most."""
    held: dict[int, set[int]] = {}
    for length in (20, 100, 400):
        core, _ = fake_engine(Knobs(num_blocks=128, budget=16, prefix_cache="none"), windows=(WINDOW,))
        core.add(request([3] * length, max_tokens=60))
        while core.has_work:
            core.step()
            if core.scheduler.running and core.scheduler.running[0].is_decoding:
                held.setdefault(length, set()).add(core.kv.stats().groups[0].used)
    assert held[20] == held[100] == held[400] == {1, 2}


@pytest.mark.parametrize("budget", [3, 16, 64])
@pytest.mark.parametrize("name", WINDOWED)
def test_G26_equals_masked_full_attention_alone_and_in_company(name: str, budget: int) -> None:
    """Alone, chunked, in a batch, and by all of them again out of a cache that has been hollowed meanwhile."""
    spec, weights = tiny(name)
    rng = random.Random(budget)
    stem = [rng.randrange(3, spec.vocab_size) for _ in range(30)]
    requests = [
        request([*stem[:keep], *(rng.randrange(3, spec.vocab_size) for _ in range(own))], max_tokens=12)
        for keep, own in ((30, 1), (30, 9), (17, 4), (0, 26), (30, 3))
    ]
    want = {r.request_id: generate(masked(name), r)[0] for r in requests}
    knobs = Knobs(block_size=4, num_blocks=90, budget=budget)
    knobs.window_blocks = most(knobs) + 6
    core = real_engine(spec, weights, knobs)
    for batch in (requests[:1], requests[1:], requests, requests[::-1]):
        # The same requests under new names.
        again = [request(r.prompt_token_ids, max_tokens=12) for r in batch]
        got = run(core, again)
        for r, a in zip(batch, again, strict=True):
            assert got[a.request_id].tokens[0] == want[r.request_id]
    assert hollowed(core) > 0, "the pool was large enough to keep everything: nothing was tried"
    assert core.stats.num_prefix_hit_tokens > 0, "nothing of what is left was ever found"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("prefix_cache", ["radix", "hash", "none"])
@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.sampled
def test_G26_equals_masked_full_attention_after_preemption(name: str, prefix_cache: str, mode: str) -> None:
    """Preempted every third step: what comes back, from wherever, is what the window shows."""
    spec, weights = tiny(name)
    knobs = Knobs(block_size=4, budget=9, prefix_cache=prefix_cache, host_blocks=40, preemption=mode)
    knobs.window_blocks = 2 * most(knobs)
    core = real_engine(spec, weights, knobs)
    requests = [request([5 + i + j % 17 for j in range(23)], max_tokens=20) for i in range(2)]
    collector = Collector()
    for r in requests:
        core.add(r)
    steps = 0
    while core.has_work:
        if steps % 3 == 2 and steps < 60:
            core.add(Control(kind="preempt", request_id=requests[steps % 2].request_id))
        collector.take(core.step())
        steps += 1
    assert_idle(core)
    assert core.stats.num_preemptions > 5
    assert (core.stats.num_swaps > 0) == (mode == "swap")
    for r in requests:
        assert collector.requests[r.request_id].tokens[0] == generate(masked(name), r)[0]


@pytest.mark.parametrize("name", WINDOWED)
def test_G26_a_hit_ends_where_the_windows_are_still_there(name: str) -> None:
    """The middle of a prompt was hollowed. Who shares more than that goes on at its end; who shares less, before it."""
    spec, weights = tiny(name)
    knobs = Knobs(block_size=4, num_blocks=60, window_blocks=20, budget=64)
    core = real_engine(spec, weights, knobs)
    rng = random.Random(5)
    text = [rng.randrange(3, spec.vocab_size) for _ in range(60)]
    run(core, [request(text[:13], max_tokens=1)])  # 3 blocks
    run(core, [request(text, max_tokens=1)])
    run(core, [request(text[:13], max_tokens=1)])  # block 2 was used last
    (pool,) = (pool for pool in core.kv.pools if isinstance(pool, WindowPool))
    pool.make_room(8)
    for shared, hit in ((60, 56), (33, 12), (11, 0)):
        r = request([*text[:shared], 5, 6][: 60 if shared == 60 else None], max_tokens=6)
        got = run(core, [r])[r.request_id]
        assert got.cached == hit
        assert got.tokens[0] == generate(masked(name), r)[0]


def test_G26_the_cache_gives_up_windows_before_anybody_is_preempted() -> None:
    knobs = Knobs(block_size=4, num_blocks=400, budget=16, max_num_seqs=2)
    knobs.window_blocks = 2 * most(knobs) + 1
    core, _ = fake_engine(knobs, windows=(WINDOW, None))
    rng = random.Random(1)
    requests = [request([rng.randrange(3, VOCAB) for _ in range(40)], max_tokens=30) for _ in range(12)]
    got = run(core, requests)
    for r in requests:
        assert got[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert hollowed(core) > 100
    assert core.stats.num_preemptions == 0
    assert core.kv.stats().num_evicted_blocks == 0, "full groups had room: nothing of theirs was forgotten"


def test_G26_a_dialogue_goes_on_where_it_ended() -> None:
    """The end of the last turn is what the cache keeps longest, so a next turn is a hit, whole, and costs one chunk."""
    knobs = Knobs(block_size=4, num_blocks=128, budget=64, max_num_seqs=1)
    knobs.window_blocks = most(knobs)
    core, forward = fake_engine(knobs, windows=(WINDOW, None))
    said = [3 + i % 25 for i in range(30)]
    for turn in range(5):
        before = forward.num_tokens
        r = request(said, max_tokens=10)
        got = run(core, [r])[r.request_id]
        assert got.tokens[0] == generate(fake_logits, r)[0]
        if turn:
            assert got.cached >= len(said) - 3 - 8
            assert forward.num_tokens - before <= 3 + 8 + 10
        said = [*said, *got.tokens[0], 4, 5, 6]
    drain(core, Collector())


@pytest.mark.parametrize("windows", [(WINDOW,), (WINDOW, None)])
def test_the_wastes_of_a_window_add_up(windows: tuple[int | None, ...]) -> None:
    """Slots before the window are not unfilled: they are gone."""
    knobs = Knobs(block_size=4, num_blocks=64, budget=16, depth=2)
    core, _ = fake_engine(knobs, windows=windows)
    for i in range(3):
        core.add(request([5 + i] * 30, max_tokens=25))
    while core.has_work:
        core.step()
        parts = waste(core.kv, core.scheduler.running)
        assert parts.total == 4 * 64
        assert min(parts) >= 0
        assert parts.reserved + parts.internal <= 3 * len(core.scheduler.running), "but for last blocks"


def test_samples_and_beams_share_what_the_window_shows() -> None:
    knobs = Knobs(block_size=4, num_blocks=64, budget=16, window_blocks=24)
    core, _ = fake_engine(knobs, windows=(WINDOW,), slots=True)
    sampled = request([5] * 30, n=4, temperature=1.0, seed=3, max_tokens=25)
    collector = Collector()
    core.add(sampled)
    core.add(request([6] * 22, beam_width=3, max_tokens=12))
    peak = peaks(core, collector)
    for index in range(4):
        assert (collector.requests[sampled.request_id].tokens[index], "length") == generate(fake_logits, sampled, index)
    assert peak[windows_of(core)[0]] <= 24
    assert_idle(core)


def test_blocks_that_slide_away_are_no_reason_to_wait_for_others() -> None:
    """Two steps in flight, full blocks short: the older sequence preempts the younger one instead of standing still
    while the younger one slides at every step and so always has a window block on its way back."""
    knobs = Knobs(block_size=4, num_blocks=24, budget=16, depth=2, max_num_seqs=2, prefix_cache="none")
    core, _ = fake_engine(knobs, windows=(WINDOW, None))
    collector = Collector()
    old, young = request([3] * 20, max_tokens=60), request([4] * 20, max_tokens=60)
    core.add(old)
    while old.request_id not in collector.requests:
        collector.take(core.step())
    core.add(young)
    still = longest = before = 0
    while core.has_work:
        collector.take(core.step())
        seen = collector.requests[old.request_id]
        if seen.reasons:
            break
        now = len(seen.tokens.get(0, []))
        still = 0 if now > before else still + 1
        longest, before = max(longest, still), now
    assert core.stats.num_preemptions > 0
    assert longest <= 6, f"the older sequence stood still for {longest} steps"
    drain(core, collector)
