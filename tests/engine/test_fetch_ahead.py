"""CachedAttention: what those who wait will need is read before they are admitted, and does not leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.page_ops import DISK
from penstock.core.request import Abort, Request
from penstock.core.sequence import Sequence
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from tests.engine.fake_model import spec as fake_spec
from tests.engine.harness import Collector, Knobs, assert_idle, drain, plain_core, real_engine, request, run, tiny
from tests.engine.naive import fake_logits, generate
from tests.engine.timed_disk import Costs, first_token_s, timed

BLOCK_S = 0.004
TEXTS = [[3 + (i * 7 + n * i * i) % 23 for i in range(161)] for n in (1, 2, 3)]
MOST = {"max_num_seqs": 1, "kv_load_policy": "wait"}


def fill(folder: Path) -> None:
    with timed(folder, Costs(0.0)) as (core, _):
        for text in TEXTS:
            first_token_s(core, request(text, max_tokens=1))
        core.step()


def behind(core: EngineCore, texts: list[list[int]], *, before: int = 100) -> list[float]:
    """Seconds from when it could begin to each text's first token, one after the other, behind an answer of `before`
    tokens. All tokens are the naive loop's."""
    asked = [request([5, 6, 7], max_tokens=before), *[request(text, max_tokens=2) for text in texts]]
    collector, began_s, seconds = Collector(), 0.0, list[float]()
    for r in asked:
        core.add(r)
    for r in asked:
        got: Any = None
        while got is None or not got.reasons:
            collector.take(core.step())
            core.kv.stored.ahead.check_invariants()  # type: ignore[union-attr]
            had, got = got is not None and bool(got.tokens.get(0)), collector.requests.get(r.request_id)
            if not had and got is not None and got.tokens.get(0):
                seconds.append(core.clock.now() - began_s)
        began_s = core.clock.now()
        assert got.tokens[0] == generate(fake_logits, r)[0]
    drain(core, collector)
    assert_idle(core)
    return seconds[1:]


def told(core: EngineCore) -> dict[str, Any]:
    return core.executor._runner.storage.outside.tiers[DISK]._ahead  # type: ignore[attr-defined, no-any-return]


def test_B12_who_waits_in_the_queue_finds_its_blocks_in_memory(tmp_path: Path) -> None:
    fill(tmp_path)
    seconds = {}
    for ahead in (0.0, 0.25):
        with timed(tmp_path, Costs(BLOCK_S), kv_fetch_ahead=ahead, **MOST) as (core, forward):
            seconds[ahead] = behind(core, TEXTS, before=200)
            assert forward.num_tokens == 3 + 199 + 3 * (1 + 1), "nothing was computed that could be read"
            assert core.kv.stored.ahead.num_fetched == (120 if ahead else 0)  # type: ignore[union-attr]
            assert core.kv.stored.tiers[0].num_loaded == 120  # type: ignore[union-attr]
            core.step()
            assert told(core) == {}, "nothing stays in memory that nobody waits for"
    assert min(seconds[0.0]) > 40 * BLOCK_S
    assert max(seconds[0.25]) < 0.1 * min(seconds[0.0]), seconds


def test_B12_what_is_read_ahead_is_bounded_and_the_first_in_the_queue_comes_first(tmp_path: Path) -> None:
    fill(tmp_path)
    with timed(tmp_path, Costs(BLOCK_S), **MOST) as (core, _):
        stored = core.kv.stored
        assert stored is not None
        stored.ahead.limit_bytes = 50 * stored.block_bytes
        first, second, third = behind(core, TEXTS)
        assert first < 4 * BLOCK_S
        assert second > 29 * BLOCK_S, "ten of its blocks had room, and nobody waited while the others could be read"
        assert third > 29 * BLOCK_S
        assert max(len(told(core)), stored.ahead.num_fetched) < 120


