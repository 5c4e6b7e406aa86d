"""I01: who takes which place when machines were taken away, so that the fewest bytes move."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from penstock.plan.device_map import (
    ModelContext,
    ModelLayout,
    ModelPlace,
    assignment,
    device_map,
    layouts,
    moved_bytes,
)


@pytest.mark.parametrize("seed", range(60))
def test_I01_the_assignment_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.randrange(0, 6)
    columns = rows + rng.randrange(0, 2)
    weights = [[rng.randrange(rng.choice([3, 10**12])) for _ in range(columns)] for _ in range(rows)]
    found = assignment(weights)
    assert len(set(found)) == rows
    best = max(sum(weights[r][c] for r, c in enumerate(p)) for p in permutations(range(columns), rows))
    assert sum(weights[r][c] for r, c in enumerate(found)) == best


def change(rng: random.Random) -> tuple[list[ModelPlace | None], ModelLayout, ModelContext]:
    """Machines leave or come, and the model is laid out anew on those that are there."""
    before = rng.choice(layouts(rng.randrange(2, 8), 12, 4, 2))
    held: list[ModelPlace | None] = list(before.places)
    rng.shuffle(held)
    for _ in range(rng.randrange(0, 3)):
        if len(held) > 2:
            held.pop(rng.randrange(len(held)))  # killed
    held += [None] * rng.randrange(0, 3)  # new ones
    held = held[:7]
    layout = rng.choice(layouts(len(held), 12, 4, 2))
    kv = [rng.randrange(1 << 26) * 12 for _ in range(before.copies)]
    return held, layout, ModelContext(rng.randrange(1, 1 << 26) * 12, kv)


@pytest.mark.parametrize("seed", range(60))
def test_I01_no_map_of_devices_moves_fewer_bytes_and_the_naive_one_never_does(seed: int) -> None:
    """Naive: devices in the order in which they are there."""
    held, layout, context = change(random.Random(seed))
    found = device_map(held, layout, context)
    assert len(set(found)) == layout.num_places
    moved = moved_bytes(found, held, layout, context)
    naive = moved_bytes(range(layout.num_places), held, layout, context)
    assert 0 <= moved <= naive
    every = permutations(range(len(held)), layout.num_places)
    assert moved == min(moved_bytes(one, held, layout, context) for one in every)


def test_I01_who_stays_moves_nothing_where_nothing_changes() -> None:
    layout = ModelLayout(2, 2, 2, 12)
    held: list[ModelPlace | None] = list(layout.places)
    random.Random(3).shuffle(held)
    context = ModelContext(1200, [480, 960])
    found = device_map(held, layout, context)
    assert [held[device] for device in found] == layout.places
    assert moved_bytes(found, held, layout, context) == 0
    assert moved_bytes(range(8), held, layout, context) > 0


def test_I01_what_a_place_has_of_another_is_counted_by_hand() -> None:
    """Two stages of two shards become one stage of four: half of the layers, and half of each half or nothing."""
    old, new = ModelLayout(1, 2, 2, 12), ModelLayout(1, 1, 4, 12)
    context = ModelContext(400, [80])
    first = ModelPlace(old, 0, 0, 0)  # layers 0 to 5, bytes 0 to 199 of weights and 0 to 39 of keys and values
    assert [context.reused(first, place) for place in new.places] == [6 * 120, 6 * 120, 0, 0]
    assert [context.needed(place) for place in new.places] == [12 * 120] * 4
    found = device_map(list(old.places), new, context)
    assert moved_bytes(found, list(old.places), new, context) == 4 * 6 * 120


def test_I01_a_new_device_has_nothing_and_keys_go_where_their_requests_go() -> None:
    layout = ModelLayout(1, 1, 1, 4)
    context = ModelContext(100, [40, 8])  # of two copies, which become one
    assert moved_bytes([0], [None], layout, context) == 4 * 148
    both = ModelLayout(2, 1, 1, 4).places
    assert device_map([both[1], both[0]], layout, context) == [1], "who has more of the keys and values"
    assert moved_bytes([1], [both[1], both[0]], layout, context) == 4 * 8


def test_I01_layouts_have_room_for_the_model_and_divide_its_heads() -> None:
    found = layouts(6, 12, 4, 3)
    assert {(one.copies, one.stages, one.shards) for one in found} == {
        (2, 3, 1), (1, 4, 1), (1, 5, 1), (1, 6, 1), (1, 2, 2), (1, 3, 2), (1, 1, 4),
    }  # fmt: skip
    assert layouts(2, 12, 4, 3) == []
