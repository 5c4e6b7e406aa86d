"""Who is read and who is computed, by measured costs: never slower than either alone, the same tokens, replayed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.core.page_ops import DISK
from penstock.core.request import Control
from penstock.core.sequence import Sequence
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.kv.stored import StoredBlocks
from tests.engine.fake_model import spec as fake_spec
from tests.engine.harness import Knobs, assert_idle, plain_core, request, run
from tests.engine.naive import fake_logits, generate
from tests.engine.timed_disk import Costs, first_token_s, timed

TEXT = [3 + i * 7 % 23 for i in range(401)]
NUM_BLOCKS = 100
BLOCK_S = 0.0042
"""What computing a block takes, in the middle of the text."""
LINKS = [0.02, 0.1, 0.3, 0.7, 1.0, 1.6, 4.0, 20.0]
"""Seconds that a block takes on the link, in units of that."""
PARTS = [n / 20 for n in range(21)]


def store_of(core: EngineCore) -> StoredBlocks:
    assert core.kv.stored is not None
    return core.kv.stored


def fill(folder: Path, windows: tuple[int | None, ...] = ()) -> None:
    with timed(folder, Costs(0.0), windows) as (core, _):
        first_token_s(core, request(TEXT, max_tokens=1))
        core.step()


def take(core: EngineCore, *, policy: str = "auto", forced: float | None = None) -> tuple[float, str]:
    """Seconds to the first token of the text, and what was chosen. The tokens are the naive loop's."""
    stored = store_of(core)
    stored._settings, stored.rates.forced = stored._settings._replace(load=policy), forced
    core.kv.reset_prefix_cache()
    before = dict(stored.choices)
    r = request(TEXT, max_tokens=3)
    seconds, tokens, _ = first_token_s(core, r)
    assert tokens == generate(fake_logits, r)[0]
    (kind,) = [kind for kind, num in stored.choices.items() if num > before[kind]]
    return seconds, kind


def learn(core: EngineCore) -> None:
    """Both costs are measured: a text is computed, and one is read."""
    first_token_s(core, request([5 + i % 7 for i in range(64)], max_tokens=1))
    take(core, policy="wait")


@pytest.mark.parametrize("late_s", [0.0, 0.05])
def test_B27_no_slower_than_computing_or_loading_alone_at_any_speed(tmp_path: Path, late_s: float) -> None:
    fill(tmp_path)
    chosen = []
    for link in LINKS:
        with timed(tmp_path, Costs(link * BLOCK_S, late_s)) as (core, _):
            learn(core)
            loaded, _ = take(core, policy="wait")
            none_s, kind = take(core, policy="split", forced=1.0)
            assert kind == "none"
            auto_s, kind = take(core, policy="auto")
            chosen.append(kind)
            assert auto_s <= 1.001 * min(none_s, loaded), (link, kind, auto_s, none_s, loaded)
            cake_s, kind = take(core, policy="cake")
            assert kind == "cake"
            assert cake_s <= 1.001 * min(none_s, loaded), (link, cake_s, none_s, loaded)
            assert_idle(core)
    assert chosen[0] == "wait", chosen
    assert "split" in chosen, chosen
    assert chosen[-1] in ("none", "split"), chosen


@pytest.mark.parametrize("windows", [(16, None), (16, 24)])
def test_auto_is_no_slower_than_either_end_with_windows(tmp_path: Path, windows: tuple[int | None, ...]) -> None:
    """It reads all of what is seen from the text's end, or nothing. Of windows alone that is little."""
    fill(tmp_path, windows)
    kinds = []
    for link in (0.1, 4.0, 20.0):
        with timed(tmp_path, Costs(link * BLOCK_S), windows) as (core, _):
            learn(core)
            loaded, _ = take(core, policy="wait")
            none_s, kind = take(core, policy="auto", forced=1.0)
            assert kind == "none"
            auto_s, kind = take(core, policy="auto")
            kinds.append(kind)
            assert auto_s <= 1.001 * min(loaded, none_s), (link, kinds, auto_s, loaded, none_s)
            assert_idle(core)
    assert kinds[0] == "wait", kinds
    assert kinds[1:] == (["none", "none"] if None in windows else ["wait", "none"]), kinds


