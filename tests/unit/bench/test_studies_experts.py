"""Where experts are put, and whether they are moved, on the recorded choices of real text (benchmarks/studies)."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from benchmarks.studies import expert_affinity as affinity
from benchmarks.studies import expert_balance as balance
from benchmarks.studies import expert_moves as moves
from benchmarks.studies import routing

TRACE = routing.read()
CUT = affinity.cut(TRACE, 3, 4)


def test_neurons_are_split_evenly_and_by_what_their_gates_see() -> None:
    rng = np.random.default_rng(3)
    kinds = np.repeat(np.arange(4), 8)[rng.permutation(32)]
    gates = (np.eye(4, 16)[kinds] + 0.1 * rng.standard_normal((32, 16))).astype(np.float32)
    owner = routing.split(gates, 4)
    assert np.bincount(owner).tolist() == [8] * 4
    assert all(len(set(owner[kinds == kind].tolist())) == 1 for kind in range(4))
    given = np.where(np.arange(32) % 4 == 1, 5.0, 1.0).astype(np.float32)
    member = routing.membership(gates, given, 4)
    assert member.sum(axis=1).tolist() == [0.0 if n % 4 == 1 else 1.0 for n in range(32)]  # a quarter is shared
    assert member.sum(axis=0).tolist() == [6.0] * 4


# -- C72 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [16, 64, 256])
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_C72_past_load_evens_the_load_of_texts_that_were_not_seen(num_devices: int, step_tokens: int) -> None:
    """What a device has beyond its share, against contiguous places; no more than a seventh behind hindsight's."""
    (cell,) = balance.study(TRACE, (num_devices,), (step_tokens,)).values()
    plain, least = cell["contiguous"] - 1, cell["hindsight"] - 1
    for way in ("by load", "apart"):
        assert cell[way] - 1 <= 0.8 * plain, cell
        assert cell[way] - 1 <= least + plain / 7, cell


def test_C72_the_heaviest_go_first_and_devices_hold_equally_many() -> None:
    assert balance.by_load(np.array([1, 2, 3, 4, 5, 6, 7, 8]), 2).tolist() == [0, 1, 1, 0, 0, 1, 1, 0]
    assert balance.by_load(np.array([90, 3, 2, 1]), 2).tolist() == [0, 1, 1, 0]  # no third on the one with room
    assert np.bincount(balance.by_load(TRACE.loads()[0], 3)).tolist() == [11, 11, 10]


def test_C72_experts_that_are_busy_together_go_apart() -> None:
    """All have the same load; by load alone the twins 0 and 2 share a device."""
    half = np.array([[4, 0, 4, 0], [0, 4, 0, 4]])
    steps = np.tile(half, (8, 1))
    together, apart = balance.by_load(steps.sum(axis=0), 2), balance.apart(steps, 2)
    assert together[0] == together[2]
    assert apart[0] != apart[2]
    assert balance.imbalance(together[None], steps[:, None], 2) == 2.0
    assert balance.imbalance(apart[None], steps[:, None], 2) == 1.0


# -- C77 ---------------------------------------------------------------------------------------------------------------


def test_C77_tokens_of_texts_that_were_not_seen_hop_less() -> None:
    for name, cell in affinity.study(TRACE).items():
        assert cell["affinity"] < cell["greedy"] <= 0.8 * min(cell["random"], cell["contiguous"]), name


def test_C77_where_tokens_walk_in_lanes_no_hop_is_left() -> None:
    """Expert i of a layer always sends its tokens to one expert of the next; ids are shuffled layer by layer."""
    rng = np.random.default_rng(5)
    lanes, shuffles = rng.integers(0, 8, 400), [rng.permutation(8) for _ in range(5)]
    choices = np.stack([s[lanes] for s in shuffles], axis=1).astype(np.uint8)[:, :, None]
    placed = affinity.by_affinity(affinity.affinities(choices, 8), 4)
    assert all(np.bincount(of_layer).tolist() == [2] * 4 for of_layer in placed)
    assert affinity.hops(choices, placed, 4) == 0
    assert affinity.hops(choices, np.tile(balance.contiguous(8, 4), (5, 1)), 4) > 2


