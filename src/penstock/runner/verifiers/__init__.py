"""Verifiers that somebody has to ask for. The one that is used otherwise is `runner.verify`: exact in tokens.

An entry names a function `make(Sampler, SpeculativeConfig) -> Verifying`. LABELS say what each promises; what is lossy
is never the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.base.registry import Registry

if TYPE_CHECKING:
    from penstock.config import SpeculativeConfig
    from penstock.runner.sampler import Sampler
    from penstock.runner.verify import Verifying

VERIFIERS: Registry[Callable[[Sampler, SpeculativeConfig], Verifying], str] = Registry("verifier")
VERIFIERS.add("match", "penstock.runner.verifiers.match:make")
VERIFIERS.add("speculative-sampling", "penstock.runner.verifiers.rejection:make")
VERIFIERS.add("multi-step", "penstock.runner.verifiers.multi_step:make")
VERIFIERS.add("spectr", "penstock.runner.verifiers.spectr:make")
VERIFIERS.add("typical", "penstock.runner.verifiers.typical:make")
VERIFIERS.add("bild", "penstock.runner.verifiers.bild:make")

EXACT_TOKENS = "exact in tokens"
EXACT_DISTRIBUTION = "exact in distribution"
LOSSY = "lossy"

LABELS = {
    "match": EXACT_TOKENS,
    "speculative-sampling": EXACT_DISTRIBUTION,
    "multi-step": EXACT_DISTRIBUTION,
    "spectr": EXACT_DISTRIBUTION,
    "typical": LOSSY,
    "bild": LOSSY,
}
"""Exact in tokens: those of decoding without guesses, for every seed. Exact in distribution: greedy tokens are the
same; drawn ones have the same distribution, by other draws: the same seed gives the same tokens only where the steps
fall the same way. Lossy (CAP: performance for accuracy): other outputs; typical: of requests that draw only."""
