"""Shapes of trees of drafts that are fixed before a token is known, and what the best one is.

A node is its parent's r-th best child, r = 0, 1, ...; the children of a node have the ranks 0 ... n-1. With positional
acceptance (the r-th child of an accepted node is accepted with probability a[r], whatever the node), a tree's expected
number of accepted drafts is the sum over its nodes of the product of a along the path to them.

Source: Chen et al., Sequoia, arXiv 2402.12374, section 3 (positional acceptance, tree construction).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.draft import MAX_DRAFTS, ROOT, UNKNOWN, Outcome

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


class Shape(NamedTuple):
    """A tree without tokens, parents before children and level by level: node i is child ranks[i] of parents[i]."""

    parents: list[int]
    ranks: list[int]

    def children(self) -> list[list[int]]:
        """Of the root (entry 0) and of each node (entry i + 1), in the order of their ranks."""
        out: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for i, parent in enumerate(self.parents):
            out[parent + 1].append(i)
        return out


def k_ary(branches: int, num_nodes: int, depth: int) -> Shape:
    """`branches` children for every node, level by level, until the nodes are used up or the tree is `depth` deep."""
    parents: list[int] = []
    ranks: list[int] = []
    level = [ROOT]
    for _ in range(depth):
        below: list[int] = []
        for parent in level:
            for rank in range(branches):
                if len(parents) == num_nodes:
                    return Shape(parents, ranks)
                below.append(len(parents))
                parents.append(parent)
                ranks.append(rank)
        level = below
    return Shape(parents, ranks)


def expected_length(shape: Shape, acceptance: Sequence[float]) -> float:
    """Drafts of a tree that are accepted on average."""
    reached: list[float] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        above = 1.0 if parent == ROOT else reached[parent]
        reached.append(above * (acceptance[rank] if rank < len(acceptance) else 0.0))
    return sum(reached)


def best_shape(acceptance: Sequence[float], num_nodes: int, depth: int) -> tuple[Shape, float]:
    """The tree with the largest expected length, and that length. `acceptance` need not fall with the rank.

    At most `num_nodes` nodes, `depth` levels and len(acceptance) children of one node; nodes that would gain nothing
    are left out. With B(d, m) the best of m nodes below a node with d levels left, and C(d, r, m) the best for its
    children of rank r and above: C(d, r, m) = max(0, max_k a[r] (1 + B(d-1, k-1)) + C(d, r+1, m-k)), B(d, m) =
    C(d, 0, m). The number of operations is of the order of depth * len(acceptance) * num_nodes^2.
    """
    assert 0 <= num_nodes <= MAX_DRAFTS, f"{num_nodes} drafts"
    depth = min(depth, num_nodes)
    best = np.full(num_nodes + 1, 0.0)  # no level left: nothing below
    sizes: list[list[I64]] = []  # [d][r][m]: nodes of the r-th child's subtree, 0: there is no such child
    left = np.arange(num_nodes + 1)[:, None] - np.arange(1, num_nodes + 1)[None, :]
    possible, left = left >= 0, np.maximum(left, 0)
    for _ in range(depth):
        below = np.zeros(num_nodes + 1)
        chosen: list[I64] = []
        for rate in reversed(acceptance):
            gain = rate * (1.0 + best[:-1])
            value = np.where(possible, gain[None, :] + below[left], -np.inf)
            value = np.concatenate([np.zeros((num_nodes + 1, 1)), value], axis=1)
            chosen.append(value.argmax(axis=1))
            below = value.max(axis=1)
        sizes.append(chosen[::-1])
        best = below
    return _built(sizes, num_nodes), float(best[num_nodes])


def _built(sizes: list[list[I64]], num_nodes: int) -> Shape:
    parents: list[int] = []
    ranks: list[int] = []
    level = [(ROOT, num_nodes)]
    for chosen in reversed(sizes):
        below: list[tuple[int, int]] = []
        for parent, left in level:
            for rank, table in enumerate(chosen):
                size = int(table[left])
                if not size:
                    break
                below.append((len(parents), size - 1))
                parents.append(parent)
                ranks.append(rank)
                left -= size
        level = below
    return Shape(parents, ranks)


class RankStatistics:
    """How often the r-th child of an accepted draft is the one that is accepted, measured while decoding.

    A node with two children says nothing about a third. So it counts, of the nodes with more than r children none of
    whose first r was right, how often the next one was (the product-limit estimate of Kaplan and Meier).
    """

    def __init__(self, width: int, *, memory: float = 500.0, prior: float = 0.5, weight: float = 2.0) -> None:
        """`width`: ranks that are told apart. `memory`: nodes after which an old one counts a third of a new one.

        `prior`: the chance of a child whose elder siblings are wrong, believed until `weight` nodes have spoken.
        """
        self._keep = 1.0 - 1.0 / memory
        self._prior, self._weight = prior, weight
        self._tried, self._right = [0.0] * width, [0.0] * width

    def observe(self, outcome: Outcome) -> None:
        """Hear what came of a tree whose children stand in the order of their ranks."""
        below: dict[int, list[int]] = {}
        for token, parent in zip(outcome.tree.token_ids, outcome.tree.parents, strict=True):
            below.setdefault(parent, []).append(token)
        for node in (ROOT, *outcome.path):
            choice = outcome.choices[node + 1]
            if choice != UNKNOWN:
                self._count(below.get(node, ()), choice)

    def _count(self, children: Sequence[int], choice: int) -> None:
        for rank, token in enumerate(children[: len(self._tried)]):
            self._tried[rank] = self._tried[rank] * self._keep + 1.0
            self._right[rank] = self._right[rank] * self._keep + (token == choice)
            if token == choice:
                break

    def acceptance(self) -> list[float]:
        """Of each rank: the probability that the accepted child is this one. Their sum is below 1."""
        out: list[float] = []
        left = 1.0
        for tried, right in zip(self._tried, self._right, strict=True):
            chance = (right + self._prior * self._weight) / (tried + self._weight)
            out.append(left * chance)
            left *= 1.0 - chance
        return out
