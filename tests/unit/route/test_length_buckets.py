"""H28: answers that will be long are spread, by the bucket of their expected length."""

from __future__ import annotations

import random

from penstock.route import ROUTERS
from penstock.route.length_buckets import BUCKET_TOKENS, LengthBuckets, bucket_of
from penstock.route.router import EngineLoad, RoutedRequest

LONG, SHORT = 3 * BUCKET_TOKENS + 1, 20


def decoders(n: int, kv_blocks: int = 4096) -> list[EngineLoad]:
    return [EngineLoad(number, kv_blocks=kv_blocks) for number in range(n)]


def test_buckets() -> None:
    assert [bucket_of(n) for n in (1, BUCKET_TOKENS - 1, BUCKET_TOKENS, 5 * BUCKET_TOKENS)] == [0, 0, 1, 5]
    assert bucket_of(0) == 1, "what nobody expects may be long"


def test_H28_long_answers_are_spread_and_chance_does_not_spread_them() -> None:
    """On the same requests: how many long ones meet at one engine at most, of those that a fair share would be 10."""
    found = {}
    for name in ("length-buckets", "random"):
        router, rng, long = ROUTERS.get(name)(), random.Random(5), [0] * 4
        for _ in range(160):
            asked = RoutedRequest(100, expected=LONG if rng.random() < 0.25 else SHORT)
            chosen = router.choose(asked, decoders(4))
            router.placed(asked, chosen)
            long[chosen] += asked.expected == LONG
        found[name] = max(long) * 4 / sum(long)
    assert found["length-buckets"] <= 1.15
    assert found["random"] >= 1.25


def test_what_ends_or_dies_counts_no_more() -> None:
    router = LengthBuckets()
    one, other = RoutedRequest(10, expected=LONG), RoutedRequest(10, expected=LONG)
    router.placed(one, 0)
    router.placed(other, 1)
    router.ended(one, 0)
    assert router.choose(RoutedRequest(10, expected=LONG), decoders(2)) == 0
    router.gone(1)
    router.ended(other, 1)
    router.placed(one, 0)
    assert router.choose(RoutedRequest(10, expected=LONG), decoders(2)) == 1


def test_only_those_with_room_for_all_of_it_are_drawn() -> None:
    router, there = LengthBuckets(), RoutedRequest(10, expected=LONG)
    small = [EngineLoad(0, kv_blocks=40), EngineLoad(1, kv_blocks=4096)]
    for _ in range(5):
        router.placed(there, 1)
    assert router.choose(RoutedRequest(10, expected=LONG), small) == 1, "0 is empty, and too small"
    assert router.choose(RoutedRequest(10, expected=SHORT), small) == 0


def test_of_engines_for_prompts_whoever_has_least_to_compute() -> None:
    loads = [EngineLoad(0, waiting_tokens=900, prompts_only=True), EngineLoad(1, waiting_tokens=100)]
    assert LengthBuckets().choose(RoutedRequest(10, expected=LONG), loads) == 1


def test_those_that_are_on_their_way_count() -> None:
    """Blocks take their time: all are asked about before the first one is placed."""
    router, asked = LengthBuckets(), [RoutedRequest(10, expected=LONG) for _ in range(8)]
    chosen = [router.choose(one, decoders(2)) for one in asked]
    assert sorted(chosen) == [0] * 4 + [1] * 4
    for one, number in zip(asked, chosen, strict=True):
        router.placed(one, number)
    for one, number in zip(asked, chosen, strict=True):
        router.ended(one, number)
    assert all(there == type(there)() for there in router._there.values()), "nothing is left"
