"""From a configuration to a running engine. What does not fit is refused before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial

import msgspec

from penstock.base.clock import Clock, MonotonicClock
from penstock.base.errors import InputError
from penstock.config import EngineConfig
from penstock.core.events import Decision
from penstock.core.machine import Machine
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import ModelSpec
from penstock.drafters import DRAFTERS
from penstock.engine.core import EngineCore
from penstock.executor import EXECUTORS
from penstock.families.checkpoint import Checkpoint
from penstock.families.registry import open_model, read_model
from penstock.families.stretch import stretch_decision, stretched
from penstock.kv import KV_MANAGERS
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.prefix import PREFIX_CACHES
from penstock.launch.assemble import assemble
from penstock.launch.drafts import check_method, check_tokens, draft_specs, open_drafts
from penstock.launch.hub import local_path
from penstock.launch.native import choose_ops, device_of, packed_weights
from penstock.launch.progress import loading
from penstock.launch.selection import keeping_of, kinds_of
from penstock.launch.tokenizer import load_tokenizer, named_tokenizer
from penstock.ops import OP_TABLES
from penstock.ops.ref.attention import ATTENTION_BACKENDS
from penstock.plan.cost import RooflineTimer
from penstock.plan.drafts import NamedSpec
from penstock.plan.probe import probe
from penstock.plan.resolve import Plan, resolve
from penstock.runner.logits.grammar_cache import GrammarCache
from penstock.sched.policy import make_policy
from penstock.text.grammar.compile import Compiler, encoder_of, vocabulary_of
from penstock.text.tokenizer import Tokenizer
from penstock.text.validate import Limits
from penstock.weights.load import load_weights, release_pages

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass
class Engine:
    """Everything a front end needs."""

    core: EngineCore
    plan: Plan
    spec: ModelSpec
    limits: Limits
    tokenizer: Tokenizer | None
    clock: Clock
    chat_template: str | None
    named_templates: dict[str, str]
    no_tokenizer: str
    """Why there is no tokenizer, if the model has none. An engine that serves has none of its own (`start`)."""
    grammars: GrammarCache | None = None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.plan.decisions


def start(
    config: EngineConfig,
    *,
    machine: Machine | None = None,
    progress: Progress | None = None,
    serving: bool = False,
) -> Engine:
    """Open the model, plan, load the weights and assemble the engine.

    `serving`: people wait for streams, so steps are bounded in seconds (`sched.budget`); a front end has the tokenizer,
    and the engine reads one only if a part of it does (a drafter, a selector, the first grammar).

    Raises: ModelError, UnsupportedError (the model), ConfigError, CapacityError (the settings), each before any weight
    is read if it can be known by then.
    """
    check_names(config)
    with loading("downloading") as download:
        path = local_path(config.model.model, config.model.revision, download)
        checkpoint = open_model(path)
        guessers = open_drafts(config, download)
    own = checkpoint.spec
    checkpoint = replace(checkpoint, spec=stretched(own, config.model))
    config, chosen = choose_ops(config, checkpoint.spec)
    machine = machine or probe()
    named = [NamedSpec(d.name, d.checkpoint.spec, d.checkpoint.stored) for d in guessers]
    plan = resolve(config, checkpoint.spec, machine, named, keeping_of(config), checkpoint.stored)
    files = checkpoint.tokenizer
    if config.model.tokenizer is not None:
        files = named_tokenizer(config.model.tokenizer, checkpoint)
    read = cache(partial(load_tokenizer, files, checkpoint.spec))
    # A server's front reads text itself: its engine reads a tokenizer only if a part of it needs one. A large
    # vocabulary is 40 MB and half a second.
    needed = not serving or config.speculation is not None or config.selection is not None
    tokenizer = read() if needed and not config.model.skip_tokenizer_init else None
    for guesser in guessers:
        check_tokens(guesser, checkpoint.spec, tokenizer)
    plan = msgspec.structs.replace(plan, decisions=(*chosen, *stretch_decision(own, checkpoint.spec), *plan.decisions))
    limits = limits_of(checkpoint, plan)
    grammars = None
    if not config.model.skip_tokenizer_init and files.kind != "none":
        grammars = grammar_cache(read, limits, config.cache.grammar_cache_bytes)
        if serving and config.cache.warm_grammars:
            with suppress(InputError):  # tokens that are not bytes; the validator refuses
                grammars.compiler()
    packed = packed_weights(config, checkpoint, plan)
    skip = packed.names() if packed is not None else ()
    weights = load_weights(checkpoint.weights, checkpoint.spec, plan.held, progress, skip)
    loaded = [guesser.load(draft.held) for guesser, draft in zip(guessers, plan.drafts, strict=True)]
    clock = MonotonicClock()
    # Offline nobody waits for a stream, so steps are not bounded in seconds; preemption still weighs its costs.
    device = device_of(config, machine.num_cores)
    timer = RooflineTimer(checkpoint.spec, device, dtype=plan.dtype, kv_dtype=plan.kv_dtype)
    core = assemble(
        config,
        checkpoint.spec,
        weights,
        plan,
        clock=clock,
        timer=timer,
        seconds_budget=serving,
        grammars=grammars,
        packed=packed,
        guessers=loaded,
        encode=None if tokenizer is None else tokenizer.encode_inner,
        kinds=kinds_of(tokenizer),
    )
    release_pages(weights)
    return Engine(
        core=core,
        plan=plan,
        spec=checkpoint.spec,
        limits=limits,
        tokenizer=tokenizer,
        clock=clock,
        chat_template=files.chat_template,
        named_templates=files.named_templates,
        no_tokenizer=files.reason or "the engine was started with skip_tokenizer_init",
        grammars=grammars,
    )


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


def plan_of(config: EngineConfig, machine: Machine | None = None) -> Plan:
    """What `start` would decide, without reading a weight. Raises as `start`."""
    check_names(config)
    own, stored = read_model(local_path(config.model.model, config.model.revision, weights=False))
    spec = stretched(own, config.model)
    config, chosen = choose_ops(config, spec)
    plan = resolve(config, spec, machine or probe(), draft_specs(config), keeping_of(config), stored)
    changed = stretch_decision(own, spec)
    return msgspec.structs.replace(plan, decisions=(*chosen, *changed, *plan.decisions))


def check_names(config: EngineConfig) -> None:
    """Raises ConfigError, naming the choices, for a part that does not exist: before anything is opened."""
    PREFIX_CACHES.get(config.cache.prefix_cache)
    EVICTION_POLICIES.get(config.cache.eviction)
    KV_MANAGERS.get(config.cache.kv_allocator)
    make_policy(config.scheduler.scheduling_policy)
    if config.execution.ops != "auto":
        OP_TABLES.get(config.execution.ops)
    parse_scheme(config.model.quantization)
    keeping_of(config)
    ATTENTION_BACKENDS.get(config.execution.attention_backend)
    EXECUTORS.get(config.execution.executor)
    if config.speculation is not None:
        DRAFTERS.get(config.speculation.method)
        check_method(config.speculation)


def limits_of(checkpoint: Checkpoint, plan: Plan) -> Limits:
    """What a request may ask of this model; its end tokens are those of config.json and generation_config.json."""
    spec = checkpoint.spec
    given = checkpoint.generation_config.get("eos_token_id")
    more = given if isinstance(given, list) else [given]
    ends = [t for t in more if isinstance(t, int) and not isinstance(t, bool) and 0 <= t < spec.vocab_size]
    return Limits(
        vocab_size=spec.vocab_size,
        max_model_len=plan.max_model_len,
        kv_capacity_tokens=plan.kv_capacity_tokens,
        eos_token_ids=tuple(dict.fromkeys([*spec.eos_token_ids, *ends])),
    )
