"""One file per drafter. See `core.protocols.Drafter`; an entry names a function `make(DraftBench) -> Drafter`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.base.registry import Registry
from penstock.core.protocols import Drafter

if TYPE_CHECKING:
    from penstock.config.speculative import SpeculativeConfig
    from penstock.drafters.bench import DraftBench


class DrafterTraits(NamedTuple):
    """What must be known of a drafter before it is made.

    `num_drafts`: for one sequence in one step, where `num_speculative_tokens` does not say. `most_models`: draft
    models that it takes at most; it takes at least one, or none at all if this is 0. `branches`: its drafts are trees
    that branch, whatever the setting `tree` says. `own_head`: it runs the head that ships in the model's checkpoint.
    """

    num_drafts: int = 8
    most_models: int = 0
    branches: bool = False
    own_head: bool = False


DRAFTERS: Registry[Callable[[DraftBench], Drafter], DrafterTraits] = Registry("drafter")
DRAFTERS.add("ngram", "penstock.drafters.ngram:make", DrafterTraits(num_drafts=5))
DRAFTERS.add("early-exit", "penstock.drafters.self_draft:make_early_exit", DrafterTraits(num_drafts=3))
DRAFTERS.add("self-draft", "penstock.drafters.self_draft:make_self_draft", DrafterTraits(num_drafts=3))
DRAFTERS.add("medusa", "penstock.drafters.medusa:make", DrafterTraits(branches=True))
DRAFTERS.add("eagle", "penstock.drafters.eagle:make", DrafterTraits(branches=True))
DRAFTERS.add("mtp", "penstock.drafters.mtp:make", DrafterTraits(num_drafts=3, own_head=True))
DRAFTERS.add("draft-model", "penstock.drafters.draft_model:make", DrafterTraits(most_models=1))
DRAFTERS.add("draft_model", "penstock.drafters.draft_model:make", DrafterTraits(most_models=1))  # as vLLM spells it
DRAFTERS.add("specinfer", "penstock.drafters.specinfer:make", DrafterTraits(most_models=8, branches=True))
DRAFTERS.add("reference", "penstock.drafters.reference:make", DrafterTraits(num_drafts=10))
DRAFTERS.add("suffix", "penstock.drafters.suffix:make", DrafterTraits(num_drafts=24, branches=True))
DRAFTERS.add("rest", "penstock.drafters.rest:make", DrafterTraits(num_drafts=16))
DRAFTERS.add("function", "penstock.drafters.function:make", DrafterTraits())
DRAFTERS.add("jacobi", "penstock.drafters.jacobi:make", DrafterTraits())
DRAFTERS.add("gauss-seidel", "penstock.drafters.jacobi:make_gauss_seidel", DrafterTraits())
DRAFTERS.add("lookahead", "penstock.drafters.lookahead:make", DrafterTraits(num_drafts=32, branches=True))


def branches(config: SpeculativeConfig) -> bool:
    """Whether a drafter's drafts are trees that branch."""
    return config.tree != "chain" or DRAFTERS.traits(config.method).branches
