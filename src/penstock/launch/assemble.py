"""Puts one rank's engine together. What does not fit was refused by `plan.resolve`, before a weight was read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from penstock.base.clock import Clock, MonotonicClock
from penstock.config import EngineConfig
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import DraftController, Drafter, Executor, StepTimer
from penstock.core.selection import KVSelector
from penstock.drafters.bench import Target
from penstock.engine.core import EngineCore
from penstock.engine.grower import Grower
from penstock.executor import EXECUTORS
from penstock.kv import KV_MANAGERS
from penstock.kv.manager import KVManager
from penstock.kv.virtual import virtual_slabs
from penstock.launch.drafts import LoadedDraft, draft_models
from penstock.launch.native import PackedWeights, native_forward
from penstock.launch.selection import NO_KINDS, TokenKinds, keeping_of, make_selector, reading_of, watch_rows
from penstock.launch.speculation import DraftMeans, make_controller, make_drafter, make_verifier
from penstock.model.builder import build
from penstock.model.native.forward import NativeForward
from penstock.model.program import Program
from penstock.ops import OP_TABLES
from penstock.ops.stored import Weight
from penstock.plan.probe import Free, free_memory
from penstock.plan.resolve import Plan
from penstock.runner.forward import Forward
from penstock.runner.lazy import LazyStorage
from penstock.runner.native_sampler import NativeSampler
from penstock.runner.runner import Runner
from penstock.runner.storage import Storage
from penstock.sched.policy import make_policy
from penstock.sched.scheduler import Scheduler
from penstock.weights.load import embedding_rows, fingerprint

if TYPE_CHECKING:
    from penstock.runner.logits.grammar_cache import GrammarCache


def assemble(
    config: EngineConfig,
    spec: ModelSpec,
    weights: Mapping[str, Weight],
    plan: Plan,
    *,
    clock: Clock | None = None,
    check_invariants: bool = False,
    poison: bool = False,
    wire: bool = False,
    timer: StepTimer | None = None,
    seconds_budget: bool = True,
    grammars: GrammarCache | None = None,
    packed: PackedWeights | None = None,
    drafter: Drafter | None = None,
    drafts: DraftController | None = None,
    guessers: Sequence[LoadedDraft] = (),
    encode: Callable[[str], list[int]] | None = None,
    kinds: TokenKinds = NO_KINDS,
    ask: Callable[[], Free] = free_memory,
) -> EngineCore:
    """The engine of one rank in this process (`timer`, `seconds_budget`: see `engine_core`).

    `grammars`: what structured outputs need; without it no request may ask for them. `packed`: where native
    kernels find their weights at the second start. `guessers`: the draft models of `plan.drafts`, in that order.
    `encode`: text -> ids, for drafters that read text; `kinds`: what tokens look like, for KV selectors.

    For tests: `check_invariants` asserts the laws of memory after every step, `poison` starts the KV storage as NaN,
    `wire` sends every message through its encoded form, `ask` says what of the machine's memory is free.
    """
    selector = make_selector(config, spec, kinds, partial(fingerprint, weights))
    program = program_of(config, spec, weights, plan)
    forward = native_forward(config, program, plan, packed) if config.execution.ops == "native" else program
    return connect(
        config,
        plan,
        forward,
        spec.vocab_size,
        clock=clock,
        check_invariants=check_invariants,
        poison=poison,
        wire=wire,
        timer=timer,
        seconds_budget=seconds_budget,
        grammars=grammars,
        drafter=drafter,
        drafts=drafts,
        means=DraftMeans(
            models=draft_models(config, plan, guessers, forward),
            target=Target(
                spec=spec,
                forward=forward,
                part=partial(part_of, program, forward, plan),
                embeddings=partial(embedding_rows, weights["embed"]),
                fingerprint=partial(fingerprint, weights),
            ),
            encode=encode,
        ),
        select=None if selector is None else (selector, spec),
        ask=ask,
    )


def program_of(config: EngineConfig, spec: ModelSpec, weights: Mapping[str, Weight], plan: Plan) -> Program:
    """The model as a program. `ops="auto"` is the reference here: `launch.native` decides before."""
    ops = config.execution.ops
    return build(
        spec,
        dict(weights),
        plan.own_groups,
        max_model_len=plan.max_model_len,
        attention=config.execution.attention_backend,
        rotation=config.cache.kv_rotation,
        ops=OP_TABLES.get("ref" if ops == "auto" else ops),
        reading=reading_of(keeping_of(config)),
    )


def part_of(program: Program, forward: Forward, plan: Plan, layers: Collection[int]) -> Forward:
    """The model without all layers but these, over the same weights, which are not held twice."""
    part = program.part(layers)
    if isinstance(forward, NativeForward):
        return forward.part(part, plan.groups, max_tokens=plan.max_num_seqs)
    return part


def connect(
    config: EngineConfig,
    plan: Plan,
    forward: Forward,
    vocab_size: int,
    *,
    clock: Clock | None = None,
    check_invariants: bool = False,
    poison: bool = False,
    wire: bool = False,
    timer: StepTimer | None = None,
    seconds_budget: bool = True,
    grammars: GrammarCache | None = None,
    drafter: Drafter | None = None,
    drafts: DraftController | None = None,
    means: DraftMeans | None = None,
    select: tuple[KVSelector, ModelSpec] | None = None,
    ask: Callable[[], Free] = free_memory,
) -> EngineCore:
    """`assemble` for any `forward`: what turns a StepPlan into logits need not be a model (tests, simulators).

    `ask`: what of the machine's memory is free now.
    """
    clock = clock or MonotonicClock()
    keeping = keeping_of(config)
    virtual = config.cache.kv_allocator == "virtual"
    num_slabs = plan.num_slabs
    if virtual:  # the plan counts memory; the rank needs addresses
        num_slabs = virtual_slabs(plan.groups, num_slabs, plan.block_size, plan.max_model_len, plan.max_num_seqs)
    num_own = len(plan.own_groups)
    assert plan.own_groups == plan.groups[:num_own], "draft models' groups come last"
    runner = Runner(
        forward,
        plan.groups,
        num_slabs,
        plan.block_size,
        vocab_size,
        clock=clock,
        host_slabs=plan.num_host_slabs or None,
        poison=poison,
        storage=LazyStorage if virtual else Storage,
        grammars=grammars,
        sampler=NativeSampler(forward.pool, vocab_size, grammars) if isinstance(forward, NativeForward) else None,
        keeping=keeping,
        num_own_groups=num_own,
    )
    if select is not None and keeping is not None:
        watch_rows(runner, *select, keeping)
    runner.drafter = drafter or make_drafter(config, runner, means or DraftMeans())
    runner.verifier = make_verifier(config, runner)
    executor = EXECUTORS.get(config.execution.executor)(runner, depth=config.execution.depth, wire=wire)
    core = engine_core(
        config, plan, executor, clock, timer=timer, seconds_budget=seconds_budget, check_invariants=check_invariants,
        drafts=drafts,
    )  # fmt: skip
    # Baselines reserve, and poisoned memory was written to: neither grows.
    if config.cache.kv_allocator == "paged" and not poison:
        core.grower = Grower(ask, runner.storage.back, takes_all=config.sizes_kv)
        core.grower.begin(core.kv.backing)
    return core


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
) -> EngineCore:
    """Scheduler, KV manager and loop on any executor and clock: a rank, a simulated device, a recorded run.

    `timer` predicts steps: preemption may then weigh costs; with `seconds_budget` steps are bounded in seconds too.
    """
    kv: KVManager = KV_MANAGERS.get(config.cache.kv_allocator)(
        plan.groups,
        plan.num_slabs,
        plan.block_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        prefix_cache=config.cache.prefix_cache if config.cache.enable_prefix_caching else "none",
        eviction=config.cache.eviction,
        slot_checkpoint_tokens=config.cache.slot_checkpoint_tokens,
        host_slabs=plan.num_host_slabs or None,
        step_tokens=plan.step_tokens,
        keeping=keeping_of(config),
    )
    scheduler = Scheduler(
        kv,
        make_policy(config.scheduler.scheduling_policy),
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        block_size=plan.block_size,
        long_prefill_token_threshold=plan.long_prefill_token_threshold,
        chunked_prefill=config.scheduler.enable_chunked_prefill,
        timer=timer,
        seconds_budget=seconds_budget,
        preemption_mode=config.scheduler.preemption_mode,
        conservativeness=config.scheduler.schedule_conservativeness,
        drafts=drafts or make_controller(config, timer),
    )
    return EngineCore(scheduler, kv, executor, clock, check_invariants=check_invariants)
