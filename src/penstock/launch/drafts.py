"""Draft models: named by `speculative_config`, opened, compared with the model they draft for, and made to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from penstock.backends.backend import Backend
from penstock.backends.reference import ReferenceBackend
from penstock.base.errors import ModelError, UnsupportedError
from penstock.config import EngineConfig
from penstock.core.held_weights import HeldWeights
from penstock.core.model_spec import ModelSpec
from penstock.drafters.bench import DraftModel
from penstock.families.checkpoint import Checkpoint
from penstock.families.registry import Described, open_model, read_model
from penstock.launch.hub import local_path
from penstock.launch.names import model_names, wrong_draft
from penstock.launch.tokenizer import load_tokenizer
from penstock.ops.stored import Weight
from penstock.plan.drafts import NamedSpec
from penstock.plan.resolve import Plan
from penstock.runner.assemble import DecoderModel
from penstock.weights.load import load_weights

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

T = TypeVar("T")
LoadedDraft = tuple[ModelSpec, Mapping[str, Weight]]
"""A draft model and its weights by logical name."""


@dataclass(frozen=True)
class OpenDraft:
    """A draft model found on disk, before a weight is read."""

    name: str
    checkpoint: Checkpoint

    def load(self, held: HeldWeights) -> LoadedDraft:
        return self.checkpoint.spec, load_weights(self.checkpoint, self.checkpoint.spec, held)


def draft_specs(config: EngineConfig) -> list[NamedSpec]:
    """What the draft models compute; no weight is read. Raises ConfigError for one that cannot be had or run."""

    def read(name: str) -> Described:
        return read_model(local_path(name, weights=False))

    return [NamedSpec(name, *_had(name, read)[:2]) for name in model_names(config)]


def open_drafts(config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> list[OpenDraft]:
    """Raises ConfigError for a draft model that cannot be had or run."""

    def opened(name: str) -> Checkpoint:
        return open_model(local_path(name, progress=progress))

    return [OpenDraft(name, _had(name, opened)) for name in model_names(config)]


def check_tokens(draft: OpenDraft, spec: ModelSpec, tokenizer: Tokenizer | None) -> None:
    """Raises ConfigError unless the draft model has the tokens of the model `spec`, whose `tokenizer` may be None.

    Tables of tokens are compared where both have one: models of one family may pad theirs differently.
    """
    own = None if tokenizer is None else load_tokenizer(draft.checkpoint.tokenizer, draft.checkpoint.spec)
    if tokenizer is None or own is None:
        ours, theirs = spec.vocab_size, draft.checkpoint.spec.vocab_size
    else:
        ours, theirs = tokenizer.vocab_size, own.vocab_size
    if ours != theirs:
        raise wrong_draft(
            f"{draft.name} has {theirs} tokens and the model has {ours}; use a draft model with the model's own "
            "tokenizer"
        )
    if tokenizer is None or own is None:
        return
    for token_id in range(ours):
        if tokenizer.id_to_piece(token_id) != own.id_to_piece(token_id):
            raise wrong_draft(
                f"token {token_id} of {draft.name} is {own.id_to_piece(token_id)!r} and the model's is "
                f"{tokenizer.id_to_piece(token_id)!r}; use a draft model with the model's own tokenizer"
            )


def draft_models(
    config: EngineConfig, plan: Plan, loaded: Sequence[LoadedDraft], backend: Backend
) -> list[DraftModel]:  # fmt: skip
    """The draft models of `plan.drafts`, on the model's own backend where that can run them."""
    made: list[DraftModel] = []
    assert len(loaded) == len(plan.drafts), "the plan knows the draft models"
    for (spec, weights), draft in zip(loaded, plan.drafts, strict=True):
        own = tuple(plan.groups[g] for g in draft.groups)
        model = DecoderModel(spec=spec, weights=weights, groups=own, max_model_len=draft.max_len)
        place = backend if backend.why_not(config, spec) is None else ReferenceBackend.of(config, 1)
        forward = model.on(place, max_tokens=plan.max_num_batched_tokens, rank_groups=plan.groups)
        made.append(DraftModel(draft.name, forward, own, draft.max_len, spec.vocab_size))
    return made


def _had(name: str, get: Callable[[str], T]) -> T:
    try:
        return get(name)
    except (ModelError, UnsupportedError) as error:
        raise wrong_draft(f"{name!r} cannot be used: {error}") from None
