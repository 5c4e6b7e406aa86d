"""Conversations whose answer calls a tool (row A21): until the next request brings its result their blocks are kept,
swapped or dropped, whichever wastes least. Tokens are the same (`cached` compares them with the naive loop's)."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from penstock.core.request import Control
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.sched.pauses import DISCARD, PRESERVE, SWAP, PauseCase, wastes
from tests.engine.harness import assert_idle, disturbed, plain_core, real_engine, tiny
from tests.engine.test_kv_hints import Hand, cached, engine, flood, text
from tests.engine.test_laws_models import CONTROLS, check, draw_knobs, workload


class Pace(NamedTuple):
    """Seconds that computing a token, and copying a byte, takes."""

    token_s: float
    byte_s: float

    def compute_s(self, num_tokens: int) -> float:
        return num_tokens * self.token_s

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes * self.byte_s

    def observe(self, *_: Any) -> None:
        """It is as it is."""


def waits(core: EngineCore, tokens: list[int], expected_s: float = 5.0, namespace: bytes = b"") -> None:
    core.add(Control(kind="pause", token_ids=tokens, expected_s=expected_s, namespace=namespace))
    core.step()


def waiting(mode: str, **more: Any) -> tuple[EngineCore, Hand]:
    """Another text is used last; the conversation waits."""
    core, clock = engine(num_blocks=40, host_blocks=64, offload=True, **more)
    core.scheduler.pauses.mode = mode
    cached(core, text(1))
    cached(core, text(2))
    waits(core, text(1))
    return core, clock


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_A21_what_waits_is_kept_until_its_time(cache: str) -> None:
    core, clock = waiting(PRESERVE, prefix_cache=cache)
    flood(core, 4)
    assert core.kv.hints.counts == {"pause_preserve": 1}
    assert core.kv.swaps.num_blocks[0], "others went to the host"
    loaded = core.kv.swaps.num_blocks[1]
    assert cached(core, text(1)) == 36
    assert core.kv.swaps.num_blocks[1] == loaded, "and it did not"
    clock.now_s += 6
    flood(core, 4)
    cached(core, text(1))
    assert core.kv.swaps.num_blocks[1] > loaded, "its time was over"
    assert_idle(core)


def test_A21_what_is_swapped_goes_to_the_host_at_once_and_what_is_dropped_leaves_first() -> None:
    core, _ = waiting(SWAP)
    cached(core, text(3, 8))
    assert core.kv.swaps.num_blocks[0] == 10, "there was room, and it went all the same"
    assert cached(core, text(1)) == 36
    assert core.kv.hints.counts == {"pause_swap": 1}
    core, _ = engine(num_blocks=32)
    core.scheduler.pauses.mode = DISCARD
    cached(core, text(2))
    cached(core, text(1))
    waits(core, text(1))
    cached(core, text(3))
    cached(core, text(4, 20))
    assert cached(core, text(2)) == 36, "used before, but nobody waits with it"
    assert core.kv.hints.counts == {"pause_discard": 1}
    assert_idle(core)


def test_A21_the_way_between_requests_is_the_one_that_wastes_least() -> None:
    chosen = set()
    for token_s, byte_s, expected_s in ((1.0, 1.0, 0.1), (1e-6, 1.0, 9.0), (1.0, 1e-9, 9.0), (0.3, 1e-4, 5.0)):
        core, _ = engine(num_blocks=40, host_blocks=64, offload=True)
        pauses = core.scheduler.pauses
        pauses.pace = Pace(token_s, byte_s)  # type: ignore[assignment]
        cached(core, text(1))
        waits(core, text(1), expected_s)
        copy_s = core.kv.swaps.num_bytes(40) * byte_s
        found = wastes(PauseCase(40, 0, expected_s, 40 * token_s, copy_s))
        assert pauses.chosen == {min(found, key=lambda way: found[way]): 1}
        chosen |= set(pauses.chosen)
    assert chosen == {PRESERVE, SWAP, DISCARD}


def test_A21_what_others_go_on_from_or_stand_on_does_not_wait() -> None:
    core, _ = engine(num_blocks=40)
    core.scheduler.pauses.mode = DISCARD
    shared = text(1, 20)
    for n in (2, 3):
        cached(core, [*shared, *text(n, 20)])
    waits(core, [*shared, *text(2, 20)])
    ranks = [node.rank for node in _nodes(core)]
    assert len(ranks) == 3
    assert sum(rank != 0 for rank in ranks) == 1, "its own part alone"
    for wrong in (text(9), [], text(1, 3)):
        waits(core, wrong)
    waits(core, text(2), namespace=b"another")
    assert core.kv.hints.counts == {"pause_discard": 1}
    assert_idle(core)


def _nodes(core: EngineCore) -> list[Any]:
    stack = [child for root in core.kv.cache._roots.values() for child in root.children.values()]  # type: ignore[attr-defined]
    out = []
    while stack:
        out.append(node := stack.pop())
        stack += node.children.values()
    return out


@pytest.mark.parametrize("name", ["llama_gqa", "slots"])
def test_A21_waiting_conversations_change_no_token_and_follow_from_the_log(name: str, tmp_path: Any) -> None:
    rng = random.Random(f"waits-{name}")
    spec, weights = tiny(name)
    k = draw_knobs(rng)
    k.prefix_cache, k.offload, k.host_blocks = "radix", name == "llama_gqa", 32
    k.block_size, k.max_num_seqs = 2, 2
    core = real_engine(spec, weights, k)
    core.recorder = Recorder()
    requests, step = workload(spec.vocab_size), core.step

    def steps() -> Any:
        done, expected_s = rng.choice(requests), rng.choice([0.0001, 1.0, 60.0])
        core.add(
            Control(kind="pause", token_ids=[*done.prompt_token_ids], namespace=done.namespace, expected_s=expected_s)
        )
        return step()

    core.step = steps  # type: ignore[method-assign]
    check(name, disturbed(core, requests, rng, CONTROLS, note=k))
    assert sum(core.kv.hints.counts.values())
    core.recorder.save(tmp_path / "log")
    counts = dict(core.kv.hints.counts)
    again: list[EngineCore] = []

    def twin(executor: Any, clock: Any) -> EngineCore:
        again.append(plain_core(spec, k, executor, clock))
        return again[0]

    replay(load(tmp_path / "log"), twin, depth=k.depth)
    assert dict(again[0].kv.hints.counts) == counts
