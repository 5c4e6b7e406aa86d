"""Draft models: named by `speculative_config`, opened, compared with the model they draft for, and made to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.backends.backend import Backend
from penstock.backends.reference import ReferenceBackend
from penstock.base.errors import ConfigError, ModelError, UnsupportedError
from penstock.config import EngineConfig
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights
from penstock.core.model_spec import ModelSpec
from penstock.drafters import DRAFTERS
from penstock.drafters.bench import DraftModel
from penstock.families.checkpoint import Checkpoint
from penstock.families.registry import Described, open_model, read_model
from penstock.families.stretch import stretched
from penstock.launch.hub import local_path
from penstock.launch.names import model_names, wrong_draft
from penstock.launch.speculation import num_drafts
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
OWN_HEAD = "mtp"
"""What the first head that ships with a model is called; the k-th is called mtp-k."""


@dataclass(frozen=True)
class OpenDraft:
    """A draft model found on disk, before a weight is read."""

    name: str
    checkpoint: Checkpoint

    def load(self, held: HeldWeights) -> LoadedDraft:
        spec = self.checkpoint.spec
        weights = load_weights(self.checkpoint, spec, held)
        if spec.pair is not None:  # its drafter writes here what the head is to read
            weights["embed"] = np.zeros((spec.pair.rows, 2 * spec.hidden_size), np.float32)
        return spec, weights


def draft_specs(config: EngineConfig, heads: Sequence[Described] = ()) -> list[NamedSpec]:
    """What the draft models compute; no weight is read. Raises ConfigError for one that cannot be had or run.

    `heads`: those that ship with the model.
    """
    if runs_own_head(config):
        return [
            NamedSpec(name, stretched(head.spec, config.model), head.stored) for name, head in _named(config, heads)
        ]

    def read(name: str) -> Described:
        return read_model(local_path(name, weights=False))

    return [NamedSpec(name, *_had(name, read)[:2]) for name in model_names(config)]


def open_drafts(
    config: EngineConfig, model: Checkpoint, progress: Callable[[int, int], None] | None = None
) -> list[OpenDraft]:
    """`model`: the one they draft for. Raises ConfigError for a draft model that cannot be had or run."""
    if runs_own_head(config):
        return own_heads(config, model)

    def opened(name: str) -> Checkpoint:
        return open_model(local_path(name, progress=progress))

    return [OpenDraft(name, _had(name, opened)) for name in model_names(config)]


def reopened(config: EngineConfig, name: str, path: str) -> OpenDraft:
    """A draft model of a plan, for a rank in a process of its own."""
    found = open_model(path)
    if runs_own_head(config):
        return next(head for head in own_heads(config, found) if head.name == name)
    return OpenDraft(name, found)


def runs_own_head(config: EngineConfig) -> bool:
    return config.speculation is not None and DRAFTERS.traits(config.speculation.method).own_head


def own_heads(config: EngineConfig, model: Checkpoint) -> list[OpenDraft]:
    return [
        OpenDraft(name, replace(head, spec=stretched(head.spec, config.model)))
        for name, head in _named(config, model.heads)
    ]


def _named(config: EngineConfig, heads: Sequence[T]) -> list[tuple[str, T]]:
    """Those that draft, in their order: the k-th makes the k-th draft, so no more than there are drafts."""
    assert heads, "choose_mtp has looked for them"
    assert config.speculation is not None
    most = num_drafts(config.speculation)
    return [(OWN_HEAD if k == 0 else f"{OWN_HEAD}-{k + 1}", head) for k, head in enumerate(heads[:most])]


def choose_mtp(config: EngineConfig, has_head: bool) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """Whether heads for multi-token prediction draft that ship with the model, and why, if there are any.

    Nobody has to ask for it: no token changes, and the controller stops drafting where it does not pay. `ops` has been
    decided. Raises ConfigError if it is asked for and cannot be had.
    """
    given = config.execution.speculative_config
    if given is not None:
        if runs_own_head(config) and not has_head:
            raise _no_head("needs a head that predicts further tokens, and the model's checkpoint has none")
        return config, ()
    if not has_head:
        return config, ()
    cache = config.cache
    if config.execution.ops == "torch":
        why = "the model has a head that predicts further tokens; on torch it drafts if it is asked to"
    elif config.selection is not None or cache.kv_cache_dtype != "auto" or cache.kv_allocator != "paged":
        why = "the model has a head that predicts further tokens; unasked it drafts with plain keys and values only"
    else:
        execution = replace(config.execution, speculative_config='{"method": "mtp"}')
        why = (
            "the model's checkpoint has a head that predicts further tokens; it drafts as long as that pays "
            '(speculative_config {"method": "none"}: never)'
        )
        return replace(config, execution=execution), (Decision("speculative_config", OWN_HEAD, why),)
    return config, (Decision("speculative_config", "none", why),)


def _no_head(why: str) -> ConfigError:
    method = "speculative_config: method mtp "
    return ConfigError(f"{method}{why}; use another method, or leave it away", field="speculative_config")


def check_tokens(draft: OpenDraft, spec: ModelSpec, tokenizer: Tokenizer | None) -> None:
    """Raises ConfigError unless the draft model has the tokens of the model `spec`, whose `tokenizer` may be None.

    Tables of tokens are compared where both have one: models of one family may pad theirs differently.
    """
    if draft.checkpoint.spec.pair is not None:
        return
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
        made.append(DraftModel(draft.name, forward, own, draft.max_len, spec.vocab_size, spec, weights))
    return made


def _had(name: str, get: Callable[[str], T]) -> T:
    try:
        return get(name)
    except (ModelError, UnsupportedError) as error:
        raise wrong_draft(f"{name!r} cannot be used: {error}") from None
