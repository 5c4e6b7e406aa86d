"""A hypothesis state machine plays the life of an engine on the model of `test_kv_model`, for every kind of cache.

Rows B03, B04, B05 and G26 of the catalogue ("stays exact") rest on it: whatever is admitted, forked, preempted,
tainted, made ragged, evicted, hollowed and reset, every sequence reads back its own history and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from penstock.core.cache_spec import CacheGroup
from penstock.core.sampling import TokenRules
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.prefix import PREFIX_CACHES
from tests.sampled import draws
from tests.unit.kv.test_kv_model import Config, World, make_groups, pages_of


class Player:
    """Plays an engine's life on a World with a random generator: mostly ordinary steps, every now and then an event."""

    MAX_SEQS = 7

    def __init__(self, world: World) -> None:
        self.world = world
        self.windowed = any(g.spec.window for g in world.groups)
        self.said: list[list[int]] = []

    def prompt(self, rng: Random) -> list[int]:
        """Few beginnings, different ends; where windows slide, also dialogues that go on: their ends are kept."""
        if self.said and rng.random() < 0.5:
            said = rng.choice(self.said)
            return [*said[: rng.randint(len(said) // 2, len(said))], rng.randrange(2)]
        family = rng.randrange(3)
        shared = [(family * i) % 3 for i in range(rng.randrange(12))]
        return shared + [rng.randrange(2) for _ in range(rng.randint(1, 3))]

    def request(self, rng: Random) -> None:
        if len(self.world.seqs) < self.MAX_SEQS:
            seq = self.world.add(
                self.prompt(rng),
                namespace=rng.choice([b"", b"", b"", b"", b"tenant"]),
                taint=rng.choice(["", "", "", "", "lossy"]),
                rules=TokenRules(num_prompt_logprobs=rng.choice([-1, -1, -1, -1, -1, 0])),
            )
            self.world.admit(seq, rng.randrange(3))

    def turn(self, rng: Random) -> None:
        """One step of an engine."""
        world = self.world
        if len(world.running) < 3:
            self.request(rng)
        for seq in world.seqs:
            if not seq.tables and rng.random() < 0.5:
                world.admit(seq, rng.randrange(3))
        if len(world.inflight) < world.config.depth:
            world.schedule([rng.choice([99, 99, 99, 0, 1, 2, 5]) for _ in world.running])
            world.check()
        if world.inflight and (len(world.inflight) == world.config.depth or rng.random() < 0.4):
            for seq in world.collect():
                world.check()
                if seq.num_known - seq.prompt_len >= 8:
                    world.finish(seq)
                    if self.windowed and seq.num_known < 24:
                        self.said = [*self.said[-3:], seq.token_ids.tolist()]
                elif seq.num_known == seq.num_computed:
                    if rng.random() < 0.25 and len(world.seqs) < self.MAX_SEQS:
                        world.fork(seq, rng.randrange(2))
                    seq.token_ids.append(rng.randrange(2))
        world.check()

    def event(self, kind: str, rng: Random) -> None:
        world = self.world
        if kind == "request":
            self.request(rng)
        elif kind == "reset":
            world.reset()
        elif kind == "finish" and world.seqs:
            world.finish(rng.choice(world.seqs))
        elif kind == "taint" and world.seqs:
            seq = rng.choice(world.seqs)
            if seq.taint_start is None and seq.num_inflight == 0:
                seq.taint_start = seq.num_computed
        elif world.running:
            seq = rng.choice(world.running)
            if kind == "preempt":
                world.drop(seq)
            elif kind == "ragged":
                before = pages_of(world.groups, seq.tables)
                group = rng.randrange(len(world.groups))
                if not world.kv.make_ragged(seq, group):
                    assert pages_of(world.groups, seq.tables) == before
            elif kind == "fork" and seq.num_inflight == 0 and seq.num_computed and len(world.seqs) < self.MAX_SEQS:
                world.fork(seq, rng.randrange(2))
        world.check()


EVENTS = ["request", "finish", "preempt", "preempt", "ragged", "ragged", "fork", "fork", "taint", "reset"]


class Machine(RuleBasedStateMachine):
    config_strategy: Any = None

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.world = World(data.draw(self.config_strategy, label="config"))
        self.player = Player(self.world)
        self.num_actions = 0

    def rng(self, seed: int) -> Random:
        """Small seeds are drawn again and again; what they mean depends on when."""
        self.num_actions += 1
        return Random(seed * 1009 + self.num_actions)

    @rule(seed=st.integers(0, 1 << 32), turns=st.integers(2, 16))
    def turns(self, seed: int, turns: int) -> None:
        rng = self.rng(seed)
        for _ in range(turns):
            self.player.turn(rng)

    @rule(seed=st.integers(0, 1 << 32), kind=st.sampled_from(EVENTS))
    def event(self, seed: int, kind: str) -> None:
        self.player.event(kind, self.rng(seed))

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


def weak_hash(parent: bytes, tokens: bytes) -> bytes:
    """Collides all the time."""
    return bytes([(sum(parent) + 3 * sum(tokens)) % 5])


def colliding_cache(block_size: int) -> Any:
    return PREFIX_CACHES.get("hash")(block_size, EVICTION_POLICIES.get("lru")(), weak_hash)


LAYOUTS: dict[str, tuple[tuple[CacheGroup, ...], Callable[[int], list[int]]]] = {
    "paged": (make_groups(2), lambda n: [n]),
    "two-paged": (make_groups(2, 1), lambda n: [n, n + 2]),
    "slots": (make_groups(2, 0, 2), lambda n: [n, n // 2]),
    "all": (make_groups(1, 2, 1), lambda n: [n, n + 1, n // 2]),
    "window": (make_groups(0, windows=(5,)), lambda n: [n]),
    "full-and-window": (make_groups(2, windows=(5, 5)), lambda n: [n, n * 2 // 3]),
    "windows-and-slots": (make_groups(0, 0, 1, windows=(3, 6)), lambda n: [n // 2, n * 2 // 3, n]),
}
WINDOWED = [name for name, (groups, _) in LAYOUTS.items() if any(g.spec.window for g in groups)]


def configs(prefix: Any, layouts: list[str], host: list[int]) -> st.SearchStrategy[Config]:
    def build(
        eviction: str, block_size: int, depth: int, layout: str, n: int, checkpoint: int, rule: str, chunk: int | None,
        host: int,
    ) -> Config:  # fmt: skip
        groups, sizes = LAYOUTS[layout]
        return Config(prefix, eviction, block_size, depth, groups, sizes(n), checkpoint, rule, chunk=chunk, host=host)

    return st.builds(
        build, st.sampled_from(EVICTION_POLICIES.names()), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]),
        st.sampled_from(layouts), st.sampled_from([8, 12, 20, 40, 60]), st.sampled_from([2, 4]),
        st.sampled_from(["distance", "branch"]),
        st.sampled_from([None, 1, 3] if set(layouts) & set(WINDOWED) else [None]), st.sampled_from(host),
    )  # fmt: skip


PHASES = (Phase.generate,)
"""Shrinking a failing machine takes minutes: add `Phase.shrink` when hunting."""


def play(prefix: Any, layouts: list[str], examples: int, steps: int = 24, host: tuple[int, ...] = (0,)) -> None:
    class Configured(Machine):
        config_strategy = configs(prefix, layouts, list(host))

    run_state_machine_as_test(
        Configured,
        settings=settings(
            max_examples=draws(max(examples // 2, 4), examples), stateful_step_count=steps, deadline=None,
            derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), phases=PHASES,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in WINDOWED])
@pytest.mark.parametrize("prefix", PREFIX_CACHES.names())
def test_B03_B04_histories_survive(prefix: str, layout: str) -> None:
    play(prefix, [layout], 25 if prefix != "none" else 8)


@pytest.mark.parametrize("layout", WINDOWED)
@pytest.mark.parametrize("prefix", PREFIX_CACHES.names())
def test_G26_histories_survive_where_windows_slide(prefix: str, layout: str) -> None:
    play(prefix, [layout], 12 if prefix != "none" else 5)


@pytest.mark.parametrize("layout", ["paged", "slots", "full-and-window"])
def test_B05_histories_survive_hash_collisions(layout: str) -> None:
    play(colliding_cache, [layout], 15)


@pytest.mark.parametrize("layout", ["paged", "two-paged"])
@pytest.mark.parametrize("prefix", ["radix", "hash"])
def test_histories_survive_where_evicted_blocks_and_preempted_sequences_wait_in_a_tier(
    prefix: str, layout: str
) -> None:
    play(prefix, [layout], 25, host=(3, 8, 30))


def test_histories_survive_in_a_tier_under_hash_collisions() -> None:
    play(colliding_cache, ["paged"], 15, host=(3, 8))
