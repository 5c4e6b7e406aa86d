"""Engines for tests, and the naive answers they are held against."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from penstock.base.clock import MonotonicClock
from penstock.base.hashing import digest
from penstock.config import from_kwargs
from penstock.core.batch import TokenLogprobs
from penstock.core.held_weights import HeldWeights
from penstock.core.model_spec import ModelSpec
from penstock.core.output import EngineOutput
from penstock.core.request import Control, Request
from penstock.core.sampling import BeamSearchParams, TokenRules
from penstock.engine.core import EngineCore
from penstock.launch.assemble import assemble, connect, engine_core
from penstock.launch.kv_store import open_store
from penstock.launch.selection import keeping_of
from penstock.plan.drafts import NamedSpec, plan_drafts
from penstock.plan.hidden import keeps_hidden
from penstock.plan.keeping import groups_of
from penstock.plan.ranks import ranked_groups
from penstock.plan.resolve import Plan, tokens_in_flight
from penstock.plan.stages import stage_starts
from penstock.sched.drafts.fixed import FixedDrafts
from tests.engine.fake_model import FakeForward, FakeParts
from tests.engine.fake_model import spec as fake_spec
from tests.engine.sloppy import SloppyDrafter


@dataclass
class Knobs:
    """What must never change a token."""

    block_size: int = 4
    num_blocks: int = 64
    window_blocks: int = 0  # 0: as many as num_blocks
    num_slots: int = 24
    budget: int = 16
    max_num_seqs: int = 8
    policy: str = "fcfs"
    prefix_cache: str = "radix"
    eviction: str = "lru"
    attention: str = "ref"
    ops: str = "ref"
    graphs: str = "auto"
    depth: int = 1
    wire: bool = False
    threshold: int = 0
    chunked: bool = True
    checkpoint_tokens: int = 8
    checkpoint_rule: str = "distance"
    kv_dtype: str = "float32"
    kv_rotation: str = "none"
    host_blocks: int = 0
    swap_tier: str = "host"
    pauses: str = "auto"
    preemption: str = "auto"
    offload: bool = False  # what the prefix cache gives up waits on the host: full groups only
    kv_offload: str = "none"  # a store of blocks outside the process: full groups only
    kv_offload_secret_file: str | None = None
    kv_offload_format: str = "plain"
    kv_load_policy: str = "wait"
    kv_fetch_ahead: float = 0.25
    kv_offload_eviction: str = "lru"
    kv_allocator: str = "paged"
    layer_rows: int = 0
    max_model_len: int | None = None
    num_drafts: int = 0  # drafts of a sequence in a step
    draft_depth: int = 63
    draft_share: float = 0.7
    selector: str = "none"
    kept: str = "25%"
    selector_config: str | None = None
    expert_bytes: int | None = None  # memory for experts, with ops native
    expert_eviction: str = "lru"
    expert_prediction: str = "none"
    adapters: int = 0  # that run at once; 0: none are served
    adapters_held: int = 0
    adapter_pool: bool = False  # they lie in blocks of KV
    merge: float | None = None
    ranks: int = 1
    whole_experts: bool = False
    placement: str = "round"  # where ranks keep them
    by_tokens: str = ""  # ranks share out the tokens of sequences, and merge what they find so: flat, tree
    stages: int = 1
    microbatches: int | None = None
    conservativeness: float = 0.0  # laws want preemptions; setting memory aside avoids them


def plan_for(spec: ModelSpec, k: Knobs, draft_models: Sequence[ModelSpec] = ()) -> Plan:
    max_model_len = k.max_model_len or spec.max_position
    groups, drafts, _ = plan_drafts(
        [NamedSpec(f"draft{i}", draft_model) for i, draft_model in enumerate(draft_models)],
        groups_of(spec, k.kv_dtype, keeping_of(config_for(k)), hidden=keeps_hidden(config_for(k))),
        held=[HeldWeights("float32")] * len(draft_models),
        kv_dtype=k.kv_dtype,
        max_model_len=max_model_len,
    )
    if k.ranks > 1:
        assert not draft_models, "ranks share out the groups of one model"
        groups, _ = ranked_groups(config_for(k), spec, groups)
    stages = stage_starts(config_for(k), spec)
    kinds = {"paged": k.num_blocks, "window": k.window_blocks or k.num_blocks, "slot": k.num_slots}
    num_slabs = tuple(kinds[g.spec.kind] for g in groups)
    return Plan(
        dtype="float32",
        kv_dtype=k.kv_dtype,
        max_model_len=max_model_len,
        block_size=k.block_size,
        groups=groups,
        num_slabs=num_slabs,
        max_num_seqs=k.max_num_seqs,
        max_num_batched_tokens=k.budget,
        long_prefill_token_threshold=k.threshold,
        step_tokens=tokens_in_flight(config_for(k), max_model_len, k.budget),
        kv_capacity_tokens=k.num_blocks * k.block_size,
        weight_bytes=0,
        kv_bytes=sum(n * g.slab_bytes(k.block_size) for n, g in zip(num_slabs, groups, strict=True)),
        num_host_slabs=tuple(
            (0 if g.spec.whole else k.host_blocks) if g.spec.per_token else min(k.host_blocks, 6) for g in groups
        ),
        drafts=drafts,
        stages=stages,
    )


def config_for(k: Knobs, speculation: dict[str, Any] | None = None) -> Any:
    return from_kwargs(
        model="(test)",
        scheduling_policy=k.policy,
        prefix_cache=k.prefix_cache,
        eviction=k.eviction,
        attention_backend=k.attention,
        ops=k.ops,
        cudagraph_capture_sizes=k.graphs,
        depth=k.depth,
        enable_chunked_prefill=k.chunked,
        long_prefill_token_threshold=k.threshold,
        slot_checkpoint_tokens=k.checkpoint_tokens,
        slot_checkpoint_rule=k.checkpoint_rule,
        preemption_mode=k.preemption,
        swap_tier=k.swap_tier,
        pause_mode=k.pauses,
        enable_hierarchical_cache=k.offload,
        kv_offload=k.kv_offload,
        kv_offload_secret_file=k.kv_offload_secret_file,
        kv_offload_format=k.kv_offload_format,
        kv_load_policy=k.kv_load_policy,
        kv_fetch_ahead=k.kv_fetch_ahead,
        kv_offload_eviction=k.kv_offload_eviction,
        kv_allocator=k.kv_allocator,
        kv_layer_rows=k.layer_rows,
        kv_selector=k.selector,
        kv_budget=k.kept,
        kv_selector_config=k.selector_config,
        kv_rotation=k.kv_rotation,
        schedule_conservativeness=k.conservativeness,
        speculative_config=speculation,
        expert_memory_bytes=k.expert_bytes,
        expert_eviction=k.expert_eviction,
        expert_prediction=k.expert_prediction,
        enable_lora=k.adapters > 0,
        max_loras=k.adapters or 1,
        max_cpu_loras=k.adapters_held or k.adapters or 1,
        lora_memory=None if k.adapter_pool else 1.0,
        lora_merge_threshold=k.merge,
        tensor_parallel_size=k.ranks,
        enable_expert_parallel=k.whole_experts,
        context_parallel_size=k.ranks if k.by_tokens else 1,
        context_parallel_reduce=k.by_tokens or "flat",
        context_parallel_placement=k.placement,
        pipeline_parallel_size=k.stages,
        pipeline_microbatches=k.microbatches,
    )


def fake_engine(
    k: Knobs,
    *,
    slots: bool = False,
    windows: Sequence[int | None] = (),
    timer: Any = None,
    drafter: Any = None,
    drafts: Any = None,
    events: Any = None,
) -> tuple[EngineCore, FakeForward]:
    """An engine over the suspicious mock model: for laws that need thousands of steps."""
    spec = fake_spec(slots=slots, windows=windows, width=256 // k.block_size if k.adapter_pool else 1)
    plan = plan_for(spec, k)
    forward = FakeForward(plan.groups)
    if k.num_drafts:
        drafter = drafter or SloppyDrafter(k.num_drafts, share=k.draft_share)
        drafts = drafts or FixedDrafts(k.num_drafts, k.draft_depth)
    core = connect(
        config_for(k), plan, forward, spec.vocab_size, check_invariants=True, poison=True, wire=k.wire, timer=timer,
        drafter=drafter, drafts=drafts, store=open_store(config_for(k), lambda: "fake", plan), events=events,
        load_adapter=lambda ref: FakeParts(int(ref.path), ref.num_units),
    )  # fmt: skip
    return core, forward


def real_engine(
    spec: ModelSpec, weights: Any, k: Knobs, *, drafter: Any = None, drafts: Any = None,
    speculation: dict[str, Any] | None = None, draft_models: Sequence[tuple[ModelSpec, Any]] = (),
    events: Any = None, packed: Any = None, load_adapter: Any = None,
) -> EngineCore:  # fmt: skip
    """An engine over a real (tiny, random) model and the reference operations (or those of `k.ops`).

    `speculation`: as `speculative_config`; `draft_models`: those it names, and their weights. `packed`: where native
    kernels find theirs.
    """
    plan = plan_for(spec, k, [draft_model for draft_model, _ in draft_models])
    decides = repr((spec, k.ops, k.kv_dtype, k.kv_offload_format)).encode()
    return assemble(
        config_for(k, speculation),
        spec,
        weights,
        plan,
        store=open_store(config_for(k), lambda: digest(decides).hex(), plan),
        clock=MonotonicClock(),
        check_invariants=True,
        poison=True,
        wire=k.wire,
        drafter=drafter,
        drafts=drafts,
        loaded_drafts=draft_models,
        load_adapter=load_adapter,
        events=events,
        packed=packed,
    )


def plain_core(
    spec: ModelSpec, k: Knobs, executor: Any, clock: Any, timer: Any = None, store: Any = None
) -> EngineCore:
    """The engine alone, on somebody else's executor and clock."""
    return engine_core(
        config_for(k), plan_for(spec, k), executor, clock, timer=timer, check_invariants=True, store=store
    )


