"""Hints change what is kept, never a token: retain, pin, demote, prefetch, and tenants' shares of what is kept."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.core.events import StoreNews
from penstock.core.kv_hints import KVHint
from penstock.core.request import Control
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.kv.prefix.node import PLAIN, RETAINED
from penstock.kv.tier_facts import tiers_of
from penstock.launch.kv_store import FolderPin, write_pins
from penstock.runner.block_files import BlockFiles
from tests.engine.harness import (
    Collector,
    Knobs,
    assert_idle,
    disturbed,
    drain,
    fake_engine,
    plain_core,
    real_engine,
    request,
    run,
    tiny,
)
from tests.engine.naive import fake_logits, generate
from tests.engine.test_kv_store import ended, kept, knobs, written
from tests.engine.test_laws_models import CONTROLS, check, draw_knobs, workload


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s


def text(n: int, length: int = 40) -> list[int]:
    return [3 + (i * 7 + n * 5 + i * i * n) % 23 for i in range(length)]


def engine(**more: Any) -> tuple[EngineCore, Hand]:
    core, _ = fake_engine(Knobs(**({"num_blocks": 32, "budget": 64} | more)))
    clock = Hand()
    core.clock = clock  # type: ignore[assignment]
    return core, clock


def cached(core: EngineCore, prompt: list[int], **more: Any) -> int:
    """Tokens of `prompt` that were there; it answers with one token, which is the naive loop's."""
    r = request(prompt, max_tokens=1, **more)
    core.add(r)
    collector = Collector()
    drain(core, collector)
    assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    return collector.requests[r.request_id].cached


def flood(core: EngineCore, num: int = 8, *, first: int = 50, **more: Any) -> None:
    for n in range(num):
        cached(core, text(first + n), **more)


RETAIN, PIN = KVHint("retain", 60.0), KVHint("pin", 60.0)


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_retained_blocks_leave_after_the_others_until_their_time_is_over(cache: str) -> None:
    core, clock = engine(prefix_cache=cache)
    cached(core, text(1), hints=[RETAIN])
    cached(core, text(2))
    flood(core)
    assert cached(core, text(1)) == 36, "retained, though used longer ago than what was evicted"
    assert cached(core, text(2)) == 0
    clock.now_s += 61
    flood(core)
    assert cached(core, text(1)) == 0, "its time was over"
    assert_idle(core)


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_only_the_named_tokens_are_retained(cache: str) -> None:
    core, _ = engine(prefix_cache=cache)
    cached(core, text(1), hints=[KVHint("retain", 60.0, 19)])
    flood(core)
    assert cached(core, text(1)) == 16, "whole blocks within the first 19 tokens"


def test_what_follows_a_retained_beginning_is_not_retained() -> None:
    core, _ = engine()
    cached(core, text(1, 20), hints=[RETAIN])
    cached(core, text(1, 60))
    flood(core)
    assert cached(core, text(1, 60)) == 20


def test_retained_blocks_go_when_nothing_else_can() -> None:
    core, _ = engine(num_blocks=12)
    cached(core, text(1), hints=[RETAIN])
    assert cached(core, text(2)) == 0
    assert cached(core, text(1)) < 36, "a retained block is no reason to wait"


def pinning(core: EngineCore, blocks: int) -> None:
    core.kv.hints._pin_share = blocks / core.kv.pools[0].num_slabs


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_pinned_blocks_stay_whatever_comes_and_go_after_their_time(cache: str) -> None:
    core, clock = engine(prefix_cache=cache)
    pinning(core, 10)
    cached(core, text(1), hints=[PIN])
    assert core.kv.hints.num_pinned == 10
    requests = [request(text(50 + n, 20), max_tokens=40) for n in range(6)]
    collector = Collector()
    for r in requests:
        core.add(r)
    drain(core, collector)
    assert core.stats.num_preemptions, "there was not enough memory for all"
    assert cached(core, text(1)) == 36
    clock.now_s += 61
    flood(core)
    assert cached(core, text(1)) == 0
    assert core.kv.hints.num_pinned == 0
    assert_idle(core)


