"""Trees of drafts made of several continuations: those that begin alike share their first drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from penstock.core.draft import ROOT, DraftTree


class Trie:
    """A tree that grows by paths. Mutates: itself only."""

    def __init__(self, num_nodes: int, max_depth: int) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}
        self._num_nodes, self._max_depth = num_nodes, max_depth

    def add(self, path: Iterable[int], below: int = ROOT) -> int | None:
        """The last draft of a path that hangs on draft `below`; None if there is no room for all of it."""
        here = below
        for token in path:
            child = self._children.get((here, token))
            if child is None:
                depth = 1 if here == ROOT else self._depths[here] + 1
                if len(self.token_ids) >= self._num_nodes or depth > self._max_depth:
                    return None
                child = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(here)
                self._depths.append(depth)
                self._children[here, token] = child
            here = child
        return here

    def tree(self) -> DraftTree:
        return DraftTree(self.token_ids, self.parents)


def likeliest(
    follows: Sequence[Sequence[int]], num_nodes: int, max_depth: int, *, least: float = 0.0, chain_only: bool = False
) -> DraftTree:
    """The most frequent part of the trie of `follows`, at most `num_nodes` drafts and `max_depth` deep.

    `probs` are shares of `follows` that go this way; none is below `least`. Of equally frequent ones the shallower
    come first, then those of earlier `follows`. `chain_only`: behind each draft only the most frequent one.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    heap: list[tuple[int, int, int, int, int, Sequence[Sequence[int]]]] = []
    fewest = least * len(follows)
    order = 0

    def offer(parent: int, depth: int, members: Sequence[Sequence[int]]) -> None:
        nonlocal order
        groups: dict[int, list[Sequence[int]]] = {}
        for follow in members:
            if depth < len(follow):
                groups.setdefault(follow[depth], []).append(follow)
        for token, group in groups.items():
            if len(group) >= fewest:
                heappush(heap, (-len(group), depth, order, token, parent, group))
                order += 1

    if max_depth > 0:
        offer(ROOT, 0, follows)
    while heap and len(tokens) < num_nodes:
        count, depth, _, token, parent, group = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        probs.append(-count / len(follows))
        if chain_only:
            heap.clear()
        if depth + 1 < max_depth:
            offer(len(tokens) - 1, depth + 1, group)
    return DraftTree(tokens, parents, probs)