@pytest.mark.parametrize("ahead", [0.0, 0.25])
def test_B12_what_the_queue_needs_does_not_leave_a_full_folder(tmp_path: Path, ahead: float) -> None:
    """Beyond what has room in memory, too: what will be asked for counts as used."""
    fill(tmp_path)
    with timed(tmp_path, Costs(BLOCK_S), kv_fetch_ahead=ahead, **MOST) as (core, _):
        stored = core.kv.stored
        assert stored is not None
        index = stored.tiers[0].index
        core.step()
        index.limit_bytes, index.evicts = index.num_bytes, True
        oldest = index.oldest_first()[0]
        text = next(t for t in TEXTS if oldest in stored.paths(Sequence(10**6, request(t), 0), 0, 40))
        core.add(request([5 + i % 7 for i in range(80)], max_tokens=80))  # which is written
        core.add(r := request(text, max_tokens=2))
        collector = Collector()
        drain(core, collector)
        assert index.num_evicted >= 19
        assert collector.requests[r.request_id].cached == 160


@pytest.mark.parametrize("host", [False, True])
def test_B12_what_the_queue_needs_does_not_leave_the_device_or_the_host(tmp_path: Path, host: bool) -> None:
    """The prefix cache has room for one of two texts: the older one stays if somebody waits for it."""
    more: dict[str, Any] = {"num_blocks": 125} | (
        {"num_blocks": 70, "host_blocks": 60, "offload": True} if host else {}
    )
    for waits in (False, True):
        place = tmp_path / str(waits)
        with timed(place, Costs(BLOCK_S), **{**MOST, **more}) as (core, _):
            for text in TEXTS[:2]:
                first_token_s(core, request(text, max_tokens=1))
            core.step()
            stored = core.kv.stored
            assert stored is not None
            read = stored.tiers[0].num_loaded
            core.add(request([5 + i % 7 for i in range(160)], max_tokens=60))
            core.step()
            collector, r = Collector(), request(TEXTS[0], max_tokens=2)
            if not waits:
                drain(core, collector)
            core.add(r)
            drain(core, collector)
            got = collector.requests[r.request_id]
            assert got.cached == 160, "what is nowhere else is in files"
            assert got.tokens[0] == generate(fake_logits, r)[0]
            assert (stored.tiers[0].num_loaded == read) == waits, "on the device, or on the host"
            assert_idle(core)


@pytest.mark.parametrize("policy", ["wait", "cake", "auto"])
@pytest.mark.parametrize("lost", [False, True])
def test_what_the_host_has_and_what_files_have_of_one_text_are_joined(tmp_path: Path, policy: str, lost: bool) -> None:
    """A text was given up on the device; the host had room for its beginning only. Files may be gone, too."""
    more: dict[str, Any] = {"num_blocks": 45, "host_blocks": 25, "offload": True, "kv_load_policy": policy}
    with timed(tmp_path, Costs(BLOCK_S / 10), **more) as (core, forward):
        first_token_s(core, request(TEXTS[0], max_tokens=1))
        first_token_s(core, request(TEXTS[1], max_tokens=1))
        core.step()
        if lost:
            for place in tmp_path.glob("*/*/*-24"):
                place.write_bytes(b"")
        before, r = forward.num_tokens, request(TEXTS[0], max_tokens=3)
        _, tokens, cached = first_token_s(core, r)
        assert tokens == generate(fake_logits, r)[0]
        assert core.kv.swaps.num_blocks[1] > 0
        assert core.kv.stored.num_hit_tokens > 0 or policy == "auto"  # type: ignore[union-attr]
        assert forward.num_tokens - before == 161 - cached + 2
        assert cached >= 144 or lost
        assert_idle(core)


def test_B12_who_leaves_the_queue_leaves_nothing_in_memory(tmp_path: Path) -> None:
    fill(tmp_path)
    with timed(tmp_path, Costs(BLOCK_S), **MOST) as (core, _):
        core.add(request([5, 6, 7], max_tokens=30))
        asked = [request(text, max_tokens=2) for text in TEXTS]
        for r in asked:
            core.add(r)
        for _ in range(5):
            core.step()
        assert len(told(core)) == 120
        for r in asked:
            core.add(Abort(request_id=r.request_id))
        core.step()
        assert told(core) == {}
        drain(core, Collector())
        index = core.kv.stored.tiers[0].index  # type: ignore[union-attr]
        assert index._holds == {}
        assert_idle(core)


