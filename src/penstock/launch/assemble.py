"""Puts one rank's engine together. What does not fit was refused by `plan.resolve`, before a weight was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import AdapterRoom, Backend, WeightStore
from penstock.base.clock import Clock, MonotonicClock
from penstock.config import EngineConfig
from penstock.core.adapter import AdapterRef
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import DraftController, Drafter, Executor, StepTimer
from penstock.drafters.bench import Target
from penstock.engine.blackbox import BlackBox
from penstock.engine.core import EngineCore
from penstock.engine.grower import Grower
from penstock.executor import EXECUTORS
from penstock.executor.rank import Progress, RankFactory, RankSpec
from penstock.kv import KV_MANAGERS
from penstock.kv.adapter_pages import AdapterLimits
from penstock.kv.events import EventSettings
from penstock.kv.manager import KVManager
from penstock.kv.stored import StoreSettings
from penstock.launch.backend import backend_of
from penstock.launch.drafts import LoadedDraft, draft_models
from penstock.launch.parts import Load, Parts, make_rank
from penstock.launch.selection import NO_KINDS, TokenKinds, keeping_of, make_selector, reading_of
from penstock.launch.speculation import DraftMeans, make_controller, num_drafts
from penstock.model.forward import Forward
from penstock.ops.adapters import LowRank
from penstock.ops.ref.product import take_rows
from penstock.ops.stored import Weight
from penstock.plan.adapters import adapter_units
from penstock.plan.hidden import keeps_hidden
from penstock.plan.memory import MODEST_TOKENS
from penstock.plan.probe import Free, free_memory
from penstock.plan.rank_plan import rank_plan
from penstock.plan.ranks import LEAST_ROWS, UNIT
from penstock.plan.resolve import Plan
from penstock.runner.assemble import DecoderModel
from penstock.runner.runner import Runner
from penstock.sched.offline import WithOffline
from penstock.sched.policy import make_offline_policy, make_policy
from penstock.sched.scheduler import Scheduler
from penstock.sched.shares import WithShares
from penstock.weights.load import fingerprint

if TYPE_CHECKING:
    from penstock.launch.kv_events import FollowedBlocks, KVEvents
    from penstock.launch.kv_store import KVStore
    from penstock.parallel.comm import Comm
    from penstock.runner.logits.grammar_cache import GrammarCache


def assemble(
    config: EngineConfig,
    spec: ModelSpec,
    weights: Mapping[str, Weight],
    plan: Plan,
    *,
    drafter: Drafter | None = None,
    loaded_drafts: Sequence[LoadedDraft] = (),
    packed: WeightStore | None = None,
    load_adapter: Load | None = None,
    **engine: Any,
) -> EngineCore:
    """The engine over a model whose weights are in memory (tests, tools); `build.start` takes one from disk.

    `draft models`: the draft models of `plan.drafts`, in that order. `packed`: see `model_parts`. Else as `connect`.
    """

    def parts(comm: Comm | None) -> Parts:
        return model_parts(
            config, spec, weights, plan, loaded_drafts=loaded_drafts, drafter=drafter, packed=packed,
            load_adapter=load_adapter, comm=comm,
        )  # fmt: skip

    return _engine_of(config, plan, parts, **engine)


def connect(
    config: EngineConfig, plan: Plan, forward: Forward, vocab_size: int, *, backend: Backend | None = None,
    drafter: Drafter | None = None, load_adapter: Load | None = None, **engine: Any,
) -> EngineCore:  # fmt: skip
    """`assemble` for any `forward`: what turns a StepPlan into logits need not be a model (tests, simulators).

    `backend`: whose sampler is used; `drafter`: another than the settings name; `load_adapter`: what a `forward` with
    adapters makes them of. `poison`, `wire`: see `RankSpec`; all else: see `engine_over`.
    """
    parts = Parts(forward=forward, vocab_size=vocab_size, backend=backend, drafter=drafter, load_adapter=load_adapter)
    return _engine_of(config, plan, lambda comm: parts, **engine)


def _engine_of(
    config: EngineConfig, plan: Plan, parts: Callable[[Comm | None], Parts], *, clock: Clock | None = None,
    poison: bool = False, wire: bool = False, **engine: Any,
) -> EngineCore:  # fmt: skip
    clock = clock or MonotonicClock()
    spec = RankSpec(config=config.as_kwargs(), plan=plan, poison=poison, wire=wire)

    def build(spec: RankSpec, loading: Progress | None) -> Runner:
        return make_rank(config, plan, parts(comm_of(spec)), clock, poison=spec.poison, rank=spec.rank)

    return engine_over(config, plan, spec, build, clock, **engine)


def engine_over(
    config: EngineConfig,
    plan: Plan,
    spec: RankSpec,
    build: RankFactory,
    clock: Clock,
    *,
    loading: Progress | None = None,
    box: BlackBox | None = None,
    ask: Callable[[], Free] = free_memory,
    store: KVStore | None = None,
    events: KVEvents | FollowedBlocks | None = None,
    **engine: Any,
) -> EngineCore:
    """The engine over the rank that `spec` describes, on the executor that `config` names.

    `build` makes the rank if it lives in this process; `loading` hears of bytes of weights, `box` is where the rank
    counts its operations. `ask`: what of the machine's memory is free now. `store`: of blocks, open. `events`: of them,
    open. Else as `engine_core`.
    """
    made: Callable[..., Executor] = EXECUTORS.get(config.execution.executor)
    if config.execution.num_ranks > 1:
        from penstock.executor.ranks import RanksExecutor, ThreadRanks  # one rank needs no other

        made = RanksExecutor if spec.model is not None else ThreadRanks
    executor: Executor = made(spec, build, depth=config.execution.depth, loading=loading, box=box)
    core = engine_core(
        config, plan, executor, clock, store=None if store is None else store.settings,
        events=None if events is None else events.settings, **engine,
    )  # fmt: skip
    core.store_news = None if store is None else store.news
    if store is not None and core.kv.stored is not None and config.execution.most_replicas > 1:
        core.kv.stored.look = store.look
    if events is not None:
        events.follow(core)
    # Baselines reserve, and poisoned memory was written to: neither grows.
    simulated = config.execution.simulated_device is not None  # its memory is not this machine's
    if config.cache.kv_allocator in ("paged", "modules") and not spec.poison and not simulated:
        core.grower = Grower(ask, executor.back, takes_all=config.sizes_kv)
        core.grower.begin(core.kv.backing)
    if config.scheduler.adaptive:
        from penstock.launch.adaptive import adapt  # nobody else needs it at the start

        adapt(config, core)
    return core


def model_parts(
    config: EngineConfig,
    spec: ModelSpec,
    weights: Mapping[str, Weight],
    plan: Plan,
    *,
    grammars: GrammarCache | None = None,
    packed: WeightStore | None = None,
    backend: Backend | None = None,
    loaded_drafts: Sequence[LoadedDraft] = (),
    encode: Callable[[str], list[int]] | None = None,
    kinds: TokenKinds = NO_KINDS,
    drafter: Drafter | None = None,
    load_adapter: Load | None = None,
    comm: Comm | None = None,
) -> Parts:
    """The parts of a rank that runs a model.

    `grammars`: what structured outputs need; without it no request may ask for them. `packed`: where native
    kernels find their weights at the second start. `draft models`: the draft models of `plan.drafts`, in that order.
    `encode`: text -> ids, for drafters that read text; `kinds`: what tokens look like, for KV selectors.
    """
    selector = make_selector(config, spec, kinds, partial(fingerprint, weights))
    backend = backend or backend_of(config)
    model = model_of(config, spec, weights, plan, comm)
    if packed is not None:
        packed.prepare(model.graph)
    if comm is not None:
        plan = rank_plan(plan, comm.rank, config.execution.tensor_parallel_size)
        load_adapter = None if load_adapter is None else _own_rows(load_adapter, model)
    forward = model.on(
        backend, max_tokens=plan.max_num_batched_tokens, quantization=config.model.quantization,
        rank_groups=plan.groups, matrices=None if packed is None else packed.matrices,
        adapters=adapter_room(config),
    )  # fmt: skip
    if packed is not None:
        packed.keep(backend.matrices(forward))
    target = Target(
        spec=spec,
        forward=forward,
        part=lambda layers: model.part(backend, forward, layers, max_tokens=plan.max_num_seqs, rank_groups=plan.groups),
        embeddings=partial(take_rows, weights["embed"]),
        fingerprint=partial(fingerprint, weights),
    )
    return Parts(
        forward=forward,
        vocab_size=spec.num_ids,
        restoring=partial(model.restoring, backend, forward) if keeps_hidden(config) else None,
        backend=backend,
        grammars=grammars,
        means=DraftMeans(draft_models(config, plan, loaded_drafts, backend), target, encode),
        drafter=drafter,
        select=None if selector is None else (selector, spec),
        part=lambda layers: model.part(backend, forward, layers, max_tokens=plan.max_num_batched_tokens),
        load_adapter=load_adapter,
    )


def _own_rows(load: Load, model: DecoderModel) -> Load:
    """Of adapters what a rank needs: the outputs that it has of each product that it has."""
    from penstock.parallel.shard import outputs_of  # one rank has all

    rows, here = model.rows, {node.weights[0] for node in model.graph.nodes if node.op == "linear"}

    def own(ref: AdapterRef) -> Mapping[str, LowRank]:
        parts = {name: part for name, part in load(ref).items() if name in here}
        return {name: outputs_of(part, *rows[name]) if name in rows else part for name, part in parts.items()}

    return own


def adapter_room(config: EngineConfig) -> AdapterRoom | None:
    lora = config.lora
    return AdapterRoom(lora.in_memory, lora.max_lora_rank) if lora.enable_lora else None


def model_of(
    config: EngineConfig, spec: ModelSpec, weights: Mapping[str, Weight], plan: Plan, comm: Comm | None = None
) -> DecoderModel:
    """`comm`: with the other ranks, if there are any."""
    return DecoderModel(
        spec=spec, weights=weights, groups=plan.own_groups, max_model_len=plan.max_model_len,
        reading=reading_of(
            keeping_of(config), spec, partial(fingerprint, weights), hidden=keeps_hidden(config),
            moves=config.cache.kv_allocator == "modules",
        ),
        rotation=config.cache.kv_rotation,
        comm=comm,
        sums=config.execution.tensor_parallel_sums,
        whole_experts=config.execution.enable_expert_parallel,
        pairwise=config.execution.context_parallel_reduce == "tree",
    )  # fmt: skip


def comm_of(spec: RankSpec) -> Comm | None:
    """The rank's end of what connects it to the others; None: it is alone."""
    if spec.world_size == 1:
        return None
    from penstock.parallel.links import joined  # one rank needs no other

    parts = spec.config["pipeline_microbatches"] or 0
    return joined(spec.links, spec.rank, spec.world_size, spec.plan.stages, parts)