@pytest.mark.parametrize("link", [0.3, 0.7, 1.0, 1.6])
def test_B28_the_chosen_split_beats_both_ends_and_is_near_the_best(tmp_path: Path, link: float) -> None:
    fill(tmp_path)
    with timed(tmp_path, Costs(link * BLOCK_S)) as (core, _):
        learn(core)
        sweep = [take(core, policy="split", forced=part)[0] for part in PARTS]
        split_s, kind = take(core, policy="split")
        assert kind == "split"
        assert split_s < min(sweep[0], sweep[-1])
        assert split_s <= 1.1 * min(sweep), (split_s, sweep)


@pytest.mark.parametrize("policy", ["auto", "cake"])
def test_a_link_that_becomes_slow_is_not_waited_for(tmp_path: Path, policy: str) -> None:
    """What was measured is wrong by a thousand times: the rest is computed."""
    fill(tmp_path)
    costs = Costs(0.5 * BLOCK_S)
    with timed(tmp_path, costs) as (core, forward):
        learn(core)
        costs.block_s = 500 * BLOCK_S
        before = forward.num_tokens
        seconds, kind = take(core, policy=policy)
        assert kind == {"auto": "split", "cake": "cake"}[policy]
        assert forward.num_tokens - before >= len(TEXT) - 4
        costs.block_s = 0.0
        none_s, _ = take(core, policy="split", forced=1.0)
        assert seconds < 2.5 * none_s
        assert_idle(core)


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_failed_load_had_claimed_counts_nowhere(tmp_path: Path, shared: bool) -> None:
    """Not in the usage of the request, nor of who shared its load, nor in the counters, nor in a tenant's favour."""
    text = [3 + i * 7 % 23 for i in range(50)]
    with timed(tmp_path, Costs(0.0)) as (core, _):
        first_token_s(core, request(text, max_tokens=1))
    next(tmp_path.glob("*/*/*-3")).write_bytes(b"")
    with timed(tmp_path, Costs(0.01), policy="fair") as (core, forward):
        asked = [request(text, max_tokens=1) for _ in range(1 + shared)]
        found = run(core, asked)
    cached = [found[r.request_id].cached for r in asked]
    computed = len(text) * len(asked) - sum(cached)
    assert core.stats.num_failed_loads == len(asked)
    assert forward.num_tokens == computed, f"usage says {cached}"
    assert cached[0] == 12, "three blocks before the one that was lost"
    stored = core.kv.stored
    assert stored is not None
    assert core.stats.num_prefix_hit_tokens == sum(cached)
    assert core.stats.num_prefix_queries_tokens == len(text) * len(asked)
    assert stored.num_hit_tokens == sum(cached) - core.kv.stats().num_prefix_hit_tokens
    assert sum(core.kv.cache.insight.misses.values()) == computed  # type: ignore[attr-defined]
    policy: Any = core.scheduler.policy
    policy._charge([])  # those who have ended
    (share,) = policy._shares.values()
    assert share.counter == computed + len(asked) * policy.output_cost


def test_a_store_that_was_slow_once_is_tried_again(tmp_path: Path) -> None:
    fill(tmp_path)
    costs = Costs(0.01 * BLOCK_S)
    with timed(tmp_path, costs) as (core, _):
        learn(core)
        store_of(core).rates.read(DISK, store_of(core)._settings.block_bytes, 5.0)  # it hung
        kinds = [take(core, policy="auto")[1] for _ in range(45)]
        assert kinds[0] == "none"
        assert kinds[-1] == "wait", kinds


def test_the_decision_replays_from_the_log(tmp_path: Path) -> None:
    fill(tmp_path)
    for link in (0.1, 1.0, 30.0):
        with timed(tmp_path, Costs(link * BLOCK_S)) as (core, _):
            core.recorder = Recorder()
            emitted, stored = [], store_of(core)
            stored._settings = settings = stored._settings._replace(load="auto")
            for n in range(4):
                core.add(request([5 + (i + n) % 7 for i in range(64)] if n == 0 else TEXT[: 401 - n], max_tokens=2))
                while core.has_work:
                    emitted += core.step()
                core.add(Control(kind="reset_prefix_cache", request_id=""))
            choices = dict(stored.choices)
            core.recorder.save(tmp_path / "run.log")
        made: list[EngineCore] = []

        def make(*args: object, settings: object = settings, made: list[EngineCore] = made) -> EngineCore:
            k = Knobs(block_size=4, budget=512, num_blocks=256, kv_offload=f"disk:{tmp_path},1GiB")
            made.append(partial(plain_core, fake_spec(slots=False), k, store=settings)(*args))  # type: ignore[arg-type]
            return made[-1]

        assert replay(load(tmp_path / "run.log"), make) == emitted
        assert store_of(made[0]).choices == choices
        (tmp_path / "run.log").unlink()


