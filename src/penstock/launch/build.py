"""From a configuration to a running engine. What does not fit is refused before a weight is read."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.backends import BACKENDS
from penstock.base.clock import Clock, MonotonicClock
from penstock.base.errors import ConfigError
from penstock.base.spans import Spans
from penstock.config import EngineConfig
from penstock.core.events import Decision
from penstock.core.machine import Machine
from penstock.core.messages import EngineInfo
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import StepTimer
from penstock.core.step_shape import EMPTY
from penstock.engine.blackbox import BlackBox
from penstock.engine.core import EngineCore
from penstock.executor.rank import Progress, RankSpec
from penstock.families.registry import read_model, unread_decision
from penstock.families.stretch import stretch_decision, stretched
from penstock.launch.assemble import engine_over
from penstock.launch.backend import backend_decisions, choose_ops, device_of, machine_of, traits_of
from penstock.launch.drafts import check_tokens, choose_mtp, draft_specs, open_drafts
from penstock.launch.encoder import choose_encoding
from penstock.launch.hub import local_path
from penstock.launch.kv_events import FollowedBlocks, events_decision, followed_blocks, open_events
from penstock.launch.kv_store import fingerprint, open_store
from penstock.launch.names import check_names
from penstock.launch.progress import loading
from penstock.launch.rank import build_rank, limits_of, open_files
from penstock.launch.selection import keeping_of
from penstock.launch.store import Hold, ModelStore
from penstock.plan.adapters import adapter_units
from penstock.plan.cost import RooflineTimer
from penstock.plan.drafts import NamedSpec
from penstock.plan.probe import probe
from penstock.plan.resolve import Plan, resolve
from penstock.text.limits import Limits

if TYPE_CHECKING:
    from penstock.launch.adapters import AdapterBook
    from penstock.text.defaults import Defaults
    from penstock.text.tokenizer import Tokenizer

log = logging.getLogger("penstock.launch")


@dataclass
class Engine:
    """Everything a front end needs."""

    core: EngineCore
    plan: Plan
    spec: ModelSpec
    limits: Limits
    sampling_defaults: Defaults | None
    """For requests that name none (`text.defaults`); none in an engine that serves, whose front knows."""
    tokenizer: Tokenizer | None
    clock: Clock
    chat_template: str | None
    named_templates: dict[str, str]
    no_tokenizer: str
    """Why there is no tokenizer, if the model has none. An engine that serves has none of its own (`start`)."""
    adapters: AdapterBook | None
    """None: it serves none."""
    hold: Hold
    """Keeps models that were pulled from being removed."""
    followed: FollowedBlocks | None = None
    """Which blocks it holds, for a router that follows them."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.plan.decisions