def test_B12_a_block_that_cannot_be_read_ahead_is_a_miss(tmp_path: Path) -> None:
    fill(tmp_path)
    for place in sorted(tmp_path.glob("*/*/*-a")):
        place.write_bytes(b"")
    with timed(tmp_path, Costs(BLOCK_S), **MOST) as (core, forward):
        behind(core, TEXTS)
        assert core.stats.num_failed_loads == 0, "it was known when they were admitted"
        assert forward.num_tokens == 3 + 99 + 3 * (121 + 1)


def test_B12_what_was_read_ahead_replays_from_the_log(tmp_path: Path) -> None:
    fill(tmp_path)
    with timed(tmp_path, Costs(BLOCK_S), **MOST) as (core, _):
        core.recorder, emitted, stored = Recorder(), [], core.kv.stored
        assert stored is not None
        asked: list[Request] = [request([5, 6, 7], max_tokens=20), *[request(t, max_tokens=2) for t in TEXTS]]
        for r in asked:
            core.add(r)
        while core.has_work:
            emitted += core.step()
        core.recorder.save(tmp_path / "run.log")
        settings, fetched = stored._settings, stored.ahead.num_fetched
    made: list[EngineCore] = []

    def make(*args: Any) -> EngineCore:
        k = Knobs(block_size=4, budget=512, num_blocks=256, kv_offload=f"disk:{tmp_path},1GiB", max_num_seqs=1)
        made.append(plain_core(fake_spec(slots=False), k, *args, store=settings))
        return made[-1]

    assert replay(load(tmp_path / "run.log"), make) == emitted
    assert made[0].kv.stored.ahead.num_fetched == fetched > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("windows", [(), (24, None)])
def test_B12_a_session_that_is_resumed_computes_only_what_is_new(
    tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    """By another process, from real files; its first token comes at least twice as soon."""
    text = [3 + i * 7 % 23 for i in range(400)]
    more: dict[str, Any] = {"kv_load_policy": "wait"}
    with timed(tmp_path, Costs(0.0), windows, **more) as (core, forward):
        _, answer, _ = first_token_s(core, request(text, max_tokens=8))
        core.step()
    resumed, seconds = [*text, *answer, *([5, 9, 4] * 4)], {}
    for place in (tmp_path / "empty", tmp_path):
        with timed(place, Costs(BLOCK_S / 4), windows, **more) as (core, forward):
            r = request(resumed, max_tokens=4)
            seconds[place], tokens, cached = first_token_s(core, r)
            assert tokens == generate(fake_logits, r)[0]
            assert cached == (404 if place == tmp_path else 0), "all whole blocks of what was said, the answer's too"
            assert forward.num_tokens == len(resumed) - cached + 3
    assert seconds[tmp_path] < seconds[tmp_path / "empty"] / 2, seconds


@pytest.mark.parametrize("name", ["llama_gqa", "windowed"])
def test_B12_a_conversation_whose_front_was_cut_says_what_it_would_say_anew(tmp_path: Path, name: str) -> None:
    """The same tokens with something else before them are another text: what is common before the cut is found (a
    system prompt), what follows is computed, whether the whole is on the device or in files."""
    spec, weights = tiny(name)
    system, turns = [1 + i * 5 % 40 for i in range(12)], [1 + i * 7 % 43 for i in range(60)]
    told = [request([*system, *turns[20:], 7, 8, 9], max_tokens=12, request_id=f"{n}") for n in range(3)]
    whole = [
        request([*system, *turns], max_tokens=4),
        request(turns[8:], max_tokens=4),
    ]  # with the same blocks at other places, and at the same
    anew = run(real_engine(spec, weights, Knobs(block_size=4, prefix_cache="none")), told[:1])["0"]
    assert anew.cached == 0
    for n in (1, 2):
        core = real_engine(spec, weights, Knobs(block_size=4, kv_offload=f"disk:{tmp_path / name},1GiB"))
        if n == 1:
            run(core, whole)
        got = run(core, [told[n]])[f"{n}"]
        assert got.tokens == anew.tokens
        if n == 1:
            assert got.cached == 12, "the system prompt"
        else:
            assert got.cached == len(told[n].prompt_token_ids) // 4 * 4, "it was said before, in files"
        outside = core.executor._runner.storage.outside  # type: ignore[attr-defined]
        outside.close()
