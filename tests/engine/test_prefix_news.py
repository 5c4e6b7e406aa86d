"""I10: a prefix router knows what engines hold: after every step, and once what they had was evicted."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.core.kv_events import DEVICE, HOST, KVEvent
from penstock.engine.block_news import BlockNews
from penstock.engine.core import EngineCore
from penstock.engine.membership import Membership
from penstock.engine.placement import EnginePlacement
from penstock.engine.process_link import ProcessLink
from penstock.route.prefix import PrefixRoute
from tests.engine.events import Follower
from tests.engine.processes import nano, replicated, within
from tests.engine.test_kv_events import turmoil
from tests.engine.test_process_link import params


class Routed(Follower):
    """Also tells a router, step by step, as an engine's loop and a front end do; and looks whether that is right."""

    def __init__(self) -> None:
        super().__init__()
        self.news, self.router, self.most = BlockNews(), PrefixRoute(), 0

    def hear(self, events: list[KVEvent]) -> bool:
        self.news(events)
        return super().hear(events)

    def follow(self, core: EngineCore) -> None:
        super().follow(core)
        inner = core.step

        def step():  # type: ignore[no-untyped-def]
            emitted = inner()
            told = self.news.take()
            if told is not None:
                self.router.told(0, told.stored, told.removed, cleared=told.cleared)
            held = self.held[DEVICE] | self.held[HOST]
            assert self.router._held.get(0, set()) == held
            assert set(self.news._places) == held, "it remembers what is there, and no more"
            self.most = max(self.most, len(held))
            return emitted

        core.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("tiers", ["none", "host", "both"])
def test_I10_after_every_step_the_router_has_what_the_engine_holds(tiers: str, tmp_path: Path) -> None:
    follower = Routed()
    turmoil("llama_gqa", tiers, tmp_path, random.Random(f"routed-{tiers}"), follower)
    assert follower.most > 3


@pytest.mark.skipif(sys.platform != "linux", reason="engines are processes that signals end")
@within(120)
async def test_I10_what_was_evicted_is_no_ground_to_go_there() -> None:
    settings: dict[str, Any] = {"ops": "auto", "block_size": 8, "num_gpu_blocks_override": 40}
    async with replicated(2, "prefix", **settings) as engine:
        client = engine.client
        placing = client.placing
        assert isinstance(placing, EnginePlacement)
        router = placing.router
        assert isinstance(router, PrefixRoute)
        config = nano(data_parallel_size=2, **settings)
        group = Membership(client, lambda: ProcessLink(config.as_kwargs(), block_secret=placing.block_secret), 2)
        begun = "There was once a very small dog who lived in a very large house with a red door and a blue roof. " * 3
        one = engine.submit("one", begun, params(0))
        had = one.replica.number
        blocks = placing._of(one).blocks
        assert len(blocks) >= 4
        await one.result()
        await engine.until(lambda: router.matched(had, blocks) == len(blocks))
        told = len(router._held[had])
        assert told >= len(blocks), "the answer's blocks, too"
        await group.drain(1 - had)
        for n in range(3):  # all of these go there, and need its memory
            await engine.submit(f"fill{n}", f"Number {n} of quite other stories, on a ship. " * 9, params(n)).result()
        await engine.until(lambda: router.matched(had, blocks) == 0)
        assert router.num_held(had) <= 40
        group.resume(1 - had)
        again = engine.submit("again", begun, params(0))
        assert again.replica.number == 1 - had, "it goes where least would have to be forgotten"
        await again.result()
        await engine.until(lambda: router.matched(1 - had, blocks) == len(blocks))
        assert not any(router._coming.values())
        held = set(router._held[1 - had])
        third = engine.submit("third", begun + " And then", params(0))
        assert held >= set(placing._of(third).blocks[: len(blocks) - 1]), "names chain from the beginning on"
        assert third.replica.number == 1 - had
        assert (await third.result()).num_cached_tokens >= 8 * (len(blocks) - 1)
        await group.close()
