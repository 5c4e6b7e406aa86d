"""The oracle of `drafters.expanders`: whole trees out of a draft's probabilities, written plainly and all at once.

Trees that are filled into a fixed shape (`fill`; shapes: `drafters.tree_shapes`) and trees that grow by the draft's own
probabilities (`opt_tree`, `grown_tree`). Drafts are chosen, the likeliest first, or drawn (`draw_distinct`,
`draw_independent`) for the verifiers that are exact in distribution only (`runner.verifiers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.draft import NO_DRAFT, ROOT, DraftTree
from penstock.drafters.tree_shapes import Shape
from penstock.runner.truncate import best_ids

F64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.floating]
Path = tuple[int, ...]
"""Draft tokens from the newest known token (which is not in it) on."""
Expand = Callable[[Sequence[Path]], Rows]
"""Paths [N] -> what the draft expects behind each: probabilities [N, V], temperature and truncation applied. All paths
of a call are of one length, and each is one of an earlier call with a token more."""
Uniform = Callable[[int], float]
"""The j-th of independent numbers in [0, 1)."""
Picked = tuple[list[int], Rows | None]
"""Children [n], and the distributions that each was drawn from [n, V]; None: they were chosen."""
Pick = Callable[[Rows, int, int, int], Picked]
"""(probabilities [V], how many, their depth, index of the first of them in the tree) -> children, at most as many."""


def likeliest(row: Rows, count: int, depth: int = 1, first: int = 0) -> Picked:
    """The `count` likeliest tokens, the best first, none of probability zero; ties go to the lowest id."""
    ids = best_ids(row, count)
    return ids[row[ids] > 0.0].tolist(), None


def draw_distinct(row: Rows, count: int, uniform: Uniform) -> Picked:
    """Draw without replacement. Each child's own distribution: what its elder siblings have left over.

    Source: Sequoia, arXiv 2402.12374, section 3 (sampling without replacement).
    """
    rest = row.astype(np.float64)
    tokens: list[int] = []
    rows: list[F64] = []
    for j in range(count):
        total = rest.sum()
        if not total > 0.0:
            break
        rest = rest / total
        tokens.append(drawn(rest, uniform(j)))
        rows.append(rest)
        rest = rest.copy()
        rest[tokens[-1]] = 0.0
    return tokens, np.stack(rows).astype(np.float32) if rows else None


def draw_independent(row: Rows, count: int, uniform: Uniform) -> Picked:
    """Draw with replacement: the same token may come twice, and then it must stay twice in the tree."""
    own = row.astype(np.float64) / float(row.sum())
    return [drawn(own, uniform(j)) for j in range(count)], np.tile(own.astype(np.float32), (count, 1))


def drawn(p: Rows, u: float) -> int:
    """The token at `u` of the running sum of `p` [V], by ascending id; never one of probability zero."""
    sums = np.cumsum(p, dtype=np.float64)
    slot = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return slot if slot < len(sums) else int(np.flatnonzero(p)[-1])  # rounding reached the last sum


def fill(shape: Shape, expand: Expand, pick: Pick = likeliest) -> DraftTree:
    """Tokens for a fixed shape: one call of `expand` per level. What `pick` has no token for is left out."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    rows: list[Rows] = []
    children = shape.children()
    level: list[tuple[int, int, Path]] = [(ROOT, ROOT, ())]  # node of the shape, node of the tree, path
    while level := [entry for entry in level if children[entry[0] + 1]]:
        below: list[tuple[int, int, Path]] = []
        expected = expand([path for _, _, path in level])
        for (node, place, path), row in zip(level, expected, strict=True):
            wanted = children[node + 1]
            picked, distributions = pick(row, len(wanted), len(path) + 1, len(tokens))
            if distributions is not None:
                rows.append(distributions)
            for child, token in zip(wanted, picked, strict=False):
                below.append((child, len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(place)
                probs.append(float(row[token]))
        level = below
    drawn_from = np.concatenate(rows).astype(np.float32, copy=False) if rows else None
    assert drawn_from is None or len(drawn_from) == len(tokens), "some drafts are drawn and some are not"
    return DraftTree(tokens, parents, probs, drawn_from) if tokens else NO_DRAFT


class _Node(NamedTuple):
    """`reached`: probability of its whole path. `parent`: place in the list of all nodes."""

    reached: float
    parent: int
    token: int
    prob: float
    path: Path


def opt_tree(expand: Expand, num_nodes: int, depth: int, *, min_gain: float = 0.0) -> DraftTree:
    """The tree of `num_nodes` drafts with the largest expected acceptance by the draft's own probabilities.

    The expectation is the sum over nodes of their paths' probabilities, so the best tree has the likeliest paths.
    Level by level, a path that is not among the `num_nodes` best so far is given up: nothing behind it can be. It stops
    at `depth` levels, or where a level adds no more than `min_gain` to the expectation (a draft pass has to pay).
    Source: Wang et al., OPT-Tree, arXiv 2406.17276, section 3.
    """
    nodes: list[_Node] = []
    kept: list[int] = []
    level = [ROOT]
    total = 0.0
    for _ in range(depth):
        first = len(nodes)
        floor = nodes[kept[-1]].reached if len(kept) == num_nodes else 0.0
        _expanded(nodes, level, expand, num_nodes, floor)
        best = _best(nodes, [*kept, *range(first, len(nodes))], num_nodes)
        gained = sum(nodes[i].reached for i in best) - total
        if gained <= min_gain:
            break
        kept, total = best, total + gained
        level = [i for i in kept if i >= first]
        if not level:
            break
    return _tree(nodes, kept)


def grown_tree(expand: Expand, num_nodes: int, depth: int, width: int) -> DraftTree:
    """Of each level the `width` likeliest paths are expanded to their `width` likeliest children each; the `num_nodes`
    likeliest of all are kept.

    Source: Li et al., EAGLE-2, arXiv 2406.16858, section 4 (expansion and reranking).
    """
    nodes: list[_Node] = []
    level = [ROOT]
    for _ in range(depth):
        first = len(nodes)
        _expanded(nodes, level, expand, width)
        level = _best(nodes, range(first, len(nodes)), width)
        if not level:
            break
    return _tree(nodes, _best(nodes, range(len(nodes)), num_nodes))


def _expanded(nodes: list[_Node], level: Sequence[int], expand: Expand, width: int, floor: float = 0.0) -> None:
    """Mutates: appends to `nodes` the `width` likeliest children of each of `level`, if likelier than `floor`."""
    above = [(1.0, ()) if i == ROOT else (nodes[i].reached, nodes[i].path) for i in level]
    rows = expand([path for _, path in above])
    for parent, (reached, path), row in zip(level, above, rows, strict=True):
        for token in likeliest(row, width)[0]:
            prob = float(row[token])
            if reached * prob <= floor:
                break
            nodes.append(_Node(reached * prob, parent, token, prob, (*path, token)))


def _best(nodes: list[_Node], among: Sequence[int], count: int) -> list[int]:
    """The `count` likeliest, best first; the older first among equals, so no node goes before its parent."""
    return sorted(among, key=lambda i: (-nodes[i].reached, i))[:count]


def _tree(nodes: list[_Node], kept: Sequence[int]) -> DraftTree:
    place = {ROOT: ROOT, **{node: i for i, node in enumerate(kept)}}
    chosen = [nodes[i] for i in kept]
    return DraftTree([n.token for n in chosen], [place[n.parent] for n in chosen], [n.prob for n in chosen])


def merge(trees: Sequence[DraftTree], num_nodes: int) -> DraftTree:
    """Several drafters' trees as one, common beginnings once; at most `num_nodes` drafts.

    Too many: the likeliest paths stay, if all trees know their probabilities, else the trees take turns, shallow
    drafts first. A draft made by two counts as likely as the surer one says.

    If every tree was drawn, a draft that came twice stays twice (a verifier that is exact in distribution must know how
    often it was drawn; what follows it hangs on the first of them), and no token decides what is left out.
    Source: Miao et al., SpecInfer, arXiv 2305.09781, section 3 (merging token trees).
    """
    trees = [tree for tree in trees if tree.token_ids]
    drawn_from = [tree.drawn_from for tree in trees if tree.drawn_from is not None]
    twice = bool(trees) and len(drawn_from) == len(trees)
    known = not twice and all(len(tree.probs) == len(tree.token_ids) for tree in trees)
    nodes: list[_Node] = []
    rows: list[Rows] = []
    at: dict[Path, int] = {(): ROOT}
    for turn in _turns(trees):
        tree, i, path = turn
        parent, token, prob = at[path[:-1]], tree.token_ids[i], float(tree.probs[i]) if len(tree.probs) else 1.0
        reached = prob if parent == ROOT else prob * nodes[parent].reached
        same = at.get(path)
        if same is None or twice:
            at.setdefault(path, len(nodes))
            nodes.append(_Node(reached, parent, token, prob, path))
            if twice and tree.drawn_from is not None:
                rows.append(tree.drawn_from[i])
        elif nodes[same].prob < prob:
            nodes[same] = nodes[same]._replace(prob=prob, reached=reached)
    kept: Sequence[int] = range(min(num_nodes, len(nodes)))
    if known and len(nodes) > num_nodes:
        kept = _best(nodes, range(len(nodes)), num_nodes)
    merged = _tree(nodes, kept)
    return merged._replace(
        probs=merged.probs if known else (), drawn_from=np.stack(rows[: len(kept)]) if twice and rows else None
    )


def _turns(trees: Sequence[DraftTree]) -> list[tuple[DraftTree, int, Path]]:
    """All drafts with their paths: by depth, then by their place in their tree, then by tree."""
    order: list[tuple[int, int, int, DraftTree, Path]] = []
    for which, tree in enumerate(trees):
        paths: list[Path] = []
        for i, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            paths.append((token,) if parent == ROOT else (*paths[parent], token))
            order.append((len(paths[i]), i, which, tree, paths[i]))
    order.sort(key=lambda entry: entry[:3])
    return [(tree, i, path) for _, i, _, tree, path in order]
