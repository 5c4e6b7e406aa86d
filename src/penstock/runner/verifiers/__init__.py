"""Verifiers that somebody has to ask for. The one that is used otherwise is `runner.verify`: exact in tokens.

An entry names a function `make(Sampler, SpeculativeConfig) -> Verifying`. Its traits say what it promises; what is
lossy is never the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.base.registry import Registry

if TYPE_CHECKING:
    from penstock.config import SpeculativeConfig
    from penstock.runner.sampler import Sampler
    from penstock.runner.verify import Verifying

EXACT_TOKENS = "exact in tokens"
EXACT_DISTRIBUTION = "exact in distribution"
LOSSY = "lossy"
"""Exact in tokens: those of decoding without drafts, for every seed. Exact in distribution: greedy tokens are the
same; drawn ones have the same distribution, by other draws: the same seed gives the same tokens only where the steps
fall the same way. Lossy (CAP: performance for accuracy): other outputs; typical: of requests that draw only."""

VERIFIERS: Registry[Callable[[Sampler, SpeculativeConfig], Verifying], str] = Registry("verifier")
VERIFIERS.add("match", "penstock.runner.verifiers.match:make", EXACT_TOKENS)
VERIFIERS.add("speculative-sampling", "penstock.runner.verifiers.rejection:make", EXACT_DISTRIBUTION)
VERIFIERS.add("multi-step", "penstock.runner.verifiers.multi_step:make", EXACT_DISTRIBUTION)
VERIFIERS.add("spectr", "penstock.runner.verifiers.spectr:make", EXACT_DISTRIBUTION)
VERIFIERS.add("typical", "penstock.runner.verifiers.typical:make", LOSSY)
VERIFIERS.add("bild", "penstock.runner.verifiers.bild:make", LOSSY)
