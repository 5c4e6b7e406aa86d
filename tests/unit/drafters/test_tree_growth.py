"""Trees with tokens: shapes, merging, and which of them are accepted for longest by a simulated model.

Model and draft are random tables of probabilities by the last two tokens. The expected accepted length of a tree is
then a sum, not a measurement: of the probabilities that the model goes along each path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from penstock.core.draft import ROOT, UNKNOWN, DraftTree, Outcome, chain
from penstock.drafters.tree_shapes import RankStatistics, Shape, best_shape, k_ary
from tests.trees import (
    Expand,
    Path,
    draw_distinct,
    draw_independent,
    fill,
    grown_tree,
    likeliest,
    merge,
    opt_tree,
)

VOCAB = 24
NODES = 15


class World:
    """`model` and `drafts[i]`: probabilities [V, V, V] of the next token by the last two."""

    def __init__(self, seed: int, *, noise: float = 1.0, num_drafts: int = 1) -> None:
        rng = np.random.default_rng(seed)
        sure = rng.gamma(2.0, 1.2, size=(VOCAB, VOCAB, 1))  # some contexts are easy, some are not
        logits = rng.normal(size=(VOCAB, VOCAB, VOCAB)) * sure
        self.model = _softmax(logits)
        self.drafts = [_softmax(logits + noise * rng.normal(size=logits.shape)) for _ in range(num_drafts)]
        self.calls = 0

    def expand(self, root: tuple[int, int], which: int = 0) -> Expand:
        def ask(paths: Sequence[Path]) -> np.ndarray:
            self.calls += 1
            assert len({len(path) for path in paths}) == 1, "paths of several lengths in one call"
            return np.stack([self.drafts[which][tuple([*root, *path][-2:])] for path in paths])

        return ask

    def length(self, tree: DraftTree, root: tuple[int, int]) -> float:
        """Drafts of it that the model accepts, on average."""
        reached: list[float] = []
        paths: list[Path] = []
        seen: set[Path] = set()
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            path = (token,) if parent == ROOT else (*paths[parent], token)
            above = 1.0 if parent == ROOT else reached[parent]
            p = self.model[tuple([*root, *path[:-1]][-2:])][token]
            paths.append(path)
            reached.append(0.0 if path in seen else above * float(p))
            seen.add(path)
        return sum(reached)


def _softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def lengths(world: World, build: Callable[[tuple[int, int]], DraftTree], num_nodes: int = NODES) -> np.ndarray:
    """Of the trees behind every third context."""
    roots = [(a, b) for a in range(0, VOCAB, 3) for b in range(VOCAB)]
    trees = [build(root) for root in roots]
    assert all(len(tree.token_ids) <= num_nodes for tree in trees)
    return np.array([world.length(tree, root) for tree, root in zip(trees, roots, strict=True)])


def paths_of(tree: DraftTree) -> list[Path]:
    out: list[Path] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        out.append((token,) if parent == ROOT else (*out[parent], token))
    return out


def sound(tree: DraftTree) -> None:
    assert all(ROOT <= parent < i for i, parent in enumerate(tree.parents))
    assert len(set(paths_of(tree))) == len(tree.token_ids), "the same draft twice"


@pytest.mark.parametrize("seed", range(3))
def test_D25_opt_tree_is_accepted_for_longer_than_static_trees(seed: int) -> None:
    """Mean accepted length at the same number of nodes, against every k-ary tree; and by the draft's own belief."""
    world = World(seed)
    opt = lengths(world, lambda root: opt_tree(world.expand(root), NODES, 15))
    for branches in (1, 2, 3, 4):
        shape = k_ary(branches, NODES, 63)
        static = lengths(world, lambda root, shape=shape: fill(shape, world.expand(root)))  # type: ignore[misc]
        assert opt.mean() >= static.mean(), f"{branches}: {opt.mean():.3f} {static.mean():.3f}"
    world.model = world.drafts[0]  # if the draft is right, no tree is better, wherever it is
    opt = lengths(world, lambda root: opt_tree(world.expand(root), NODES, 15))
    for branches in (1, 2, 3, 4):
        static = lengths(world, lambda root, b=branches: fill(k_ary(b, NODES, 63), world.expand(root)))  # type: ignore[misc]
        assert (opt >= static - 1e-9).all()


