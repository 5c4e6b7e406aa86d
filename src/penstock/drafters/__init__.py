"""One file per drafter. See `core.protocols.Drafter`; an entry names a function `make(DraftBench) -> Drafter`."""

from __future__ import annotations

from penstock.base.registry import Registry

DRAFTERS = Registry("drafter")
DRAFTERS.add("ngram", "penstock.drafters.ngram:make")

DEFAULT_DRAFTS = {"ngram": 5}
"""Guesses for one sequence in one step where `num_speculative_tokens` does not say; others: 8."""
