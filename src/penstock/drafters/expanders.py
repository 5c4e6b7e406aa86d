"""How a draft model's tree grows, level by level: the shapes that the setting `tree` names.

An expander is asked for the next level of one tree. Shapes that are fixed beforehand (chain, k-ary, sequoia) may be
drawn into; those that follow the draft's own probabilities (opt, grown) may not, because how many drafts there are
would tell something about which they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.base.errors import ConfigError
from penstock.core.draft import ROOT, Outcome
from penstock.drafters.bench import DraftBench
from penstock.drafters.choose import DRAWING_VERIFIERS, F32, SICK, Candidate, Sprout
from penstock.drafters.tree_shapes import RankStatistics, Shape, best_shape

MIN_GAIN = 0.05
"""opt: expected tokens that a further pass of the draft model must be worth."""
_RANKS = 4
_REFRESH = 64


class Expander(Protocol):
    """Raises nothing: a front without a usable row grows no further."""

    def grow(self, sprout: Sprout, probs: F32, choices: Sequence[int]) -> None:
        """Give a tree its next level, or end it. Mutates: the sprout.

        Shapes: probs [front, V] and choices [front]: what the draft expects behind each of `sprout.front`, and what
        the sampler would choose there (SICK: nothing).
        """
        ...

    def shape(self, sprout: Sprout, probs: F32) -> list[int]:
        """How many drafts to draw behind each of the front, whatever they will be."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """What came of a tree that this one has shaped."""
        ...


def children(sprout: Sprout, row: int, probs: F32, choices: Sequence[int], width: int) -> list[Candidate]:
    """At most `width` drafts behind the front's `row`-th: the sampler's choice and the likeliest others.

    A choice counts as the likeliest: under sampling it may be an unlikely token, and is still the best draft.
    """
    choice, parent, own = choices[row], sprout.front[row], probs[row]
    if choice == SICK or width <= 0:
        return []
    best = np.argpartition(-own, min(width, len(own) - 1))[: width + 1]
    others = [int(t) for t in best[np.argsort(-own[best], kind="stable")] if t != choice and own[t] > 0]
    first = Candidate(choice, parent, float(own[choice]), worth=float(own.max()))
    return [first, *(Candidate(t, parent, float(own[t])) for t in others[: width - 1])]


class Counted:
    """A shape given by numbers of children alone."""

    def counts(self, sprout: Sprout) -> list[int]:
        """Of each of the front."""
        raise NotImplementedError

    def grow(self, sprout: Sprout, probs: F32, choices: Sequence[int]) -> None:
        counts = self.counts(sprout)
        found = [g for row, n in enumerate(counts) for g in children(sprout, row, probs, choices, n)]
        if len(found) > sprout.room:  # the likeliest of a level that has no room for all
            worth = [sprout.worth(g.parent) * (g.prob if g.worth is None else g.worth) for g in found]
            keep = sorted(range(len(found)), key=lambda i: (-worth[i], i))[: sprout.room]
            found = [found[i] for i in sorted(keep)]
        sprout.add(found)

    def shape(self, sprout: Sprout, probs: F32) -> list[int]:
        room, out = sprout.room, []
        for count in self.counts(sprout):
            out.append(min(count, room))
            room -= out[-1]
        return out

    def observe(self, outcome: Outcome) -> None:
        """It does not learn."""


class KAry(Counted):
    """The same number of drafts behind each; 1: a chain. Source: SpecInfer, arXiv 2305.09781, section 3.

    `least`: it ends where no draft is as likely (the fallback of BiLD, Kim et al., arXiv 2302.07863, section 3).
    """

    def __init__(self, width: int, least: float = 0.0) -> None:
        self._width, self._least = width, least

    def grow(self, sprout: Sprout, probs: F32, choices: Sequence[int]) -> None:
        if self._least and float(probs.max(axis=1).max()) < self._least:
            sprout.add([])
            return
        super().grow(sprout, probs, choices)

    def counts(self, sprout: Sprout) -> list[int]:
        return [self._width] * len(sprout.front)


class Sequoia(Counted):
    """The best shape for the acceptance of first, second, ... drafts as it has been so far.

    Source: Chen et al., Sequoia, arXiv 2402.12374, section 3.
    """

    def __init__(self) -> None:
        self._ranks = RankStatistics(_RANKS)
        self._shapes: dict[tuple[int, int], tuple[Shape, list[list[int]]]] = {}
        self._num_observed = 0

    def counts(self, sprout: Sprout) -> list[int]:
        # Nodes of the shape stand in the order in which drafts are added, unless a draft could not be made.
        size = (min(sprout.num_nodes, sprout.job.num_nodes), sprout.max_depth)
        if size not in self._shapes:
            shape, _ = best_shape(self._ranks.acceptance(), *size)
            self._shapes[size] = shape, shape.children()
        below = self._shapes[size][1]
        return [len(below[node + 1]) if node + 1 < len(below) else 0 for node in sprout.front]

    def observe(self, outcome: Outcome) -> None:
        self._ranks.observe(outcome)
        self._num_observed += 1
        if self._num_observed % _REFRESH == 0:
            self._shapes.clear()


class Likeliest:
    """The `num_nodes` likeliest paths by the draft's own probabilities.

    Every level the best so far are kept, the others are given up: nothing behind them can be among the best. With
    `width` 0 all that is kept is expanded, until a level is worth less than MIN_GAIN tokens (OPT-Tree: Wang et al.,
    arXiv 2406.17276, section 3); else the `width` likeliest of each level, by `width` drafts each (EAGLE-2: Li et al.,
    arXiv 2406.16858, section 4).
    """

    def __init__(self, width: int = 0) -> None:
        self._width = width

    def grow(self, sprout: Sprout, probs: F32, choices: Sequence[int]) -> None:
        width = self._width or sprout.num_nodes
        fresh = [g for row in range(len(sprout.front)) for g in children(sprout, row, probs, choices, width)]
        every = [*sprout.candidates, *fresh]
        worth: list[float] = []
        for candidate in every:
            own = candidate.prob if candidate.worth is None else candidate.worth
            worth.append(own * (1.0 if candidate.parent == ROOT else worth[candidate.parent]))
        best = sorted(range(len(every)), key=lambda i: (-worth[i], i))[: sprout.num_nodes]
        if not self._width and sum(worth[i] for i in best) - sum(worth[: len(sprout.candidates)]) <= MIN_GAIN:
            sprout.add([])
            return
        kept = sorted(best)
        # A path's worth falls along it, and parents come first among equals: no draft stays without its parent.
        front = [i for i in kept if i >= len(sprout.candidates)]
        if self._width:
            front = sorted(sorted(front, key=lambda i: (-worth[i], i))[: self._width])
        sprout.replace(every, kept, front)

    def shape(self, sprout: Sprout, probs: F32) -> list[int]:
        raise AssertionError("refused at start")

    def observe(self, outcome: Outcome) -> None:
        """It does not learn."""


def expander(bench: DraftBench) -> Expander:
    """The shape that `config.tree` asks for. Raises ConfigError where the verifier cannot take it."""
    tree, verifier = bench.config.tree, bench.config.verifier
    if tree in ("opt", "grown") and verifier in DRAWING_VERIFIERS:
        raise ConfigError(
            f"speculative_config: tree: {tree} chooses its drafts by probability, and verifier {verifier} wants them "
            "drawn; use tree sequoia or k-ary, or verifier match",
            field="speculative_config",
        )
    if tree == "sequoia":
        return Sequoia()
    if tree in ("opt", "grown"):
        return Likeliest(0 if tree == "opt" else max(2, bench.config.branches))
    least = bench.config.fallback if verifier == "bild" else 0.0
    return KAry(bench.config.branches if tree == "k-ary" else 1, least)