def test_D25_opt_tree_is_the_best_of_all() -> None:
    """Against the likeliest paths of all, found without any growing."""
    world = World(5)
    for root in [(0, 1), (3, 3), (7, 2)]:
        draft = world.drafts[0]
        every: list[tuple[float, Path]] = [
            (float(draft[root][a]), (a,)) for a in range(VOCAB)
        ]  # fmt: skip
        every += [(p * float(draft[root[1], a][b]), (a, b)) for p, (a,) in every for b in range(VOCAB)]
        two = [entry for entry in every if len(entry[1]) == 2]
        every += [(p * float(draft[a, b][c]), (a, b, c)) for p, (a, b) in two for c in range(VOCAB)]
        best = {path for _, path in sorted(every, reverse=True)[:9]}
        tree = opt_tree(world.expand(root), 9, 3)
        sound(tree)
        assert set(paths_of(tree)) == best


def test_opt_tree_stops_where_a_draft_pass_does_not_pay() -> None:
    world = World(2)
    opt_tree(world.expand((1, 2)), NODES, 15)
    all_calls, world.calls = world.calls, 0
    tree = opt_tree(world.expand((1, 2)), NODES, 15, min_gain=0.1)
    assert 0 < world.calls < all_calls
    sound(tree)
    assert opt_tree(world.expand((1, 2)), NODES, 0).token_ids == []


