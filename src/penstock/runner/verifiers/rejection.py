"""Speculative sampling along one path. Exact in distribution; greedy requests: exact in tokens.

Of a tree it follows the first draft behind each token; `multi-step` looks at all of them.
Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

from penstock.config import SpeculativeConfig
from penstock.runner.sampler import Sampler
from penstock.runner.verifiers.draws import DrawRule, one_by_one
from penstock.runner.verifiers.walk import RuleVerifier


def make(sampler: Sampler, config: SpeculativeConfig) -> RuleVerifier:
    return RuleVerifier(sampler, DrawRule(one_by_one, most=1))