def test_C77_hops_are_counted_by_devices() -> None:
    choices = np.array([[[0, 1], [2, 3]], [[0, 1], [0, 3]], [[3, 0], [3, 2]]], np.uint8)
    placed = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    # To device 1 once, though it has both; once for expert 3 alone; not at all from where both are.
    assert affinity.hops(choices, placed, 2) == pytest.approx(2 / 3)


def test_C77_the_integer_program_finds_the_best_and_exchanges_come_near() -> None:
    history, _ = CUT.halves()
    known = affinity.affinities(history.choices, 4)
    halves = [np.array([int(e in first) for e in range(4)]) for first in combinations(range(4), 2)]
    made = affinity.Placement(known, 2)

    def stays(placed: np.ndarray) -> int:
        made.placed = placed
        return made.stays()

    best = max(stays(np.stack(each)) for each in product(halves, repeat=3))
    found, proven = affinity.exact(known, 2)
    assert proven
    assert stays(found) == best
    assert stays(affinity.by_affinity(known, 2)) >= 0.98 * best


# -- C75 ---------------------------------------------------------------------------------------------------------------

COSTS = moves.known()


@pytest.mark.parametrize("name", COSTS)
def test_C75_the_rule_takes_the_cheaper_for_every_number_of_tokens(name: str) -> None:
    """By what was measured (benchmarks/results/expert-moves.json): few tokens are computed far, many moved to."""
    costs = COSTS[name]
    moved = [moves.cheaper(costs, n) for n in range(1, 2049)]
    for n, move in enumerate(moved, 1):
        alone = {m: moves.layer_seconds(costs, [n], [False], lambda *_, m=m: m) for m in (True, False)}
        assert alone[move] == min(alone.values())
    assert not moved[0]
    assert moved == sorted(moved)  # one border


@pytest.mark.parametrize("name", COSTS)
def test_C75_two_devices_take_less_than_always_moving_and_always_computing(name: str) -> None:
    cells = [moves.simulate(TRACE, COSTS[name], n, 0.25) for n in (4, 64, 512)]
    for cell in cells:
        assert cell["cheaper"] <= 1.03 * min(cell["move"], cell["compute"]), cell
    total = {rule: sum(cell[rule] for cell in cells) for rule in cells[0]}
    assert total["cheaper"] < (1.0 if "pread" in name else 0.95) * min(total["move"], total["compute"])


def test_C75_a_layer_ends_with_the_later_device() -> None:
    costs = moves.Costs(far_s={1: 4.0, 2: 5.0}, near_s={1: 1.0, 3: 2.0}, move_s=3.0, row_s=0.5)
    assert [moves.between(costs.near_s, n) for n in (1, 2, 3, 6)] == [1.0, 1.5, 2.0, 4.0]
    assert costs.far(2) == 6.0
    held, tokens = [True, False, False, False], [3, 2, 1, 0]
    # Near has 2 s of work of its own and waits for the first until 3; the second comes at 6.
    assert moves.layer_seconds(costs, tokens, held, moves.RULES["move"]) == 7.0
    assert moves.layer_seconds(costs, tokens, held, moves.RULES["compute"]) == 6.0 + 4.5
    # 3 + 1.5 against 6, and 3 + 1 against 4.5: both are moved. With a slower link neither is, and the far one is later.
    assert moves.layer_seconds(costs, tokens, held, moves.cheaper) == 7.0
    slow = moves.Costs(costs.far_s, costs.near_s, 4.2, 0.5)
    assert moves.layer_seconds(slow, tokens, held, moves.cheaper) == max(4.2 + 1.5, 4.5)


def test_C75_the_popular_are_held() -> None:
    assert moves.popular(np.array([[5, 9, 1, 9], [0, 0, 0, 1]]), 0.5) == [
        [False, True, False, True], [True, False, False, True],
    ]  # fmt: skip
