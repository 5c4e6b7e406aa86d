"""I04: the cheapest mix of machines for requests of several sizes."""

from __future__ import annotations

import random
from itertools import product

import pytest

from penstock.base.errors import CapacityError
from penstock.plan.gpu_mix import MILLION, MixBucket, cheapest_mix, sliced

NAMES = ("a10", "a100", "l4")


def drawn(rng: random.Random, buckets: int, slices: int) -> tuple[list[MixBucket], dict[str, int]]:
    prices = {name: rng.randrange(50, 500) for name in NAMES[: rng.randrange(1, 4)]}
    found = []
    for _ in range(buckets):
        most = {name: rng.choice([0, *range(200, 4000)]) for name in prices}
        most[rng.choice(list(prices))] = rng.randrange(200, 4000)
        found.append(sliced(rng.randrange(1, 3000), most, rng.randrange(1, slices + 1)))
    return found, prices


def brute(buckets: list[MixBucket], prices: dict[str, int]) -> int:
    """Every slice to every type."""
    slices = [bucket for bucket in buckets for _ in range(bucket.slices)]
    best = None
    for choice in product(prices, repeat=len(slices)):
        if any(name not in bucket.load for name, bucket in zip(choice, slices, strict=True)):
            continue
        cost = 0
        for name in prices:
            load = sum(bucket.load[name] for own, bucket in zip(choice, slices, strict=True) if own == name)
            cost += prices[name] * -(-load // MILLION)
        best = cost if best is None else min(best, cost)
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(40))
def test_I04_no_mix_is_cheaper(seed: int) -> None:
    buckets, prices = drawn(random.Random(seed), 3, 2)
    found = cheapest_mix(buckets, prices)
    assert found.cost == brute(buckets, prices)
    assert found.cost == sum(prices[name] * num for name, num in found.machines.items())
    for bucket, given in zip(buckets, found.given, strict=True):
        assert sum(given.values()) == bucket.slices
    for name in prices:
        load = sum(b.load[name] * given.get(name, 0) for b, given in zip(buckets, found.given, strict=True)
                   if given.get(name))  # fmt: skip
        assert load <= MILLION * found.machines.get(name, 0)


@pytest.mark.parametrize("seed", range(20))
def test_I04_a_mix_is_never_dearer_than_the_best_single_type(seed: int) -> None:
    buckets, prices = drawn(random.Random(1000 + seed), 8, 4)
    found = cheapest_mix(buckets, prices)
    alone = [
        prices[name] * -(-sum(b.load[name] * b.slices for b in buckets) // MILLION)
        for name in prices if all(name in b.load for b in buckets)
    ]  # fmt: skip
    assert all(found.cost <= one for one in alone)


def test_I04_short_requests_go_to_small_machines_and_long_ones_to_large() -> None:
    short = sliced(3600, {"l4": 3600, "a100": 7200}, 2)
    long = sliced(600, {"l4": 60, "a100": 900}, 2)
    found = cheapest_mix([short, long], {"l4": 70, "a100": 370})
    assert found.machines == {"l4": 1, "a100": 1}
    assert found.given == ({"l4": 2}, {"a100": 2})


def test_I04_a_bucket_that_nobody_serves_in_time_is_named() -> None:
    with pytest.raises(CapacityError, match="bucket 1"):
        cheapest_mix([sliced(10, {"l4": 5}, 1), sliced(10, {"l4": 0}, 1)], {"l4": 70})


def test_I04_nothing_to_serve_costs_nothing() -> None:
    assert cheapest_mix([], {"l4": 70}).cost == 0
