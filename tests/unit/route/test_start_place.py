"""I03: a model starts on the machine where it is estimated to be ready first."""

from __future__ import annotations

import random

import pytest

from penstock.route.start_place import StartNode, place

GB = 1_000_000_000


def piped_us(num_bytes: int, rates: list[int], part: int) -> float:
    """Parts that pass tier by tier, each tier busy with one at a time: when the last one has arrived."""
    free = [0.0] * len(rates)
    at = 0.0
    for start in range(0, num_bytes, part):
        size, at = min(part, num_bytes - start), 0.0
        for k in range(len(rates) - 1, -1, -1):
            at = max(at, free[k]) + size / rates[k] * 1e6
            free[k] = at
    return at


@pytest.mark.parametrize("seed", range(20))
def test_I03_an_estimate_is_what_loading_part_by_part_takes(seed: int) -> None:
    """Within the first part's way through the tiers, which the formula leaves out."""
    rng = random.Random(seed)
    rates = [rng.randrange(100_000_000, 20 * GB) for _ in range(3)]
    tier, num_bytes, part = rng.randrange(3), rng.randrange(1, 40) * 250_000_000, 4 << 20
    node = StartNode(0, tuple(rates), {"m": tier}, queued_us=rng.randrange(5_000_000), ready_us=700_000)
    found = node.start_us("m", num_bytes)
    real = node.queued_us + piped_us(num_bytes, rates[: tier + 1], part) + 700_000
    first = sum(part / rate * 1e6 for rate in rates[: tier + 1])
    assert 0 <= real - found <= first + 1 or abs(real - found) < 2


@pytest.mark.parametrize("seed", range(30))
def test_I03_the_placement_is_the_earliest_of_all(seed: int) -> None:
    """Against trying every machine: models come one after the other, and each is put where it is ready first."""
    rng = random.Random(seed)
    models = {f"m{k}": rng.randrange(1, 30) * 300_000_000 for k in range(5)}
    nodes = [
        StartNode(
            n, (20 * GB, rng.choice([1, 3, 6]) * GB, rng.choice([1, 10]) * 100_000_000),
            {name: rng.randrange(2) for name in models if rng.random() < 0.4}, rng.randrange(4, 30) * GB,
            ready_us=rng.randrange(200_000, 900_000),
        )
        for n in range(rng.randrange(1, 6))
    ]  # fmt: skip
    queues = [0.0] * len(nodes)  # seconds of loads that wait, counted here
    for _ in range(8):
        model = rng.choice(list(models))
        size = models[model]
        tried = []
        for node, queue in zip(nodes, queues, strict=True):
            if node.free_bytes >= size:
                rates = node.rates[: node.held.get(model, 2) + 1]
                tried.append((queue + max(size / rate for rate in rates) + node.ready_us / 1e6, node.number))
        found = place(nodes, model, size)
        if not tried:
            assert found is None
            continue
        assert found is not None
        best = min(tried)
        assert found.start_us(model, size) / 1e6 == pytest.approx(best[0], abs=2e-5)
        queues[found.number] = best[0] - found.ready_us / 1e6
        nodes[found.number] = found.given(model, size)
        wait_us = rng.randrange(3_000_000)
        nodes = [node.passed(wait_us) for node in nodes]
        queues = [max(0.0, queue - wait_us / 1e6) for queue in queues]


def test_I03_who_has_it_on_disk_starts_before_who_fetches_it_unless_too_much_waits() -> None:
    near, far = StartNode(0, (20 * GB, 3 * GB, GB // 10), {"m": 1}), StartNode(1, (20 * GB, 3 * GB, GB // 10))
    assert place([far, near], "m", 6 * GB) is near
    busy = StartNode(0, near.rates, {"m": 1}, queued_us=70_000_000)
    assert place([far, busy], "m", 6 * GB) is far
    assert place([near, far], "other", 6 * GB) is near, "of equal ones the lowest number"
    assert place([], "m", 1) is None
    assert place([StartNode(0, near.rates, free_bytes=GB)], "m", 6 * GB) is None