_ids = itertools.count()


def request(prompt: Sequence[int], *, request_id: str | None = None, eos: Sequence[int] = (), **kw: Any) -> Request:
    """A request from token-level fields; `rules` fields may be given by name."""
    rule_names = set(TokenRules.__struct_fields__)
    rules = TokenRules(**{n: v for n, v in kw.items() if n in rule_names})
    rest = {n: v for n, v in kw.items() if n not in rule_names}
    beam = rest.pop("beam_width", None)
    if beam is not None:
        rest["beam"] = BeamSearchParams(
            beam_width=beam,
            max_tokens=rest.get("max_tokens", 16),
            ignore_eos=not eos,
            length_penalty=rest.pop("length_penalty", 1.0),
        )
    return Request(
        request_id=request_id or f"r{next(_ids)}",
        prompt_token_ids=list(prompt),
        rules=rules,
        eos_token_ids=list(eos),
        **rest,
    )


@dataclass
class Collected:
    """What one request has yielded."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    beams: list[tuple[list[int], float, str]] = field(default_factory=list)
    cached: int = 0
    error: str | None = None
    first_step: int = -1
    last_step: int = -1


class Collector:
    """Follows an engine's outputs; asserts that nothing comes twice or after the end."""

    def __init__(self) -> None:
        self.requests: dict[str, Collected] = {}

    def take(self, outputs: list[EngineOutput], step: int = 0) -> None:
        for out in outputs:
            c = self.requests.setdefault(out.request_id, Collected())
            assert out.index not in c.reasons, "news after the end"
            if out.token_ids:
                c.first_step = step if c.first_step < 0 else c.first_step
                c.cached = out.num_cached_tokens
            c.last_step = step
            c.tokens.setdefault(out.index, []).extend(out.token_ids)
            c.logprobs.setdefault(out.index, []).extend(out.logprobs)
            c.prompt_logprobs.extend(out.prompt_logprobs)
            c.error = out.error or c.error
            c.beams = out.beams or c.beams
            if out.finish_reason is not None:
                c.reasons[out.index] = out.finish_reason