@pytest.mark.parametrize("policy", ["auto", "split", "cake"])
def test_B13_a_leading_part_that_was_dropped_is_computed_and_the_rest_is_read(tmp_path: Path, policy: str) -> None:
    """Pensieve: the folder has room for two and a half texts of three; the first one's beginning went."""
    texts = [[3 + (i * 7 + n * i * i) % 23 for i in range(161)] for n in (1, 2, 3)]
    with timed(tmp_path, Costs(0.5 * BLOCK_S), kv_load_policy=policy, kv_offload_eviction="recompute") as (
        core,
        forward,
    ):
        stored = store_of(core)
        stored.tiers[0].index.limit_bytes = 100 * stored._settings.block_bytes
        for text in texts:
            first_token_s(core, request(text, max_tokens=1))
            first_token_s(core, request([5], max_tokens=1))  # what was written is known
        core.kv.reset_prefix_cache()
        r = request(texts[0], max_tokens=3)
        there = [path in stored.tiers[0].index for path in stored.paths(Sequence(10**6, r, 0), 0, 40)]
        lead = there.index(True)
        assert 16 <= lead <= 24
        assert all(there[lead:]), "leading blocks went first"
        before = forward.num_tokens
        _, tokens, cached = first_token_s(core, r)
        assert tokens == generate(fake_logits, r)[0]
        assert 0 < cached <= 160 - 4 * lead
        assert forward.num_tokens - before == 161 - cached + 2
        if policy == "auto":
            assert cached >= 60, "most of the rest was read"
        stored.tiers[0].index.check_invariants()
        assert_idle(core)


def conversations(core: EngineCore, number: int, turns: int) -> tuple[float, list[list[int]], int]:
    """Seconds that all take, who come back in turn; what was said; tokens that were found. A turn is 40 tokens, an
    answer 4."""
    texts = [[3 + (i * 7 + n * i * i) % 23 for i in range(120)] for n in range(1, number + 1)]
    began_s, num_cached = core.clock.now(), 0
    for turn in range(turns):
        for n, text in enumerate(texts):
            text += [3 + (i * 5 + n + turn) % 23 for i in range(40)]
            r = request(text, max_tokens=4)
            _, tokens, cached = first_token_s(core, r)
            assert tokens == generate(fake_logits, r)[0]
            text += tokens
            num_cached += cached
    return core.clock.now() - began_s, texts, num_cached


def test_B13_conversations_that_come_back_take_less_time_than_without_a_memory(tmp_path: Path) -> None:
    """Pensieve: the device has room for one of four conversations, the folder for not all of them, whose beginnings
    leave. Beside a server that keeps nothing between turns."""
    more = {"num_blocks": 90, "prefix_cache": "none"}
    with timed(tmp_path / "none", Costs(0.0), **more) as (core, forward):
        store_of(core)._settings, store_of(core).rates.forced = store_of(core)._settings._replace(load="auto"), 1.0
        stateless_s, said, found = conversations(core, 4, 4)
        assert found == 0
        num_computed = forward.num_tokens
    more = {"num_blocks": 90, "kv_load_policy": "auto", "kv_offload_eviction": "recompute"}
    with timed(tmp_path / "kv", Costs(0.3 * BLOCK_S), **more) as (core, forward):
        stored = store_of(core)
        stored.tiers[0].index.limit_bytes = 200 * stored._settings.block_bytes
        tiers_s, said_again, found = conversations(core, 4, 4)
        assert stored.tiers[0].index.num_evicted > 0
        assert stored.choices["split"] + stored.choices["cake"] > 0, "beginnings were computed, the rest read"
        assert_idle(core)
        assert found + forward.num_tokens == num_computed
    assert said_again == said
    assert tiers_s < 0.8 * stateless_s, (tiers_s, stateless_s)


def test_B13_needs_who_reads_and_computes_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="set kv_load_policy to auto"),
        timed(tmp_path, Costs(0.0), kv_offload_eviction="recompute"),
    ):
        pass
