"""Which requests of a batch share which beginning: groups to be run together.

A tree of the prompts, as far as they share whole blocks, says what could be shared; a group shares one beginning, so
somebody has to choose how deep. A part of the tree becomes a group of its own, with a longer beginning, where that
saves more than sharing the shorter one with its siblings does; what is best is found from the leaves up.
Source: Zheng et al., BatchLLM, arXiv 2412.03594, section on global prefix identification (a prefix tree, made one level
deep by dynamic programming, largest first-level reuse); the choice here is exact, over whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from penstock.core.sequence import Sequence
from penstock.sched.policy.prefix_order import kinship


@dataclass(frozen=True)
class PrefixGroup:
    """`members` in depth-first order of the tree; they share their first `num_shared` tokens, if they are several."""

    members: list[Sequence]
    num_shared: int

    @property
    def ratio(self) -> float:
        """Tokens that are expected to be generated, per token of prompts that has to be computed."""
        generated = sum(_expected(seq) for seq in self.members)
        own = sum(seq.num_known - self.num_shared for seq in self.members)
        return generated / max(1, self.num_shared + own)


@dataclass
class _Node:
    """Sequences `first` to `end` of the sorted ones, which share `depth` tokens. `saving`: tokens that need not be
    computed, at best; `apart`: the children that are groups of their own then."""

    depth: int
    first: int
    end: int = 0
    children: list[_Node] = field(default_factory=list)
    saving: int = 0
    apart: list[_Node] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.end - self.first

    def choose(self) -> None:
        """Its children have chosen."""
        apart = [child for child in self.children if child.saving > child.size * self.depth]
        together = self.size - sum(child.size for child in apart)
        saving = sum(child.saving for child in apart) + max(0, together - 1) * self.depth
        each = sum(child.saving for child in self.children)
        self.saving, self.apart = (saving, apart) if saving >= each else (each, self.children)


def prefix_groups(sequences: Seq[Sequence], block_size: int) -> list[PrefixGroup]:
    """Every sequence is in one group; who shares nothing is in one alone. In order of the tree. O(n log n)
    comparisons of prompts."""
    texts = [seq.token_ids.tobytes() for seq in sequences]
    places = sorted(range(len(sequences)), key=lambda i: (*kinship(sequences[i]), texts[i], sequences[i].arrival))
    line = [sequences[i] for i in places]
    shared = [
        _num_shared(a, texts[i], b, texts[j], block_size)
        for (a, i), (b, j) in zip(zip(line, places, strict=True), zip(line[1:], places[1:], strict=True), strict=False)
    ]
    return list(_groups(_tree(shared), line))


def _num_shared(a: Sequence, one: bytes, b: Sequence, other: bytes, block_size: int) -> int:
    """Tokens in whole blocks with which both begin and that a cache may give to either."""
    if kinship(a) != kinship(b) or not (a.request.reads_cache and b.request.reads_cache):
        return 0
    step = block_size * (len(one) // a.num_known)  # bytes
    low, high = 0, min(_limit(a), _limit(b)) // block_size + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[: middle * step] == other[: middle * step] else (low, middle)
    return low * block_size


def _limit(seq: Sequence) -> int:
    """At least one token is computed, and what is lossy enters no cache."""
    return min(seq.num_known - 1, seq.num_known if seq.taint_start is None else seq.taint_start)


def _tree(shared: list[int]) -> _Node:
    """`shared[i]`: tokens that sequence i and the next one share. Returns the root; every node has chosen."""
    stack = [_Node(0, 0)]
    for end, depth in enumerate([*shared, 0], 1):
        first, child = end - 1, None
        while depth < stack[-1].depth:
            node = stack.pop()
            node.end = end
            node.choose()
            first = node.first
            if depth <= stack[-1].depth:
                stack[-1].children.append(node)
                child = None
            else:
                child = node
        if depth > stack[-1].depth:
            stack.append(_Node(depth, first, children=[] if child is None else [child]))
    (root,) = stack
    root.end = len(shared) + 1
    root.choose()
    return root


def _groups(root: _Node, line: list[Sequence]) -> Iterator[PrefixGroup]:
    todo = [root]
    while todo:
        node = todo.pop()
        members, at = [], node.first
        for child in node.apart:
            members += line[at : child.first]
            at = child.end
        members += line[at : node.end]
        if node.depth:
            yield PrefixGroup(members, node.depth) if members else PrefixGroup([], 0)
        else:
            yield from (PrefixGroup([seq], 0) for seq in members)
        todo += reversed(node.apart)


def _expected(seq: Sequence) -> int:
    request = seq.request
    return request.n * max(1, (request.expected_tokens or request.max_tokens) - seq.num_generated)