def test_D24_measured_shape_beats_k_ary_trees() -> None:
    """Statistics from k-ary trees, then the best shape for them: longer accepted than any k-ary tree, elsewhere."""
    world = World(3)
    rng = np.random.default_rng(0)
    statistics = RankStatistics(6)
    for _ in range(600):
        root = (int(rng.integers(1, VOCAB, 1)[0]) // 3 * 3 + 1, int(rng.integers(VOCAB)))  # not where it is measured
        tree = fill(Shape([ROOT] * 6, list(range(6))), world.expand(root))
        choice = int(rng.choice(VOCAB, p=world.model[root]))
        path = [tree.token_ids.index(choice)] if choice in tree.token_ids else []
        statistics.observe(Outcome(1, tree, path, [choice, *[UNKNOWN] * 6]))
    shape, _ = best_shape(statistics.acceptance(), NODES, 15)
    sequoia = lengths(world, lambda root: fill(shape, world.expand(root))).mean()
    for branches in (1, 2, 3, 4):
        static = lengths(world, lambda root, b=branches: fill(k_ary(b, NODES, 63), world.expand(root))).mean()  # type: ignore[misc]
        assert sequoia >= static, f"{branches}: {sequoia:.3f} {static:.3f}"


@pytest.mark.parametrize("seed", range(3))
def test_D11_merged_tree_is_accepted_for_longer_than_the_best_chain(seed: int) -> None:
    """Chains of three drafts merged, or a tree of one draft, against each draft's own chain of as many drafts."""
    world = World(seed, num_drafts=3)

    def merged(root: tuple[int, int]) -> DraftTree:
        tree = merge([fill(k_ary(1, 4, 63), world.expand(root, i)) for i in range(3)], 12)
        sound(tree)
        return tree

    chains = [
        lengths(world, lambda root, i=i: fill(k_ary(1, 12, 63), world.expand(root, i)), 12).mean()  # type: ignore[misc]
        for i in range(3)
    ]
    assert lengths(world, merged, 12).mean() >= max(chains)
    assert lengths(world, lambda root: opt_tree(world.expand(root), 12, 12), 12).mean() >= chains[0]
    assert lengths(world, lambda root: grown_tree(world.expand(root), 12, 6, 4), 12).mean() >= chains[0]


def test_grown_tree_looks_at_so_many_paths_and_keeps_the_likeliest() -> None:
    world = World(4)
    asked: list[int] = []
    expand = world.expand((2, 3))

    def counted(paths: Sequence[Path]) -> np.ndarray:
        asked.append(len(paths))
        return expand(paths)

    tree = grown_tree(counted, NODES, 4, 3)
    sound(tree)
    assert asked == [1, 3, 3, 3]
    assert len(tree.token_ids) == NODES
    reached: list[float] = []
    for i, parent in enumerate(tree.parents):
        reached.append(tree.probs[i] * (1.0 if parent == ROOT else reached[parent]))
    assert reached == sorted(reached, reverse=True)


def test_fill_asks_once_a_level_and_leaves_out_what_cannot_be() -> None:
    row = np.zeros(VOCAB)
    row[[4, 9]] = 0.25, 0.75
    calls: list[list[Path]] = []

    def expand(paths: Sequence[Path]) -> np.ndarray:
        calls.append(list(paths))
        return np.tile(row, (len(paths), 1))

    tree = fill(k_ary(3, 63, 3), expand)
    sound(tree)
    assert [len(paths) for paths in calls] == [1, 2, 4]
    assert tree.token_ids[:2] == [9, 4]
    assert tree.depths().count(3) == 8
    assert tree.probs == [0.75, 0.25] * 7
    assert tree.drawn_from is None


def test_drawn_trees_carry_what_they_were_drawn_from() -> None:
    world = World(6)
    rng = np.random.default_rng(0)
    for draw in (draw_distinct, draw_independent):
        tree = fill(
            k_ary(3, 12, 3),
            world.expand((0, 0)),
            lambda row, n, depth, first, d=draw: d(row, n, lambda j: rng.random()),
        )  # type: ignore[misc]
        rows = tree.drawn_from
        assert rows is not None
        assert rows.shape == (12, VOCAB)
        assert rows.sum(axis=1) == pytest.approx(np.ones(12), abs=1e-5)
        assert (rows[range(12), tree.token_ids] > 0).all()
        first = world.drafts[0][0, 0].astype(np.float32)
        assert rows[0] == pytest.approx(first, rel=1e-5)
        if draw is draw_distinct:
            sound(tree)
            assert rows[1][tree.token_ids[0]] == 0
        else:
            assert np.array_equal(rows[0], rows[2])


def test_draws_stop_where_nothing_is_left() -> None:
    row = np.zeros(VOCAB)
    row[5] = 1.0
    assert draw_distinct(row, 3, lambda j: 0.999999)[0] == [5]
    assert draw_independent(row, 3, lambda j: 0.999999)[0] == [5, 5, 5]
    assert likeliest(row, 3)[0] == [5]


def test_merge_has_common_beginnings_once() -> None:
    a = chain([1, 2, 3], [0.5, 0.5, 0.5])
    b = DraftTree([1, 2, 9], [ROOT, 0, ROOT], [0.9, 0.4, 0.1])
    tree = merge([a, b], 63)
    assert sorted(paths_of(tree)) == [(1,), (1, 2), (1, 2, 3), (9,)]
    assert dict(zip(paths_of(tree), tree.probs, strict=True)) == {(1,): 0.9, (1, 2): 0.5, (1, 2, 3): 0.5, (9,): 0.1}
    assert paths_of(merge([a, b], 3)) == [(1,), (1, 2), (1, 2, 3)]
    assert paths_of(merge([chain([1, 2, 3]), chain([4, 5, 6])], 4)) == [(1,), (4,), (1, 2), (4, 5)]
    assert merge([], 5).token_ids == []
    assert merge([chain([])], 5).token_ids == []


def test_merge_of_drawn_trees_forgets_no_draw() -> None:
    rows = np.eye(VOCAB, dtype=np.float32)
    a = DraftTree([1, 2], [ROOT, 0], [1.0, 1.0], rows[[1, 2]])
    b = DraftTree([1, 3], [ROOT, 0], [1.0, 1.0], rows[[1, 3]])
    tree = merge([a, b], 63)
    assert (tree.token_ids, tree.parents) == ([1, 1, 2, 3], [ROOT, ROOT, 0, 0])
    assert tree.drawn_from is not None
    assert tree.drawn_from.argmax(axis=1).tolist() == tree.token_ids
    shorter = merge([a, b], 3)
    assert shorter.token_ids == [1, 1, 2]
    assert shorter.drawn_from is not None
    assert len(shorter.drawn_from) == 3
    assert merge([a, chain([1], [0.5])], 63).drawn_from is None
