"""Routers: who is chosen, and what becomes of a choice when engines come and go."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.route import ROUTERS
from penstock.route.prefix import IMBALANCE_TOKENS, PrefixRoute
from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy

LOADS = [EngineLoad(0, requests=3, tokens=900, kv_blocks=100), EngineLoad(1, requests=1, tokens=1200, kv_blocks=400),
         EngineLoad(2, requests=2, tokens=100, kv_blocks=10)]  # fmt: skip


def made(name: str) -> RoutePolicy:
    return ROUTERS.get(name)()


@pytest.mark.parametrize(
    ("name", "chosen"), [("least-requests", 1), ("least-tokens", 2), ("least-kv", 1), ("virtual-usage", 1)]
)
def test_who_has_least_is_chosen(name: str, chosen: int) -> None:
    assert made(name).choose(RoutedRequest(10), LOADS) == chosen


def test_round_robin_goes_round() -> None:
    router = made("round-robin")
    assert [router.choose(RoutedRequest(1), LOADS) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_the_better_of_two_is_never_the_worst_of_all_and_spreads() -> None:
    router = made("power-of-two")
    found = Counter(router.choose(RoutedRequest(1), LOADS) for _ in range(300))
    assert found[0] == 0, "with three, whoever has most never wins"
    assert min(found[1], found[2]) > 50
    one, other = made("power-of-two"), made("power-of-two")
    assert [one.choose(RoutedRequest(1), LOADS) for _ in range(20)] == [
        other.choose(RoutedRequest(1), LOADS) for _ in range(20)
    ]


def test_a_session_stays_and_only_those_of_a_lost_engine_move() -> None:
    router = made("session")
    sessions = [f"s{i}" for i in range(60)]
    before = {s: LOADS[router.choose(RoutedRequest(1, session=s), LOADS)].number for s in sessions}
    assert min(Counter(before.values()).values()) > 8
    rest = [load for load in LOADS if load.number != 1]
    after = {s: rest[router.choose(RoutedRequest(1, session=s), rest)].number for s in sessions}
    assert all(after[s] == before[s] for s in sessions if before[s] != 1)
    assert router.choose(RoutedRequest(1), LOADS) == 1, "without a session the fewest requests count"


def test_prefix_follows_what_is_cached_until_the_load_is_too_uneven() -> None:
    router = PrefixRoute()
    loads = [EngineLoad(0, kv_blocks=100), EngineLoad(1, kv_blocks=100)]
    asked = RoutedRequest(64, blocks=(1, 2, 3, 4))
    router.choose(asked, loads)
    router.placed(asked, 1)
    loads[1].tokens = 64
    assert router.choose(RoutedRequest(80, blocks=(1, 2, 9)), loads) == 1
    assert router.choose(RoutedRequest(80, blocks=(7, 8)), loads) == 0, "nobody has it: the fewest tokens"
    loads[1].waiting_tokens = IMBALANCE_TOKENS + 64 + 1
    assert router.choose(asked, loads) == 0
    loads[1].waiting_tokens -= 1
    assert router.choose(asked, loads) == 1
    router.gone(1)
    loads[0].tokens = 1
    assert router.matched(1, asked.blocks) == 0


def test_prefix_forgets_the_oldest_as_the_engine_does_and_beginnings_last() -> None:
    router = PrefixRoute()
    loads = [EngineLoad(0, kv_blocks=4)]
    for blocks in ((1, 2, 3), (1, 4, 5)):
        router.choose(RoutedRequest(48, blocks=blocks), loads)
        router.placed(RoutedRequest(48, blocks=blocks), 0)
    assert router.matched(0, (1, 4, 5)) == 3
    assert router.matched(0, (1, 2, 3)) == 2, "of four places the oldest end is gone"


def test_virtual_usage_keeps_room_beside_a_request_of_high_priority() -> None:
    router = made("virtual-usage")
    loads = [EngineLoad(0, requests=1, tokens=100, kv_blocks=100), EngineLoad(1, requests=1, tokens=120, kv_blocks=100)]
    assert router.choose(RoutedRequest(100), loads) == 0
    loads[0].urgent = 1
    assert router.choose(RoutedRequest(100), loads) == 1


def test_virtual_usage_counts_who_waits_once() -> None:
    """900 tokens wait and nothing runs: as much as 900 that run, and less than 950."""
    waits = EngineLoad(0, requests=1, tokens=900, waiting_tokens=900, kv_blocks=100)
    runs = EngineLoad(1, requests=1, tokens=950, kv_used=60, kv_blocks=100)
    assert made("virtual-usage").choose(RoutedRequest(10), [runs, waits]) == 1


def test_prefix_knows_what_engines_tell_and_what_is_on_its_way() -> None:
    router = PrefixRoute()
    loads = [EngineLoad(0, kv_blocks=100), EngineLoad(1, kv_blocks=100)]
    for load in loads:
        router.told(load.number, [], [], cleared=True)
    asked = RoutedRequest(64, blocks=(1, 2, 3, 4))
    router.placed(asked, 1)
    assert router.matched(1, asked.blocks) == 4, "it is being computed there"
    router.told(1, [1, 2, 3], [])
    router.ended(asked, 1)
    assert router.matched(1, asked.blocks) == 3, "the last one was never kept"
    router.told(1, [], [2])
    assert router.matched(1, asked.blocks) == 1
    assert router.choose(asked, loads) == 1
    router.told(1, [], [1])
    loads[1].tokens = 1
    assert router.choose(asked, loads) == 0, "what was evicted is no ground to go there"
    router.told(1, [1, 2], [], cleared=True)
    assert (router.matched(1, asked.blocks), router.num_held(1)) == (2, 2), "3 went with all that was before"


def test_prefix_forgets_requests_that_ended_and_engines_that_are_gone() -> None:
    router = PrefixRoute()
    router.told(0, [], [], cleared=True)
    one, two = RoutedRequest(32, blocks=(1, 2)), RoutedRequest(32, blocks=(1, 2, 3))
    for asked in (one, two):
        router.placed(asked, 0)
    router.ended(one, 0)
    router.ended(one, 0)
    assert router.matched(0, (1, 2, 3)) == 3, "the second one needs them still"
    router.ended(two, 0)
    assert not any(router._coming.values())
    assert not router._theirs
    router.placed(one, 0)
    router.gone(0)
    router.ended(one, 0)
    assert router.matched(0, one.blocks) == router.num_held(0) == 0
    router.placed(one, 0)
    assert router.matched(0, one.blocks) == 2, "a new engine that has not told yet: what was placed counts"
