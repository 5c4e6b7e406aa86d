"""The default, under its name. Exact in tokens: see `runner.verify`."""

from __future__ import annotations

from penstock.config import SpeculativeConfig
from penstock.runner.sampler import Sampler
from penstock.runner.verify import Verifier


def make(sampler: Sampler, config: SpeculativeConfig) -> Verifier:
    return Verifier(sampler)