def test_pins_have_a_bound_and_a_tenant_has_its_part_of_it() -> None:
    core, _ = engine()
    pinning(core, 20)
    cached(core, text(1), hints=[PIN], tenant="a", kv_share=0.5, namespace=b"a")
    cached(core, text(1, 44), hints=[PIN], tenant="a", kv_share=0.5, namespace=b"a")
    assert core.kv.hints.num_pinned == 10, "an eleventh would be more than half of 20"
    assert core.kv.hints.counts["refused_pin"] == 1
    cached(core, text(1), hints=[PIN], tenant="b", kv_share=0.5, namespace=b"b")
    assert core.kv.hints.num_pinned == 20
    cached(core, text(1, 4), hints=[PIN], namespace=b"c", tenant="c")
    assert core.kv.hints.num_pinned == 20
    core.add(Control(kind="reset_prefix_cache"))
    cached(core, text(9))
    assert core.kv.hints.num_pinned == 0
    assert_idle(core)


def test_a_longer_pin_of_a_conversation_takes_the_place_of_the_shorter_one() -> None:
    core, clock = engine()
    pinning(core, 16)
    for length in (20, 40, 60):
        clock.now_s += 1
        cached(core, text(1, length), hints=[PIN])
    assert (core.kv.hints.num_pinned, len(core.kv.hints.pins)) == (15, 1)


def test_pins_give_way_before_nobody_can_run() -> None:
    core, _ = engine(num_blocks=16)
    pinning(core, 14)
    cached(core, text(1), hints=[PIN])
    assert cached(core, text(2, 56)) == 0, "needs 15 of 16 blocks, and gets them"
    assert core.kv.hints.counts["gave_way"] == 1
    assert core.kv.hints.num_pinned == 0
    assert_idle(core)


def test_demoted_blocks_go_first() -> None:
    core, _ = engine(num_blocks=32)
    for n in range(3):
        cached(core, text(n), hints=[KVHint("demote", 0.0, 12)] if n == 2 else [])
    cached(core, text(7))
    assert cached(core, text(0)) == 36, "used longest ago, but not demoted"
    assert 12 <= cached(core, text(2)) < 36, "what stands before the demoted part stays"


def test_who_finds_a_demoted_block_keeps_it_as_any_other() -> None:
    core, _ = engine(num_blocks=36)
    cached(core, text(1), hints=[KVHint("demote", 0.0, 0)])
    cached(core, text(2))
    assert cached(core, text(1)) == 36
    cached(core, text(3))
    cached(core, text(4))
    assert cached(core, text(1)) == 36, "of two that nobody demotes any more the other was used longer ago"


def test_both_parts_of_a_retained_run_that_is_split_are_retained_and_expire() -> None:
    core, clock = engine()
    cached(core, text(1), hints=[RETAIN])
    cached(core, text(1)[:20] + text(9)[:12])
    tree: Any = core.kv.cache
    (root,) = tree._roots.values()
    upper = next(node for node in root.children.values() if node.end == 5)
    assert sorted(child.rank for child in upper.children.values()) == [PLAIN, RETAINED]
    assert upper.rank == RETAINED
    clock.now_s += 61
    cached(core, text(2))
    assert {node.rank for node in tree._nodes()} == {PLAIN}


def test_demoted_blocks_go_down_a_tier_now_and_come_back() -> None:
    core, _ = engine(host_blocks=32, offload=True)
    cached(core, text(1), hints=[KVHint("demote", 0.0, 0)])
    cached(core, text(2, 8))
    assert core.kv.swaps.num_blocks[0] == 10, "there was room, and they went all the same"
    assert cached(core, text(1)) == 36
    assert core.kv.swaps.num_blocks[1] == 9
    assert_idle(core)


def prefetched(core: EngineCore, prompt: list[int], **more: Any) -> int:
    r = request(prompt, max_tokens=4, hints=[KVHint("prefetch")], **more)
    found: list[Any] = []
    core.add(r)
    while core.has_work:
        found += [out for out in core.step() if out.request_id == r.request_id]
    assert [(out.token_ids, out.finish_reason) for out in found] == [([], "stop")]
    return int(found[0].num_cached_tokens)


