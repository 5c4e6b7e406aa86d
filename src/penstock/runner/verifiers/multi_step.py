"""Multi-step speculative sampling on trees. Exact in distribution; greedy requests: exact in tokens.

Drafts behind one token may be drawn with or without replacement, by one drafter or by several, or be chosen.
Source: Miao et al., SpecInfer, arXiv 2305.09781, algorithm 2; without replacement: Sequoia, arXiv 2402.12374.
"""

from __future__ import annotations

from penstock.config import SpeculativeConfig
from penstock.runner.sampler import Sampler
from penstock.runner.verifiers.draws import DrawRule, one_by_one
from penstock.runner.verifiers.walk import RuleVerifier


def make(sampler: Sampler, config: SpeculativeConfig) -> RuleVerifier:
    return RuleVerifier(sampler, DrawRule(one_by_one))