def drain(core: EngineCore, collector: Collector, *, limit: int = 20_000) -> int:
    """Step until there is no work. Returns the steps taken; a bound on them is the starvation test."""
    steps = 0
    while core.has_work:
        collector.take(core.step(), steps)
        steps += 1
        assert steps <= limit, f"not done after {limit} steps: somebody starves"
    return steps


def run(core: EngineCore, requests: Sequence[Request], *, limit: int = 20_000) -> dict[str, Collected]:
    """All requests at once, to the end; then nobody owns anything."""
    collector = Collector()
    for r in requests:
        core.add(r)
    drain(core, collector, limit=limit)
    assert_idle(core)
    return {r.request_id: collector.requests[r.request_id] for r in requests}


def disturbed(
    core: EngineCore,
    requests: Sequence[Request],
    rng: random.Random,
    kinds: Sequence[Any],
    *,
    times: int = 25,
    note: Any = "",
) -> Collector:
    """All requests, in an order and at moments that `rng` draws, to the end; then nobody owns anything.

    On the way running requests meet up to `times` controls of `kinds`: a bound, since a tiny budget under endless
    preemption never finishes a prompt. `note`: what to say if they do not end.
    """
    collector, todo = Collector(), list(requests)
    rng.shuffle(todo)
    steps = 0
    while todo or core.has_work:
        while todo and rng.random() < 0.5:
            core.add(todo.pop())
        if core.groups and times and rng.random() < 0.2:
            times -= 1
            core.add(Control(kind=rng.choice(kinds), request_id=rng.choice(sorted(core.groups))))
        collector.take(core.step(), steps)
        steps += 1
        assert steps < 5000, f"somebody starves {note}"
    assert_idle(core)
    return collector


def assert_idle(core: EngineCore) -> None:
    """A finished request owns nothing: only the prefix cache still holds blocks."""
    assert not core.groups
    assert not core.scheduler.running
    assert not core.scheduler.waiting
    while core.kv.hints.give_way():
        pass  # pins outlast requests
    core.kv.check_invariants([])
    for group in core.kv.stats().groups:
        assert group.free + group.evictable == group.total, f"leak: {group}"


@cache
def tiny(name: str) -> tuple[ModelSpec, dict[str, Any]]:
    """By a name of `tests.specs`, or of the models with heads of their own in `tests.heads`."""
    from tests import heads, specs

    spec, weights = heads.loaded(name)[0] if name in heads.CONFIGS else specs.make(name)
    return spec, weights
