"""Big Little Decoder's rollback: a draft passes unless the large model finds it too unlikely. Lossy (CAP: performance
for accuracy), off by default, for greedy requests too.

Draft x passes while -ln p(x) <= `threshold`, the likeliest where several do. The first that does not is replaced by the
model's own token, and what was drafted behind it is dropped (unless it was that token). p is the distribution that
would be drawn from; for greedy requests the one at temperature 1. What may not be drawn never passes. With a threshold
near 0 nothing passes but what the model is certain of, so the tokens are its own.
The other half, where the small model stops drafting, is the drafter's (`fallback`).

Source: Kim et al., BiLD, arXiv 2302.07863, section 3 (rollback policy).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from penstock.config import SpeculativeConfig
from penstock.core.sampling import TokenRules
from penstock.runner.sampler import Sampler
from penstock.runner.verifiers.walk import RuleVerifier, Walk, probabilities


class BildRule:
    matches_greedy = False

    def __init__(self, threshold: float) -> None:
        self._least = math.exp(-threshold)

    def go(self, walk: Walk) -> None:
        tree = walk.drafted.tree
        rules = _drawing(walk.drafted.rules)
        while (final := walk.final()) is not None:
            children = walk.children[walk.here + 1]
            if children:
                chances = probabilities(final, rules)[[tree.token_ids[child] for child in children]]
                best = int(np.argmax(chances))
                if chances[best] >= self._least and chances[best] > 0.0:
                    walk.enter(children[best])
                    continue
            own = walk.own(final)
            drafted = [child for child in children if tree.token_ids[child] == own]
            if not drafted:
                walk.end(own)
                return
            walk.enter(drafted[0])


def _drawing(rules: TokenRules) -> TokenRules:
    if not rules.greedy:
        return rules
    return msgspec.structs.replace(rules, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def make(sampler: Sampler, config: SpeculativeConfig) -> RuleVerifier:
    return RuleVerifier(sampler, BildRule(config.threshold))