@pytest.mark.parametrize("policy", ["wait", "cake", "split", "auto"])
def test_prefetch_loads_from_the_store_and_makes_no_token(policy: str, tmp_path: Path) -> None:
    core, _ = fake_engine(knobs(tmp_path, kv_load_policy=policy))
    run(core, [request(text(1), max_tokens=1)])
    ended(core)
    core, forward = fake_engine(knobs(tmp_path, kv_load_policy=policy))
    core.kv.stored.rates.forced = 0.5 if policy in ("split", "auto") else None  # type: ignore[union-attr]
    assert prefetched(core, text(1)) == 36
    assert prefetched(core, text(2)) == 0, "nothing is there, and nothing is computed"
    assert forward.num_tokens == 0
    read = core.kv.stored.tiers[0].num_loaded  # type: ignore[union-attr]
    assert cached(core, text(1)) == 36
    assert core.kv.stored.tiers[0].num_loaded == read == 9  # type: ignore[union-attr]
    assert_idle(core)


def test_prefetch_loads_from_the_host() -> None:
    core, _ = engine(host_blocks=32, offload=True)
    cached(core, text(1), hints=[KVHint("demote", 0.0, 0)])
    cached(core, text(2, 8))
    assert prefetched(core, text(1)) == 36
    assert core.kv.swaps.num_blocks[1] == 9
    assert cached(core, text(1)) == 36
    assert core.kv.swaps.num_blocks[1] == 9, "once"
    assert_idle(core)


