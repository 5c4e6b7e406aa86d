"""One file per drafter. See `core.protocols.Drafter`; an entry names a function `make(DraftBench) -> Drafter`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.base.registry import Registry
from penstock.core.protocols import Drafter

if TYPE_CHECKING:
    from penstock.drafters.bench import DraftBench

DRAFTERS: Registry[Callable[[DraftBench], Drafter], None] = Registry("drafter")
DRAFTERS.add("ngram", "penstock.drafters.ngram:make")
DRAFTERS.add("early-exit", "penstock.drafters.self_draft:make_early_exit")
DRAFTERS.add("self-draft", "penstock.drafters.self_draft:make_self_draft")
DRAFTERS.add("medusa", "penstock.drafters.medusa:make")
DRAFTERS.add("eagle", "penstock.drafters.eagle:make")
DRAFTERS.add("draft-model", "penstock.drafters.draft_model:make")
DRAFTERS.add("draft_model", "penstock.drafters.draft_model:make")  # as vLLM spells it
DRAFTERS.add("specinfer", "penstock.drafters.specinfer:make")
DRAFTERS.add("reference", "penstock.drafters.reference:make")
DRAFTERS.add("suffix", "penstock.drafters.suffix:make")
DRAFTERS.add("rest", "penstock.drafters.rest:make")
DRAFTERS.add("function", "penstock.drafters.function:make")
DRAFTERS.add("jacobi", "penstock.drafters.jacobi:make")
DRAFTERS.add("gauss-seidel", "penstock.drafters.jacobi:make_gauss_seidel")
DRAFTERS.add("lookahead", "penstock.drafters.lookahead:make")

DEFAULT_DRAFTS = {
    "ngram": 5, "reference": 10, "suffix": 24, "rest": 16, "lookahead": 32, "early-exit": 3, "self-draft": 3,
}  # fmt: skip
"""Guesses for one sequence in one step where `num_speculative_tokens` does not say; others: 8."""

MOST_MODELS = {"draft-model": 1, "draft_model": 1, "specinfer": 8}
"""Draft models that a method takes at most; it takes at least one. The others take none."""
