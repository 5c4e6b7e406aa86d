"""A rank built from its description: the files that it names are read, and it is put together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.clock import Clock, MonotonicClock
from penstock.base.errors import InputError, ModelError, UnsupportedError
from penstock.base.spans import Spans
from penstock.config import EngineConfig, from_kwargs
from penstock.core.model_spec import ModelSpec
from penstock.core.weight_swap import WeightFacts
from penstock.executor.rank import Progress, Rank, RankSpec
from penstock.families.checkpoint import Checkpoint, TokenizerFiles
from penstock.families.registry import open_model
from penstock.families.stretch import stretched
from penstock.formats.files import quoted
from penstock.launch.assemble import comm_of, model_parts, shard_name
from penstock.launch.backend import backend_of, packed_weights
from penstock.launch.drafts import OpenDraft, own_heads, reopened, runs_own_head
from penstock.launch.parts import Parts, make_rank
from penstock.launch.plugins import load_plugins
from penstock.launch.selection import kinds_of
from penstock.launch.tokenizer import load_tokenizer, named_tokenizer
from penstock.ops.stored import Weight
from penstock.plan.resolve import Plan
from penstock.runner.logits.grammar_cache import GrammarCache
from penstock.runner.runner import Runner
from penstock.text.grammar.compile import Compiler, encoder_of, vocabulary_of
from penstock.text.limits import Limits
from penstock.weights.load import load_weights, release_pages

if TYPE_CHECKING:
    from penstock.parallel.comm import Comm
    from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found, its headers read.

    `checkpoint` is what the settings make of it (its spec may be stretched), `stored` what the files say. `read` reads
    the tokenizer, once; None if there is none.
    """

    checkpoint: Checkpoint
    stored: ModelSpec
    tokenizer: TokenizerFiles
    read: Callable[[], Tokenizer | None]
    draft_models: Sequence[OpenDraft] = ()


def open_files(config: EngineConfig, path: str | Path, draft_models: Sequence[OpenDraft] = ()) -> ModelFiles:
    """The model at `path` as `config` wants it. Raises: ModelError, UnsupportedError, ConfigError."""
    found = open_model(path)
    checkpoint = replace(found, spec=stretched(found.spec, config.model))
    files = checkpoint.tokenizer
    if config.model.tokenizer is not None:
        files = named_tokenizer(config.model.tokenizer, checkpoint)
    return ModelFiles(
        checkpoint, found.spec, files, cache(partial(load_tokenizer, files, checkpoint.spec)), draft_models
    )


def build_rank(
    spec: RankSpec, loading: Progress | None = None, *, files: ModelFiles | None = None, clock: Clock | None = None,
    spans: Spans | None = None,
) -> Rank:  # fmt: skip
    """`files`: what `spec` names, if this process has opened it already. `spans`: is told what the time goes to.

    Raises: ModelError for weights that cannot be read, ConfigError for settings that do not fit them.
    """
    config, plan = from_kwargs(**spec.config), spec.plan
    load_plugins(config.execution.plugin)  # a rank in a process of its own knows no name of them yet
    if files is None:
        assert spec.model is not None, "weights in memory do not come by themselves"
        named = zip(plan.drafts, spec.drafts, strict=True)
        files = open_files(config, spec.model, [reopened(config, draft.name, path) for draft, path in named])
    checkpoint = files.checkpoint
    if config.execution.simulated_device is not None:
        from penstock.launch.simulated import simulated_rank  # nobody else needs it

        ends = limits_of(checkpoint.spec, checkpoint.generation_config, plan).eos_token_ids
        return simulated_rank(config, plan, checkpoint.spec, ends, clock or MonotonicClock())
    grammars = None
    if not config.model.skip_tokenizer_init and files.tokenizer.kind != "none":
        grammars = grammar_cache(
            files.read, limits_of(checkpoint.spec, checkpoint.generation_config, plan), config.cache.grammar_cache_bytes
        )
        if spec.warm_grammars:
            with suppress(InputError):  # tokens that are not bytes; the validator refuses
                grammars.compiler()
    comm = comm_of(spec)
    if comm is not None:
        # They are mapped, and none of those that this process starts should have them.
        for fd in spec.links.descriptors:
            os.close(fd)
    spans = spans or Spans()
    parts, weights, packed_file = read_parts(config, plan, files, grammars, loading, comm=comm, spans=spans)
    rank = make_rank(config, plan, parts, clock or MonotonicClock(), poison=spec.poison, rank=spec.rank)
    rank.packed_file = packed_file
    release_pages(weights)
    spans.end("model put together")
    rank.reload = None if comm is not None else Reloader(config, plan, files, grammars, clock or MonotonicClock())
    return rank


