"""Typical acceptance: a draft passes if the model finds it likely enough, compared with how sure it is. Lossy (CAP:
performance for accuracy), off by default. Greedy requests: exact in tokens.

Draft x passes if p(x) > min(t^2, t exp(-H(p))), with H the entropy of the distribution that would be drawn from and t
the `threshold`; what may not be drawn never passes. The longest path of such drafts is taken, the likelier one of
equals, then the model's own token, and so on if that was drafted too. With t^2 >= 1 and t >= vocabulary size nothing
passes but the model's own tokens.

Source: Cai et al., Medusa, arXiv 2401.10774, section 2.3.1; epsilon = delta^2 as recommended there.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.config import SpeculativeConfig
from penstock.runner.sampler import Sampler
from penstock.runner.verifiers.walk import F64, RuleVerifier, Walk, probabilities


class TypicalRule:
    matches_greedy = True

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def go(self, walk: Walk) -> None:
        tree = walk.drafted.tree
        while True:
            for node in self._longest(walk)[1]:
                walk.enter(node)
            final = walk.final()
            if final is None:
                return
            own = walk.own(final)
            drafted = [child for child in walk.children[walk.here + 1] if tree.token_ids[child] == own]
            if not drafted:
                walk.end(own)
                return
            walk.enter(drafted[0])

    def _longest(self, walk: Walk) -> tuple[tuple[int, float], list[int]]:
        """((length, log-probability), drafts) of the best path of typical drafts from where the walk stands."""
        best: tuple[tuple[int, float], list[int]] = ((0, 0.0), [])
        children = walk.children[walk.here + 1]
        final = walk.final() if children else None
        if final is None:
            return best
        p = probabilities(final, walk.drafted.rules)
        bound = least(p, self._threshold)
        for child in children:
            chance = float(p[walk.drafted.tree.token_ids[child]])
            if chance > bound:
                walk.enter(child)
                (length, logprob), path = self._longest(walk)
                walk.leave()
                best = max(best, ((length + 1, logprob + math.log(chance)), [child, *path]), key=lambda found: found[0])
        return best


def least(p: F64, threshold: float) -> float:
    """What a draft's probability must exceed. Shapes: p [V]."""
    some = p[p > 0.0]
    entropy = -float(np.sum(some * np.log(some)))
    return min(threshold * threshold, threshold * math.exp(-entropy))


def make(sampler: Sampler, config: SpeculativeConfig) -> RuleVerifier:
    return RuleVerifier(sampler, TypicalRule(config.threshold))
