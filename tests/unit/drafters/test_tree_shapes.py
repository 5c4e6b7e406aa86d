"""Fixed shapes: the best one against every tree there is, and the statistics that it is made from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.core.draft import ROOT, UNKNOWN, DraftTree, Outcome
from penstock.drafters.tree_shapes import RankStatistics, Shape, best_shape, expected_length, k_ary

Ranks = tuple[int, ...]


def every_tree(num_nodes: int, depth: int, width: int) -> set[frozenset[Ranks]]:
    """All trees of up to so many nodes, as the sets of their paths (ranks from the root on)."""
    found: set[frozenset[Ranks]] = {frozenset()}
    newest = found
    for _ in range(num_nodes):
        grown: set[frozenset[Ranks]] = set()
        for tree in newest:
            for above in [(), *tree]:
                if len(above) < depth:
                    rank = next(r for r in itertools.count() if (*above, r) not in tree)
                    if rank < width:
                        grown.add(tree | {(*above, rank)})
        found, newest = found | grown, grown
    return found


def value(tree: frozenset[Ranks], acceptance: list[float]) -> float:
    return sum(float(np.prod([acceptance[r] for r in path])) for path in tree)


def test_every_tree_is_every_tree() -> None:
    catalan = [sum(len(t) == n for t in every_tree(4, 9, 9)) for n in range(5)]
    assert catalan == [1, 1, 2, 5, 14]


def sound(shape: Shape, num_nodes: int, depth: int, width: int) -> None:
    assert len(shape.parents) == len(shape.ranks) <= num_nodes
    assert all(parent < i for i, parent in enumerate(shape.parents))
    for children in shape.children():
        assert [shape.ranks[i] for i in children] == list(range(len(children)))
        assert len(children) <= width
    assert max(DraftTree([0] * len(shape.parents), shape.parents).depths(), default=0) <= depth


@pytest.mark.parametrize("seed", range(8))
def test_D24_best_shape_equals_brute_force(seed: int) -> None:
    """Expected accepted length of the dynamic programme's tree is that of the best of all trees."""
    rng = np.random.default_rng(seed)
    for num_nodes, depth, width in [(1, 1, 1), (4, 4, 2), (5, 2, 3), (6, 6, 3), (6, 3, 2), (7, 4, 3)]:
        acceptance = rng.dirichlet(np.ones(width + 1))[:width]
        if seed % 2 == 0:
            acceptance = np.sort(acceptance)[::-1]
        rates = acceptance.tolist()
        shape, length = best_shape(rates, num_nodes, depth)
        sound(shape, num_nodes, depth, width)
        assert expected_length(shape, rates) == pytest.approx(length, abs=1e-12)
        assert length == pytest.approx(max(value(t, rates) for t in every_tree(num_nodes, depth, width)), abs=1e-12)


def test_D24_best_shape_is_no_worse_than_any_k_ary_tree() -> None:
    rng = np.random.default_rng(0)
    for num_nodes in (1, 7, 20, 63):
        for _ in range(5):
            rates = (np.sort(rng.dirichlet(np.ones(7)))[::-1][:6]).tolist()
            for depth in (1, 3, 63):
                length = best_shape(rates, num_nodes, depth)[1]
                for branches in range(1, 7):
                    assert length >= expected_length(k_ary(branches, num_nodes, depth), rates) - 1e-12


def test_best_shape_leaves_out_what_gains_nothing() -> None:
    assert best_shape([0.0, 0.0], 5, 5)[0] == Shape([], [])
    assert best_shape([0.5, 0.0], 3, 3)[0] == Shape([ROOT, 0, 1], [0, 0, 0])
    assert best_shape([0.5], 0, 3)[0] == Shape([], [])


def test_k_ary_trees() -> None:
    assert k_ary(1, 3, 63).parents == [ROOT, 0, 1]
    assert k_ary(2, 5, 63) == Shape([ROOT, ROOT, 0, 0, 1], [0, 1, 0, 1, 0])
    assert k_ary(3, 63, 1).parents == [ROOT] * 3
    assert k_ary(2, 63, 63).parents[-1] == 30


def test_statistics_find_the_acceptance_of_each_rank() -> None:
    """Through trees of every width: a node with one child says nothing about a second."""
    rng = np.random.default_rng(1)
    truth = np.array([0.5, 0.2, 0.1])
    found = RankStatistics(3, memory=20_000)
    for _ in range(6000):
        width = int(rng.integers(1, 4))
        right = int(rng.choice(4, p=[*truth, 0.2]))
        tree = DraftTree([10, 11, 12][:width], [ROOT] * width)
        path = [right] if right < width else []
        found.observe(Outcome(1, tree, path, [10 + right, *[UNKNOWN] * width]))
    assert found.acceptance() == pytest.approx(truth, abs=0.03)


def test_statistics_follow_a_change_and_look_at_the_accepted_path_only() -> None:
    found = RankStatistics(2, memory=50)
    tree = DraftTree([5, 6, 7, 8], [ROOT, ROOT, 0, 1])
    for _ in range(500):
        found.observe(Outcome(1, tree, [0, 2], [5, 7, 99, UNKNOWN, UNKNOWN]))  # off the path: 99, not counted
    assert found.acceptance() == pytest.approx([1.0, 0.0], abs=0.05)
    for _ in range(500):
        found.observe(Outcome(1, tree, [1], [6, UNKNOWN, 1, UNKNOWN, UNKNOWN]))
    assert found.acceptance() == pytest.approx([0.0, 0.5], abs=0.6)
    assert found.acceptance()[0] == pytest.approx(0.0, abs=0.05)