class Reloader:
    """See `runner.runner.Reload`: what read the first weights reads others."""

    def __init__(
        self, config: EngineConfig, plan: Plan, files: ModelFiles, grammars: GrammarCache | None, clock: Clock
    ) -> None:
        self._config, self._plan, self._files, self._grammars, self._clock = config, plan, files, grammars, clock
        self._next: tuple[ModelFiles, Parts, dict[str, Weight]] | None = None
        self._reads = threading.Lock()

    def read(self, path: str) -> WeightFacts:
        """Raises: UnsupportedError, ModelError, CapacityError with why these cannot follow the running ones."""
        began = self._clock.now()
        if self._next is not None or not self._reads.acquire(blocking=False):
            raise UnsupportedError("weights are being swapped already; wait for that")
        try:
            facts = self._read(path)
        finally:
            self._reads.release()
        return msgspec.structs.replace(facts, read_s=self._clock.now() - began)

    def _read(self, path: str) -> WeightFacts:
        from penstock.launch.reload import facts_of, same_model, stamps  # nobody else needs it

        config, files = self._config, self._files
        checkpoint, stored = same_model(config, self._plan, files.checkpoint, path)
        drafts = own_heads(config, checkpoint) if runs_own_head(config) else files.draft_models
        files = replace(files, checkpoint=checkpoint, stored=stored, draft_models=drafts)
        before = stamps(checkpoint)
        facts = facts_of(config, self._plan, checkpoint)
        parts, weights, _ = read_parts(self._config, self._plan, files, self._grammars, None, keep=False)
        if stamps(checkpoint) != before:
            raise ModelError(f"{quoted(path)} changed while it was read")
        self._next = files, parts, weights
        return facts

    def switch(self, rank: Runner) -> Runner:
        assert self._next is not None, "nothing was readied"
        (self._files, parts, weights), self._next = self._next, None
        new = make_rank(self._config, self._plan, parts, self._clock, like=rank)
        release_pages(weights)
        new.packed_file, new.reload = rank.packed_file, self
        return new


def read_parts(
    config: EngineConfig,
    plan: Plan,
    files: ModelFiles,
    grammars: GrammarCache | None,
    loading: Progress | None,
    *,
    keep: bool = True,
    comm: Comm | None = None,
    spans: Spans | None = None,
) -> tuple[Parts, dict[str, Weight], str]:
    """The parts of a rank, the weights as they were read, and `Executor.packed_file`. `keep`: what is packed is kept
    for the next start. `comm`: with the other ranks. Raises as `build_rank`."""
    checkpoint = files.checkpoint
    needed = config.speculation is not None or config.selection is not None
    tokenizer = files.read() if needed and not config.model.skip_tokenizer_init else None
    backend = backend_of(config)
    packed = packed_weights(config, checkpoint, plan, backend, "" if comm is None else shard_name(config, comm))
    if packed is not None and not keep and packed.matrices is None:
        packed = None
    skip = packed.names() if packed is not None else frozenset()
    if comm is not None and config.execution.enable_expert_parallel:
        from penstock.parallel.experts import elsewhere  # one rank has all

        skip |= elsewhere(checkpoint.spec, comm.rank, comm.size)
    was_packed = packed is not None and packed.matrices is not None
    weights = load_weights(checkpoint.weights, checkpoint.spec, plan.held, loading, skip)
    release_pages(weights)
    if spans is not None:
        spans.end("packed weights read" if was_packed else "weights read")
    load_adapter = None
    if config.lora.enable_lora:
        from penstock.launch.adapters import adapter_loader  # nobody else needs it at the start

        load_adapter = adapter_loader(config, checkpoint)
    parts = model_parts(
        config,
        checkpoint.spec,
        weights,
        plan,
        grammars=grammars,
        packed=packed,
        backend=backend,
        loaded_drafts=[
            draft_model.load(draft.held) for draft_model, draft in zip(files.draft_models, plan.drafts, strict=True)
        ],
        encode=None if tokenizer is None else tokenizer.encode_inner,
        kinds=kinds_of(tokenizer),
        load_adapter=load_adapter,
        comm=comm,
    )
    packed_file = "" if packed is None else "read" if was_packed else "made"
    return parts, weights, packed_file


def grammar_cache(read: Callable[[], Tokenizer | None], limits: Limits, max_bytes: int) -> GrammarCache:
    """Compiled grammars for this model's tokens, which `read` when the first grammar comes.

    The validator refuses grammars for a model without a tokenizer, or whose tokens are not bytes.
    """

    def tokenizer() -> Tokenizer:
        found = read()
        if found is None:
            raise InputError("structured_outputs need a tokenizer", param="structured_outputs")
        return found

    def make() -> Compiler:
        vocabulary = vocabulary_of(tokenizer(), limits.vocab_size, limits.eos_token_ids)
        return Compiler(vocabulary, encoder_of(tokenizer()))

    return GrammarCache(make, max_bytes, end_ids=lambda: frozenset({*tokenizer().special_ids, *limits.eos_token_ids}))


def limits_of(spec: ModelSpec, generation_config: Mapping[str, Any], plan: Plan) -> Limits:
    """What a request may ask of this model; its end tokens are those of config.json and generation_config.json."""
    given = generation_config.get("eos_token_id")
    more = given if isinstance(given, list) else [given]
    ends = [t for t in more if isinstance(t, int) and not isinstance(t, bool) and 0 <= t < spec.vocab_size]
    return Limits(
        vocab_size=spec.num_ids,
        generates=spec.has_head,
        pooler=spec.pooler,
        num_words=spec.vocab_size if spec.token_types > 1 else 0,
        max_model_len=plan.max_model_len,
        kv_capacity_tokens=plan.kv_capacity_tokens,
        eos_token_ids=tuple(dict.fromkeys([*spec.eos_token_ids, *ends])),
    )