@pytest.mark.parametrize("policy", ["wait", "cake"])
def test_a_prefetch_waits_for_slow_reads_while_others_run(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = fake_engine(knobs(tmp_path, kv_load_policy=policy))
    run(core, [request(text(1), max_tokens=1)])
    ended(core)
    read = BlockFiles._read

    def slow(self: BlockFiles, path: str, into: bytearray) -> bool:
        time.sleep(0.02)
        return read(self, path, into)

    monkeypatch.setattr(BlockFiles, "_read", slow)
    core, _ = fake_engine(knobs(tmp_path, kv_load_policy=policy))
    core.add(request(text(2, 8), max_tokens=200, request_id="other"))
    core.step()
    r = request(text(1), hints=[KVHint("prefetch")])
    core.add(r)
    found: list[Any] = []
    steps = 0
    while not found:
        found = [out for out in core.step() if out.request_id == r.request_id]
        steps += 1
    assert (found[0].num_cached_tokens, found[0].finish_reason) == (36, "stop")
    assert steps > 5, "others ran meanwhile"
    drain(core, Collector())
    assert cached(core, text(1)) == 36
    assert_idle(core)


def test_prefetches_in_company_end_though_loads_fail(tmp_path: Path) -> None:
    core, _ = fake_engine(knobs(tmp_path))
    run(core, [request(text(n), max_tokens=1) for n in range(4)])
    ended(core)
    for path in sorted(tmp_path.glob("*/*/*"))[::3]:
        path.write_bytes(b"x")
    core, _ = fake_engine(knobs(tmp_path, num_blocks=24))
    real = [request(text(n), max_tokens=5) for n in range(4)]
    fetches = [request(text(n % 4), max_tokens=5, hints=[KVHint("prefetch")]) for n in range(8)]
    found = run(core, [x for pair in zip(fetches[:4], real, fetches[4:], strict=True) for x in pair])
    for r in real:
        assert found[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert all(found[r.request_id].reasons == {0: "stop"} for r in fetches)


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_a_flood_of_one_tenant_leaves_the_others_share(cache: str) -> None:
    """With real evictions: without shares the same flood takes everything."""
    for shares, left in ((True, 36), (False, 0)):
        core, _ = engine(prefix_cache=cache)
        a = {"tenant": "a", "namespace": b"a", "kv_share": 0.5 * shares}
        b = {"tenant": "b", "namespace": b"b", "kv_share": 0.5 * shares}
        cached(core, text(1), **a)
        flood(core, 12, **b)
        assert core.kv.stats().num_evicted_blocks > 50
        assert cached(core, text(1), **a) == left
        assert_idle(core)


def test_what_a_tenant_does_not_use_others_have() -> None:
    core, _ = engine()
    b = {"tenant": "b", "namespace": b"b", "kv_share": 0.1}
    cached(core, text(0, 8), tenant="a", namespace=b"a", kv_share=0.9)
    for n in range(3):
        cached(core, text(n, 36), **b)
    assert [cached(core, text(n, 36), **b) for n in range(3)] == [32, 32, 32]


def test_retaining_does_not_reach_into_the_share_of_others() -> None:
    core, _ = engine()
    b = {"tenant": "b", "namespace": b"b", "kv_share": 0.5}
    cached(core, text(1), tenant="a", namespace=b"a", kv_share=0.5)
    flood(core, 12, hints=[RETAIN], **b)
    assert cached(core, text(1), tenant="a", namespace=b"a", kv_share=0.5) == 36


def test_a_flood_leaves_the_others_share_of_the_host() -> None:
    for shares, left in ((True, 36), (False, 0)):
        core, _ = engine(num_blocks=12, host_blocks=24, offload=True)
        a = {"tenant": "a", "namespace": b"a", "kv_share": 0.5 * shares}
        b = {"tenant": "b", "namespace": b"b", "kv_share": 0.5 * shares}
        cached(core, text(1), **a)
        flood(core, 12, **b)
        assert cached(core, text(1), **a) == left
        assert_idle(core)


def hinted(rng: random.Random, requests: list[Any]) -> list[Any]:
    """The same requests with hints and shares drawn, and prefetches of their prompts among them."""
    import msgspec

    out = []
    for n, r in enumerate(requests):
        hints = [
            KVHint(rng.choice(["retain", "pin", "demote"]), rng.choice([0.001, 0.05, 60.0]), rng.choice([-1, 3, 9, 20]))
            for _ in range(rng.randrange(3))
        ]
        hints = [h if h.action != "demote" or h.num_tokens >= 0 else KVHint("demote", 0.0, 0) for h in hints]
        out.append(msgspec.structs.replace(r, hints=hints, tenant=f"t{n % 3}", kv_share=rng.choice([0.0, 0.2, 0.5])))
        if rng.random() < 0.4 and r.beam is None and not r.pooling:
            prefetch = request(r.prompt_token_ids, request_id=f"prefetch{n}", hints=[KVHint("prefetch")])
            out.append(prefetch)
    return out


@pytest.mark.parametrize("name", ["llama_gqa", "windowed", "slots"])
def test_the_laws_hold_with_hints_drawn(name: str, tmp_path: Path) -> None:
    """Tokens are the naive loop's, with a host tier, a store, preemption, resets and pins that are short of memory."""
    spec, weights = tiny(name)
    rng = random.Random(f"hints-{name}")
    done: set[str] = set()
    for draw in range(6):
        k = draw_knobs(rng)
        k.num_blocks = max(rng.choice([32, 48, 128]), 64 // k.block_size + 1)  # every request fits
        k.window_blocks = min(k.window_blocks, k.num_blocks)
        k.prefix_cache = rng.choice(["radix", "hash"])
        k.offload = k.host_blocks > 0 and name == "llama_gqa"
        if draw % 2:
            k.block_size, k.kv_offload = 4, f"disk:{tmp_path}"
            k.kv_load_policy = rng.choice(["wait", "cake"])
        core = real_engine(spec, weights, k)
        core.kv.hints._pin_share = rng.choice([0.2, 0.9])
        collector = disturbed(core, hinted(rng, workload(spec.vocab_size)), rng, CONTROLS, note=f"{name} {draw}: {k}")
        check(name, collector)
        done |= {action for action, n in core.kv.hints.counts.items() if n}
        if draw % 2:
            ended(core)
    assert {"retain", "pin", "demote"} <= done


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_with_hints_replays_from_its_log(depth: int, tmp_path: Path) -> None:
    spec, weights = tiny("llama_gqa")
    k = Knobs(num_blocks=40, budget=16, depth=depth, host_blocks=16, offload=True)
    core = real_engine(spec, weights, k)
    recorder = core.recorder = Recorder()
    rng = random.Random(5)
    emitted: list[Any] = []
    todo = hinted(rng, workload(spec.vocab_size))
    while todo or core.has_work:
        while todo and rng.random() < 0.3:
            core.add(todo.pop())
        emitted += core.step()
    assert core.kv.hints.counts["retain"]
    recorder.save(tmp_path / "run.log")
    again = replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, k, e, c), depth=depth)
    assert again == emitted


def test_a_flood_leaves_the_others_share_of_the_store(tmp_path: Path) -> None:
    """Files really go; the second engine reads what is left."""
    for shares, left in ((True, 36), (False, 0)):
        place = tmp_path / str(shares)
        a = {"tenant": "a", "namespace": b"a", "kv_share": 0.5 * shares}
        b = {"tenant": "b", "namespace": b"b", "kv_share": 0.5 * shares}
        core, _ = fake_engine(knobs(place))
        store = core.kv.stored
        assert store is not None
        store.tiers[0].index.limit_bytes = 24 * store.block_bytes
        cached(core, text(1), **a)
        for n in range(12):
            written(core)  # what is on its way cannot leave
            cached(core, text(50 + n), **b)
        assert store.tiers[0].index.num_evicted > 50
        store.tiers[0].index.check_invariants()
        ended(core)
        core, _ = fake_engine(knobs(place))
        assert cached(core, text(1), **a) == left
        ended(core)


def test_pins_of_a_folder_leave_it_last_and_are_in_the_log(tmp_path: Path) -> None:
    core, _ = fake_engine(knobs(tmp_path))
    cached(core, text(1), tenant="a", namespace=b"a")
    ended(core)
    (space,) = [path for path in tmp_path.glob("*/*") if path.is_dir()]
    mine = f"{space.parent.name}/{space.name}/"
    write_pins(tmp_path, [FolderPin(mine, time.time() + 3600), FolderPin("else/", 0.0)])
    core, _ = fake_engine(knobs(tmp_path))
    recorder = core.recorder = Recorder()
    store = core.kv.stored
    assert store is not None
    store.tiers[0].index.limit_bytes = 24 * store.block_bytes
    for n in range(12):
        written(core)
        store.tiers[0].index.evicts = True  # the first engine of this process has the lock
        cached(core, text(50 + n), tenant="b", namespace=b"b")
    assert store.tiers[0].index.num_evicted > 50
    assert cached(core, text(1), tenant="a", namespace=b"a") == 36
    told = [item.pins for i in recorder.iterations for item in i.intake if isinstance(item, StoreNews) and item.pins]
    assert told == [[mine]], "the pin whose time is over is not told"
    ended(core)


def crowded(place: Path, *, pin_share: float = 0.5) -> tuple[EngineCore, Hand]:
    """An engine over a folder with room for 24 blocks."""
    core, _ = fake_engine(knobs(place))
    core.kv.hints._pin_share = pin_share
    clock = Hand()
    core.clock = clock  # type: ignore[assignment]
    store = core.kv.stored
    assert store is not None
    store.tiers[0].index.limit_bytes, store.tiers[0].index.evicts = 24 * store.block_bytes, True
    return core, clock


def flood_folder(core: EngineCore) -> None:
    store = core.kv.stored
    assert store is not None
    before = store.tiers[0].index.num_evicted
    for n in range(8):
        written(core)  # what is on its way cannot leave
        store.tiers[0].index.evicts = True  # the first engine of this process has the lock
        cached(core, text(50 + n))
    written(core)
    assert store.tiers[0].index.num_evicted > before + 40
    store.tiers[0].index.check_invariants()
    core.add(Control(kind="reset_prefix_cache", request_id=""))


def test_what_is_retained_stays_in_a_folder_until_its_time_is_over(tmp_path: Path) -> None:
    """Its files too, whoever reads them, and after a restart: their time of last use lies ahead."""
    core, clock = crowded(tmp_path)
    cached(core, text(1), hints=[KVHint("retain", 600.0, 19)])
    cached(core, text(2))
    flood_folder(core)
    assert cached(core, text(1)) == 16, "the blocks that were named, and they alone"
    flood_folder(core)
    ended(core)
    ahead = [path for path in kept(tmp_path) if path.stat().st_mtime > time.time() + 500]
    assert sorted(path.name.rpartition("-")[2] for path in ahead) == ["0", "1", "2", "3"]
    core, clock = crowded(tmp_path)
    core.recorder = Recorder()
    flood_folder(core)
    assert cached(core, text(1)) == 16, "an engine that begins anew has read until when"
    (news,) = [n for i in core.recorder.iterations for n in i.intake if isinstance(n, StoreNews) and n.kept]
    assert len(news.kept) == 4, "and its log has it"
    assert all(500 < seconds <= 600 for _, seconds in news.kept)
    clock.now_s += 601
    flood_folder(core)
    assert cached(core, text(1)) == 0, "its time was over"
    ended(core)


def test_what_is_retained_in_a_folder_has_a_bound(tmp_path: Path) -> None:
    for share, left in ((0.0, 0), (0.25, 24), (0.5, 36)):
        core, _ = crowded(tmp_path / str(share), pin_share=share)
        cached(core, text(1), hints=[RETAIN])
        assert core.kv.stored.tiers[0].index.num_kept == min(10, 24 * share)  # type: ignore[union-attr]
        flood_folder(core)
        assert cached(core, text(1)) == left, "its beginning, as far as there is room"
        ended(core)


def test_what_is_demoted_leaves_a_folder_first(tmp_path: Path) -> None:
    core, _ = crowded(tmp_path)
    cached(core, text(1))
    written(core)
    cached(core, text(2), hints=[KVHint("demote", 0.0, 8)])
    written(core)
    cached(core, text(3, 25))
    written(core)
    index = core.kv.stored.tiers[0].index  # type: ignore[union-attr]
    assert index.num_evicted == 2
    core.add(Control(kind="reset_prefix_cache", request_id=""))
    assert cached(core, text(1)) == 36, "older, and there"
    core.add(Control(kind="reset_prefix_cache", request_id=""))
    assert cached(core, text(2)) == 32, "the end of it went, from its end on"
    ended(core)


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_an_order_evicts_a_tenants_idle_blocks_of_an_age(cache: str) -> None:
    core, clock = engine(prefix_cache=cache, num_blocks=24, host_blocks=32, offload=True)
    cached(core, text(1), tenant="a", namespace=b"a", hints=[RETAIN])
    cached(core, text(2), tenant="b", namespace=b"b")
    clock.now_s += 50
    cached(core, text(3), tenant="a", namespace=b"a")
    core.add(Control(kind="evict_prefix_cache", label="a", age_s=40.0))
    cached(core, text(4, 8))
    a = {"tenant": "a", "namespace": b"a"}
    assert cached(core, text(1), **a) == 0, "though it was retained"
    assert (cached(core, text(3), **a), cached(core, text(2), tenant="b", namespace=b"b")) == (36, 36)
    core.add(Control(kind="evict_prefix_cache"))
    assert [cached(core, text(3), **a), cached(core, text(2), tenant="b", namespace=b"b")] == [0, 0]
    assert_idle(core)


def test_misses_by_reason_add_up_to_what_was_computed() -> None:
    core, clock = engine()
    cached(core, text(1))  # 40 tokens: 36 new, 4 in the tail
    clock.now_s += 5
    cached(core, text(1))
    flood(core, 9)
    cached(core, text(1))
    tree: Any = core.kv.cache
    misses = tree.insight.misses
    assert misses == {"new": 36 * 10, "evicted": 36, "tail": 4 * 12, "not_read": 0, "lossy": 0}
    flood(core, 9)
    cached(core, text(1), namespace=b"b")
    assert misses["evicted"] == 36 + 36 * 9, "what left another namespace was never here for this one"
    assert tree.insight.found.counts[1] == 9, "nine blocks were found after five seconds"
    assert tree.insight.found.sum_s == 45
    assert sum(tree.insight.left.counts) == core.kv.stats().num_evicted_blocks
    cached(core, text(1), num_prompt_logprobs=1)
    assert misses["not_read"] == 40
    (device,) = tiers_of(core.kv)
    assert (device.name, device.limit_blocks, device.hit_tokens) == ("device", 32, 36)