def shard_name(config: EngineConfig, comm: Comm) -> str:
    """What a rank's packed weights are known by."""
    run, stages = config.execution, "" if comm.pipe is None else comm.pipe.starts
    experts = "whole experts" if run.enable_expert_parallel else "experts by outputs"
    how = (UNIT, LEAST_ROWS, run.tensor_parallel_sums, run.context_parallel_size, experts)
    return f"rank {comm.rank} of {comm.size}, {how} {stages}"


def layer_options(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """What only `kv.layerkv` has to know."""
    blocks = -(-min(plan.max_model_len, MODEST_TOKENS) // plan.block_size)
    return {"layer_tpot": config.cache.kv_layer_tpot, "column": (config.cache.kv_layer_rows, blocks)}


def engine_core(
    config: EngineConfig,
    plan: Plan,
    executor: Executor,
    clock: Clock,
    *,
    timer: StepTimer | None = None,
    seconds_budget: bool = True,
    check_invariants: bool = False,
    drafts: DraftController | None = None,
    store: StoreSettings | None = None,
    events: EventSettings | None = None,
) -> EngineCore:
    """Scheduler, KV manager and loop on any executor and clock: a rank, a simulated device, a recorded run.

    `timer` predicts steps: preemption may then weigh costs; with `seconds_budget` steps are bounded in seconds too.
    """
    units = adapter_units(config, plan.groups, plan.block_size)
    kv: KVManager = KV_MANAGERS.get(config.cache.kv_allocator)(
        plan.groups,
        plan.num_slabs,
        plan.block_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        prefix_cache=config.cache.prefix_cache if config.cache.enable_prefix_caching else "none",
        eviction=config.cache.eviction,
        slot_checkpoint_tokens=config.cache.slot_checkpoint_tokens,
        slot_checkpoint_rule=config.cache.slot_checkpoint_rule,
        host_slabs=plan.num_host_slabs or None,
        tier=config.cache.swap_tier,
        step_tokens=plan.step_tokens,
        keeping=keeping_of(config),
        offload=config.cache.enable_hierarchical_cache,
        store=store,
        events=events,
        pin_share=config.cache.kv_pin_share,
        **({"adapters": AdapterLimits(units, config.lora.in_memory)} if units else {}),
        **(layer_options(config, plan) if config.cache.kv_allocator == "layerkv" else {}),
    )
    shared = WithShares(make_policy(config.scheduler.scheduling_policy))
    offline = WithOffline(
        shared, make_offline_policy(config.scheduler.offline_policy),
        step_s=config.scheduler.offline_step_ms / 1000, slowdown=config.scheduler.offline_slowdown,
    )  # fmt: skip
    policy: Any = offline
    if config.lora.enable_lora:
        from penstock.sched.adapters import WithAdapters  # nobody else needs it at the start

        policy = placed = WithAdapters(policy, config.lora.max_loras, config.lora.lora_merge_threshold)
    scheduler = Scheduler(
        kv,
        policy,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        block_size=plan.block_size,
        long_prefill_token_threshold=plan.long_prefill_token_threshold,
        chunked_prefill=config.scheduler.enable_chunked_prefill,
        timer=timer,
        seconds_budget=seconds_budget,
        preemption_mode=config.scheduler.preemption_mode,
        pause_mode=config.scheduler.pause_mode,
        conservativeness=config.scheduler.schedule_conservativeness,
        decode_step_s=config.scheduler.decode_step_ms / 1000,
        drafts=drafts or make_controller(config, timer),
        offline=offline,
    )
    shared.queues = scheduler
    if config.lora.enable_lora:
        placed.queues = scheduler
    core = EngineCore(scheduler, kv, executor, clock, check_invariants=check_invariants)
    if config.scheduler.adaptive and config.speculation is not None:
        core.knobs.limit_drafts(num_drafts(config.speculation))
    return core