def start(
    config: EngineConfig,
    *,
    machine: Machine | None = None,
    progress: Progress | None = None,
    serving: bool = False,
    box: BlackBox | None = None,
    block_secret: bytes = b"",
    spans: Spans | None = None,
) -> Engine:
    """Open the model, plan, load the weights and assemble the engine.

    `serving`: people wait for streams, so steps are bounded in seconds (`sched.budget`); a front end has the tokenizer,
    and the engine reads one only if a part of it does (a drafter, a selector, the first grammar). `box`: where the
    model counts its operations. `block_secret`: a router follows which blocks are held (`Engine.followed`). `spans`: is
    told what the time goes to.

    Raises: ModelError, UnsupportedError (the model), ConfigError, CapacityError (the settings), each before any weight
    is read if it can be known by then.
    """
    if config.execution.distributed_executor_backend == "ray":
        from penstock.launch.ray_hosts import RayHosts  # nobody else needs it; a server has them already

        hosts = RayHosts(config)
        try:
            engine = start(
                hosts.config, machine=machine, progress=progress, serving=serving, box=box, block_secret=block_secret,
                spans=spans,
            )  # fmt: skip
        except BaseException:
            hosts.close()
            raise
        weakref.finalize(engine, hosts.close)
        return engine
    check_names(config)
    spans = spans or Spans()
    if config.execution.is_replicated and not serving:
        field = config.execution.replicas_field
        raise ConfigError(f"{field}: a program has one engine of its own; penstock serve has several", field=field)
    with loading("downloading") as download:
        path = local_path(config.model.model, config.model.revision, download)
        files = open_files(config, path)
        config, chosen = choose_ops(config, files.checkpoint.spec)
        config, encodes = choose_encoding(config, files.checkpoint.spec)
        config, speculates = choose_mtp(config, bool(files.checkpoint.heads))
        draft_models = open_drafts(config, files.checkpoint, download)
    drafts = tuple(str(draft_model.checkpoint.path) for draft_model in draft_models)
    hold = ModelStore().hold(path, *drafts)
    checkpoint = files.checkpoint
    machine = machine_of(config, machine or probe(), checkpoint.spec)
    if config.execution.tuned_for is not None:
        from penstock.launch.tuned import check_tuned

        check_tuned(config.execution.tuned_for, path, checkpoint.spec, machine)
    if config.execution.memory_bytes is not None:
        from penstock.launch.offload import choose_offload  # nobody else needs it at the start

        own = machine
        config, shared = choose_offload(
            config, checkpoint.spec, own, checkpoint.stored, checkpoint, lambda small: start(small, machine=own).core
        )
        chosen = (*chosen, *shared)
        for decision in shared:
            log.info("%s: %s: %s", decision.name, decision.value, decision.why)
    named = [NamedSpec(d.name, d.checkpoint.spec, d.checkpoint.stored) for d in draft_models]
    config, plan = _planned(config, checkpoint.spec, machine, named, checkpoint.stored)
    spans.end("model's files opened, planned")
    # A server's front reads text itself: its engine reads a tokenizer only if a part of it needs one. A large
    # vocabulary is 40 MB and half a second.
    needed = not serving or config.speculation is not None or config.selection is not None
    tokenizer = files.read() if needed and not config.model.skip_tokenizer_init else None
    for draft_model in draft_models:
        check_tokens(draft_model, checkpoint.spec, tokenizer)
    rank = RankSpec(
        config=config.as_kwargs(),
        plan=msgspec.structs.replace(plan, decisions=()),
        model=str(path),
        drafts=drafts,
        warm_grammars=serving and config.cache.warm_grammars,
    )
    clock = MonotonicClock()
    store = open_store(
        config, partial(fingerprint, config, checkpoint, plan, BACKENDS.get(config.execution.ops).why()), plan
    )
    events = open_events(config)
    followed = followed_blocks(block_secret, config, plan, events)
    # Offline nobody waits for a stream, so steps are not bounded in seconds; preemption still weighs its costs.
    device = device_of(config, machine.num_cores)
    timer: StepTimer = RooflineTimer(checkpoint.spec, device, dtype=plan.dtype, kv_dtype=plan.kv_dtype)
    if config.execution.simulated_device is not None:
        from penstock.launch.simulated import scheduling_timer  # nobody else needs it

        timer = scheduling_timer(config, checkpoint.spec, plan, timer)
    core = engine_over(
        config,
        plan,
        rank,
        partial(build_rank, files=replace(files, draft_models=draft_models), clock=clock, spans=spans),
        clock,
        loading=progress,
        box=box,
        timer=timer,
        seconds_budget=serving,
        store=store,
        events=followed or events,
    )
    spans.end("KV memory, scheduler")
    limits = _limits(config, checkpoint.spec, checkpoint.generation_config, plan)
    unread = unread_decision(checkpoint.spec)
    for decision in unread:
        log.warning("%s are %s: %s", decision.name, decision.value, decision.why)
    decisions = (
        *chosen,
        *encodes,
        *speculates,
        *unread,
        *stretch_decision(files.stored, checkpoint.spec),
        *plan.decisions,
    )
    decisions = (*decisions, *backend_decisions(config, checkpoint.spec, plan), *events_decision(config))
    adapters = None
    if config.lora.enable_lora:
        from penstock.launch.adapters import book_of  # nobody else needs it at the start

        adapters = book_of(config, checkpoint)
    defaults = None
    if not serving and limits.generates:
        defaults, said = _sampling(checkpoint.generation_config, limits, config)
        decisions = (*decisions, said)
    return Engine(
        core=core,
        plan=msgspec.structs.replace(plan, decisions=decisions),
        spec=checkpoint.spec,
        limits=limits,
        sampling_defaults=defaults,
        tokenizer=tokenizer,
        clock=clock,
        chat_template=files.tokenizer.chat_template,
        named_templates=files.tokenizer.named_templates,
        no_tokenizer=files.tokenizer.reason or "the engine was started with skip_tokenizer_init",
        adapters=adapters,
        hold=hold,
        followed=followed,
    )


def _planned(
    config: EngineConfig, spec: ModelSpec, machine: Machine, drafts: Sequence[NamedSpec], stored: Any
) -> tuple[EngineConfig, Plan]:
    if config.execution.simulated_device is not None:
        from penstock.launch.simulated import simulated_plan  # nobody else needs it

        return simulated_plan(config, spec, machine)
    return config, resolve(config, spec, machine, drafts, keeping_of(config), stored, traits_of(config))


def plan_of(config: EngineConfig, machine: Machine | None = None) -> Plan:
    """What `start` would decide, without reading a weight. Raises as `start`."""
    return foreseen(config, machine)[0]


def foreseen(config: EngineConfig, machine: Machine | None = None) -> tuple[Plan, EngineInfo, int]:
    """The same, what the engine would say of itself, and the bytes that are free where it would run."""
    check_names(config)
    own, stored, generation, heads = read_model(local_path(config.model.model, config.model.revision, weights=False))
    spec = stretched(own, config.model)
    config, chosen = choose_ops(config, spec)
    config, encodes = choose_encoding(config, spec)
    config, speculates = choose_mtp(config, bool(heads))
    machine = machine_of(config, machine or probe(), spec)
    if config.execution.memory_bytes is not None:
        from penstock.launch.offload import choose_offload  # nobody else needs it

        config, shared = choose_offload(config, spec, machine, stored)
        chosen = (*chosen, *shared)
    config, plan = _planned(config, spec, machine, draft_specs(config, heads), stored)
    changed = (*unread_decision(spec), *stretch_decision(own, spec))
    decided = (*backend_decisions(config, spec, plan), *events_decision(config))
    said = (_sampling(generation, limits_of(spec, generation, plan), config)[1],) if spec.has_head else ()
    decided = (*chosen, *encodes, *speculates, *changed, *plan.decisions, *decided, *said)
    plan = msgspec.structs.replace(plan, decisions=decided)
    limits = _limits(config, spec, generation, plan)
    info = _info(config, plan, spec, limits, sum(plan.num_slabs), plan.max_num_seqs)
    return plan, info, machine.available_bytes


def _limits(config: EngineConfig, spec: ModelSpec, generation: Mapping[str, Any], plan: Plan) -> Limits:
    limits, cache = limits_of(spec, generation, plan), config.cache
    return replace(
        limits, module_chunk=cache.module_chunk_tokens, module_recompute=cache.module_recompute,
        adapter_units=adapter_units(config, plan.groups, plan.block_size), block_size=plan.block_size,
    )  # fmt: skip


def _sampling(generation: Mapping[str, Any], limits: Limits, config: EngineConfig) -> tuple[Defaults, Decision]:
    """What requests that name nothing are sampled with, and the line about it."""
    # It knows text, which an engine that serves has no use for: its front says what is sampled with.
    from penstock.text.defaults import Wanted, sampling_decision, sampling_defaults

    wanted = Wanted(config.model.generation_config, config.model.repetition_detection)
    found = sampling_defaults(generation, limits, wanted)
    return found, sampling_decision(found, wanted.generation_config)


def info_of(engine: Engine, config: EngineConfig, load_s: float = 0.0, pid: int = 0) -> EngineInfo:
    """What a front end needs to know of a running engine."""
    core = engine.core
    num_blocks = sum(group.total for group in core.kv.stats().groups)
    timer, longest = core.scheduler.timer, engine.limits.max_model_len
    lengths = sorted({min(longest, 4**n) for n in range(12)}) if timer is not None else []
    info = _info(config, engine.plan, engine.spec, engine.limits, num_blocks, core.scheduler.max_num_seqs)
    return msgspec.structs.replace(
        info, pid=pid, packed_file=core.executor.packed_file, load_s=load_s, pin_blocks=core.kv.hints.most_pinned,
        alone_s=[(n, timer.step_s(EMPTY.plus(0, n, 1))) for n in lengths if timer is not None],
        drafts=core.scheduler.drafts is not None,
        **({} if engine.followed is None or core.kv.events is None else core.kv.events.named_with),
    )  # fmt: skip


def _info(
    config: EngineConfig, plan: Plan, spec: ModelSpec, limits: Limits, num_blocks: int, max_num_seqs: int
) -> EngineInfo:
    return EngineInfo(
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        kv_capacity_tokens=limits.kv_capacity_tokens,
        eos_token_ids=list(limits.eos_token_ids),
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_params=spec.num_params,
        embedding_size=spec.vector_size,
        generates=limits.generates,
        pooler=limits.pooler,
        num_words=limits.num_words,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        memory_bytes={"weights": plan.weight_bytes, "kv_limit": plan.kv_bytes},
        weight_bytes=plan.held.bytes_by_format(spec),
        caches_prefixes=config.cache.enable_prefix_caching and config.cache.prefix_cache != "none",
        module_tokens=config.cache.block_size if config.cache.kv_allocator == "modules" else 0,
        module_chunk=limits.module_chunk,
        module_recompute=limits.module_recompute,
        adapter_units=limits.adapter_units,
        decisions=[(d.name, d.value, d.why) for d in plan.decisions],
    )


def local_engine(
    config: EngineConfig, progress: Progress | None = None, *, serving: bool = True
) -> Callable[[], tuple[EngineCore, EngineInfo]]:
    """For `ThreadLink` and for the engine process: makes the engine when it is called. `serving`: see `start`."""

    def make() -> tuple[EngineCore, EngineInfo]:
        began = time.monotonic()
        engine = start(config, progress=progress, serving=serving)
        return engine.core, info_of(engine, config, time.monotonic() - began)

    return make
