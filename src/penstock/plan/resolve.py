"""Settings + model spec + machine -> Plan. Exact integers, no I/O: the same input gives the same plan anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.kv_events import parse_kv_events
from penstock.config.offload import offload_of
from penstock.config.selection import Keeping
from penstock.core.backend import REFERENCE, BackendTraits
from penstock.core.block_codec import BLOCK_CODECS
from penstock.core.cache_spec import CacheGroup, without_windows
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights
from penstock.core.kv_format import parse_kv_format
from penstock.core.machine import Machine
from penstock.core.matrix_format import NONE
from penstock.core.model_spec import ModelSpec
from penstock.plan.adapters import adapter_decision, adapter_units, pool_blocks
from penstock.plan.drafts import DraftPlan, NamedSpec, check_draft_weights, plan_drafts
from penstock.plan.experts import experts_in_memory
from penstock.plan.hidden import hidden_decision
from penstock.plan.keeping import check_keeping, groups_of
from penstock.plan.kv_format import check_kv_format
from penstock.plan.layerkv import check_layerkv
from penstock.plan.memory import Budget, CacheSizes, Demand, budget_for, check_weights, gib, plan_memory
from penstock.plan.modules import check_modules
from penstock.plan.positions import rope_decision
from penstock.plan.ranks import check_ranks, rank_bytes, rank_machine, ranked_groups, whose_experts
from penstock.plan.stages import stage_share, stage_starts, stages_said, widest_groups
from penstock.plan.weights import (
    NO_CODES,
    StoredFormats,
    activation_decision,
    copies_packed,
    held_by,
    hold_weights,
    resident_bytes,
    weight_decisions,
)

DEFAULT_NUM_SEQS = 64
DEFAULT_BATCHED_TOKENS = 512


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a weight is read.

    `num_slabs[g]` is the number of slabs of `groups[g]`: blocks of `block_size` tokens for paged and window groups,
    states of one sequence for slot groups. `kv_capacity_tokens`: tokens all sequences together can have (those that
    left every window included). `kv_bytes`: the sum over groups of slabs x slab bytes, of the stage that keeps most.
    `stages`: the first layer of each, and how many there are. `step_tokens`: tokens of one sequence that steps in
    flight, and the one being planned, may have between them. `held`, `weight_bytes`: of the
    model itself; `drafts` have theirs, and say which of `groups` are theirs. Units: tokens and bytes as named.
    """

    dtype: str
    kv_dtype: str
    max_model_len: int
    block_size: int
    groups: tuple[CacheGroup, ...]
    num_slabs: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    step_tokens: int
    kv_capacity_tokens: int
    weight_bytes: int
    kv_bytes: int
    num_host_slabs: tuple[int, ...] = ()
    decisions: tuple[Decision, ...] = ()
    drafts: tuple[DraftPlan, ...] = ()
    held: HeldWeights = HeldWeights()
    packed_weights: str = "copied"
    stages: tuple[int, ...] = ()

    @property
    def own_groups(self) -> tuple[CacheGroup, ...]:
        """The groups of the model itself."""
        others = {g for draft in self.drafts for g in draft.groups}
        return tuple(group for group in self.groups if group.index not in others)


class _Decisions(list[Decision]):
    def add(self, name: str, value: Any, why: str) -> None:
        self.append(Decision(name, value, why))


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    drafts: Sequence[tuple[str, ModelSpec] | NamedSpec] = (),
    keeping: Keeping | None = None,
    stored: StoredFormats = NO_CODES,
    traits: BackendTraits = REFERENCE,
) -> Plan:
    """Decide every "auto" and None of `config` for this model on this machine; each decision says why.

    `drafts`: models that draft for it; their weights and caches are planned beside its own. `keeping`: the traits of
    `config`'s kv_selector. `stored`: the matrices that the checkpoint stores as codes. `traits`: those of the backend
    that runs it.

    Raises ConfigError for settings that contradict the model or each other, CapacityError (a ConfigError) for what
    does not fit into the machine's available memory; its message gives both sizes and the smallest change that fits.
    """
    decisions = _Decisions()
    check_ranks(config, spec)
    stages = stage_starts(config, spec)
    machine = rank_machine(config, machine)
    if keeping is not None:
        check_keeping(config, spec, keeping)
    dtype = _dtype(config, spec, machine, stored, traits, decisions)
    kv_dtype = _kv_dtype(config, spec, dtype, decisions)
    held = held_by(config, spec, dtype, stored, traits)
    weight_bytes = held.num_bytes(spec)
    for away, decision in experts_in_memory(config, spec, held, traits):
        weight_bytes -= away
        decisions.extend([decision])
    resident = resident_bytes(config, weight_bytes, traits, keeping)
    in_memory = rank_bytes(
        spec, held, int(resident * stage_share(spec, stages)), config.execution.tensor_parallel_size,
        whole_experts=config.execution.enable_expert_parallel,
    )  # fmt: skip
    check_weights(in_memory, held, spec, machine)
    decisions.extend(weight_decisions(spec, held, stored))
    packed_weights = copies_packed(config, weight_bytes, machine)
    if traits.quantizes:
        decisions.append(packed_weights)
    activations = activation_decision(config, spec, held, stored)
    if activations is not None:
        decisions.append(activations)
    max_model_len = _max_model_len(config, spec, keeping, decisions)
    regime = rope_decision(spec, max_model_len)
    if regime is not None:
        decisions.append(regime)
    max_num_seqs, max_num_batched_tokens = _limits(config, max_model_len, traits, decisions)

    hidden = hidden_decision(config, spec, kv_dtype)
    decisions.extend([hidden] if hidden is not None else [])
    draft_models = [NamedSpec(*draft) for draft in drafts]
    groups, planned, why_drafts = plan_drafts(
        draft_models,
        groups_of(spec, kv_dtype, keeping, hidden=hidden is not None),
        held=[_draft_weights(config, draft, dtype, traits) for draft in draft_models],
        kv_dtype=parse_kv_format(kv_dtype).default.plain or dtype,
        max_model_len=max_model_len,
    )
    decisions.extend(why_drafts)
    drafted = {g for draft in planned for g in draft.groups}
    own, why_whose = ranked_groups(config, spec, [g for g in groups if g.index not in drafted])
    groups = (*own, *(g for g in groups if g.index in drafted))
    check_layerkv(config, groups, len(spec.layers))
    check_modules(config, spec, groups)
    all_weights = check_draft_weights(in_memory, planned, machine)
    block_size = config.cache.block_size
    step_tokens = tokens_in_flight(config, max_model_len, max_num_batched_tokens)
    kept = (*widest_groups(own, stages), *groups[len(own) :])
    sizes = sizes_of(config, kept, step_tokens, keeping)
    demand = Demand(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        seqs_are_given=config.scheduler.max_num_seqs is not None,
        checkpoints=config.cache.enable_prefix_caching,
        on_demand=not config.cache.kv_allocator.startswith("contiguous"),
        adapter_blocks=pool_blocks(config, spec, groups, block_size),
    )
    if config.lora.enable_lora:
        all_weights += 0 if adapter_units(config, groups, block_size) else config.lora.max_bytes
        why = f"adapters at once; {config.lora.in_memory} are kept"
        decisions.add("max_loras", config.lora.max_loras, f"{why}, of rank {config.lora.max_lora_rank} at most")
        decisions.extend([adapter_decision(config, groups, block_size)])
    budget = budget_for(config.cache, all_weights, machine, sizes, demand)
    memory = plan_memory(config.cache, sizes, demand, budget)
    num_slabs = sizes.per_group(memory.num_blocks, memory.num_slots, memory.window_blocks)
    kv_bytes = sum(n * g.slab_bytes(block_size) for n, g in zip(num_slabs, kept, strict=True))
    if sizes.block_bytes:
        capacity = memory.num_blocks * block_size
        if keeping is not None:  # one of that length fits, for it gives tokens up on its way
            capacity = max(capacity, max_model_len)
    else:
        most = sizes.most_blocks(max_model_len)
        complete = [slabs // each for slabs, each in zip(memory.window_blocks, most, strict=True)]
        capacity = min([memory.max_num_seqs, *complete]) * max_model_len
    decisions.extend(memory.decisions)
    if not config.sizes_kv:
        decisions.add(
            "kv_cache_memory_bytes", kv_bytes,
            f"at most, taken a little ahead of use; the limit is {budget.why}",
        )  # fmt: skip
    if config.execution.num_ranks > 1:
        why_whose += f"; {experts}" if (experts := whose_experts(config, spec)) else ""
        why = f"each holds about {gib(in_memory)} of weights, and up to {gib(kv_bytes)} of keys and values"
        field, why = config.execution.ranks_field, f"{why}; {'; '.join(filter(None, (stages_said(stages), why_whose)))}"
        decisions.add(field, getattr(config.execution, field), why)
    _explain_limits(config, memory.max_num_seqs, max_num_seqs, max_num_batched_tokens, budget, decisions)
    return Plan(
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        groups=groups,
        num_slabs=num_slabs,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
        kv_capacity_tokens=capacity,
        weight_bytes=weight_bytes,
        held=held,
        packed_weights=packed_weights.value,
        kv_bytes=kv_bytes,
        stages=stages,
        num_host_slabs=_host_slabs(config, kept, memory.max_num_seqs, max_model_len, decisions),
        step_tokens=step_tokens,
        decisions=tuple(decisions),
        drafts=planned,
    )


def tokens_in_flight(config: EngineConfig, max_model_len: int, max_num_batched_tokens: int) -> int:
    """Tokens that one sequence may have in steps in flight and the one being planned: a chunk in each."""
    chunk = max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill:
        chunk = max(chunk, max_model_len)
    elif config.scheduler.long_prefill_token_threshold:
        chunk = min(chunk, config.scheduler.long_prefill_token_threshold)
    return chunk * config.execution.depth


def sizes_of(
    config: EngineConfig, groups: tuple[CacheGroup, ...], step_tokens: int, keeping: Keeping | None = None
) -> CacheSizes:
    """Sizes of the groups as the allocator uses them: all but the paged one keep the blocks that left a window."""
    if config.cache.kv_allocator != "paged":
        groups = without_windows(groups)
    return CacheSizes.of(groups, config.cache.block_size, step_tokens, keeping)


def _host_slabs(
    config: EngineConfig, groups: tuple[CacheGroup, ...], max_num_seqs: int, max_model_len: int, decisions: _Decisions
) -> tuple[int, ...]:
    """Slabs of the host pools: states for every sequence that may be preempted, blocks for the rest of swap_space."""
    total = int(config.cache.swap_space * 2**30)
    if config.cache.enable_hierarchical_cache:
        _check_offload(config, groups, "enable_hierarchical_cache")
    if offload_of(config.cache.kv_offload) is not None:
        _check_offload(config, groups, "kv_offload")
    if parse_kv_events(config.cache.kv_events_config) is not None:
        _check_events(config, groups)
    if total == 0 and config.scheduler.preemption_mode == "swap":
        raise ConfigError(
            "preemption_mode: swap needs host memory; give swap_space (GiB), or use recompute", field="preemption_mode"
        )
    if total == 0 or any(group.spec.whole for group in groups):  # blocks on one rank each stay there
        return (0,) * len(groups)
    if config.cache.swap_tier == "disk" and config.cache.kv_selector != "none":
        raise ConfigError(
            f"swap_tier: what kv_selector {config.cache.kv_selector} sets aside is read where it is; use host",
            field="swap_tier",
        )
    sizes = sizes_of(config, groups, step_tokens=0)  # no step works on what waits there
    num_slots = min(max_num_seqs, total // sizes.state_bytes) if sizes.state_bytes else 0
    rest = total - num_slots * sizes.state_bytes
    most = rest // sizes.block_bytes if sizes.block_bytes else max_num_seqs * sizes.blocks(max_model_len)
    num_blocks = sizes.most_affordable(rest, max_num_seqs, max_model_len, most)
    decisions.add("num_host_blocks", num_blocks, f"what swap_space {gib(total)} holds of preempted sequences")
    window_blocks = sizes.window_blocks(num_blocks, max_num_seqs, max_model_len)
    return sizes.per_group(num_blocks, num_slots, window_blocks)


def _check_offload(config: EngineConfig, groups: tuple[CacheGroup, ...], field: str) -> None:
    """Raises ConfigError, with what to change, where blocks cannot wait outside the device."""
    cache = config.cache
    problem = ""
    if field == "enable_hierarchical_cache" and not cache.swap_space:
        problem = "needs host memory; give swap_space (GiB)"
    elif not cache.enable_prefix_caching or cache.prefix_cache == "none":
        problem = "is about the prefix cache, which is off; enable_prefix_caching, with prefix_cache radix or hash"
    elif cache.kv_allocator != "paged":
        problem = f"there is no prefix cache with kv_allocator {cache.kv_allocator}; use paged"
    elif cache.kv_selector != "none":
        problem = f"does not go together with kv_selector {cache.kv_selector}; use one of them"
    elif field == "enable_hierarchical_cache" and any(group.spec.kind != "paged" for group in groups):
        problem = "is for models whose layers all keep their whole context, unlike this one's; leave it off"
    if problem:
        raise ConfigError(f"{field}: {problem}", field=field)
    if field == "kv_offload" and cache.kv_offload_format in BLOCK_CODECS:
        known = BLOCK_CODECS.traits(cache.kv_offload_format).dtypes
        kept = {plane.dtype for g in groups if g.spec.per_token for plane in (*g.spec.planes, *g.spec.page_planes)}
        if not kept <= {*known}:
            raise ConfigError(
                f"kv_offload_format: {cache.kv_offload_format} writes {', '.join(known)}, and kv_cache_dtype "
                f"{cache.kv_cache_dtype} keeps {', '.join(sorted(kept - {*known}))}; use plain, or another type",
                field="kv_offload_format",
            )


def _check_events(config: EngineConfig, groups: tuple[CacheGroup, ...]) -> None:
    """Raises ConfigError, with what to change, where there are no blocks to tell of."""
    if problem := events_problem(config, groups):
        raise ConfigError(f"kv_events_config: {problem}", field="kv_events_config")


def events_problem(config: EngineConfig, groups: tuple[CacheGroup, ...]) -> str:
    """Why an engine has no blocks to tell of; "" if it has."""
    cache = config.cache
    if not cache.enable_prefix_caching or cache.prefix_cache == "none" or cache.kv_allocator != "paged":
        return "tells what the prefix cache keeps, which is off; enable_prefix_caching, with kv_allocator paged"
    if not any(group.spec.per_token for group in groups):
        return "tells of blocks, and this model has none, only states; leave it off"
    return ""


def _dtype(
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    stored: StoredFormats,
    traits: BackendTraits,
    decisions: _Decisions,
) -> str:
    if config.model.dtype != "auto":
        return config.model.dtype
    if not traits.widens:
        decisions.add("dtype", spec.dtype, "the checkpoint's own type, which products read as it is")
        return spec.dtype
    if spec.dtype == "float32":
        decisions.add("dtype", "float32", "the checkpoint's own type")
        return "float32"
    widened = hold_weights(spec, "float32", NONE, stored, traits=REFERENCE, exact=True).num_bytes(spec)
    available = machine.available_bytes
    if 2 * widened <= available:
        decisions.add(
            "dtype", "float32",
            f"the reference operations compute in float32 and would widen every {spec.dtype} weight at every step; "
            f"widened once, the weights take {gib(widened)}, at most half of the available {gib(available)}",
        )  # fmt: skip
        return "float32"
    decisions.add(
        "dtype", spec.dtype,
        f"the checkpoint's own type; widened to float32 the weights would take {gib(widened)}, "
        f"more than half of the available {gib(available)}",
    )  # fmt: skip
    return spec.dtype


def _draft_weights(config: EngineConfig, draft: NamedSpec, dtype: str, traits: BackendTraits) -> HeldWeights:
    """Its dtype as the target's was decided: given for both, the checkpoint's own, or widened where the target is.
    No scheme rounds a draft model."""
    exact = config.model.dtype == "auto"
    own = draft.spec.dtype if exact and not (traits.widens and dtype == "float32") else dtype
    return hold_weights(draft.spec, own, NONE, draft.stored, traits=traits, exact=exact)


def _kv_dtype(config: EngineConfig, spec: ModelSpec, dtype: str, decisions: _Decisions) -> str:
    check_kv_format(config, spec)
    given = config.cache.kv_cache_dtype
    if given != "auto":
        return given
    decisions.add("kv_cache_dtype", dtype, "the same as dtype: what is kept is as exact as what is computed")
    return dtype


def _max_model_len(config: EngineConfig, spec: ModelSpec, keeping: Keeping | None, decisions: _Decisions) -> int:
    given = config.model.max_model_len
    if given is None and spec.pooler is not None and spec.pooler.max_tokens is not None:
        decisions.add("max_model_len", spec.pooler.max_tokens, "the longest text that the files of this model name")
        return spec.pooler.max_tokens
    if given is None:
        decisions.add("max_model_len", spec.max_position, "the longest context the model was made for")
        return spec.max_position
    if given > spec.max_position and keeping is not None and keeping.cache_positions:
        why = f"more than the model's {spec.max_position} positions: {keeping.config.method} counts inside the cache"
        decisions.add("max_model_len", given, why)
        return given
    if given > spec.max_position:
        raise ConfigError(
            f"max_model_len: {given} is more than the {spec.max_position} positions this model was made for; "
            f"use at most {spec.max_position}, or stretch rotary positions with rope_scaling",
            field="max_model_len",
        )
    return given


def _limits(config: EngineConfig, max_model_len: int, traits: BackendTraits, decisions: _Decisions) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens), before memory has had its say on the first."""
    seqs, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    need_whole = max_model_len if not config.scheduler.enable_chunked_prefill else 1
    if budget is not None:
        if budget < need_whole:
            raise ConfigError(
                f"max_num_batched_tokens: {budget} cannot hold a sequence of max_model_len {max_model_len} in one "
                f"step, and enable_chunked_prefill is off; use at least {max_model_len}, or switch chunked prefill on",
                field="max_num_batched_tokens",
            )
        if seqs is not None and budget < seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {budget} is less than max_num_seqs {seqs}, but every running sequence needs "
                f"one token per step; raise the first to {seqs} or lower the second to {budget}",
                field="max_num_batched_tokens",
            )
        return (min(DEFAULT_NUM_SEQS, budget) if seqs is None else seqs), budget
    wanted = {
        DEFAULT_BATCHED_TOKENS: (
            "the default; a larger step reads prompts hardly faster and keeps running answers waiting longer"
            if not traits.widens
            else "the reference operations run token by token, so a larger step only adds latency"
        ),
        need_whole: f"chunked prefill is off, so one step must hold a sequence of max_model_len {max_model_len}",
        seqs or DEFAULT_NUM_SEQS: f"each of max_num_seqs {seqs} sequences needs one token per step",
    }
    chosen = max(wanted)
    decisions.add("max_num_batched_tokens", chosen, wanted[chosen])
    return (DEFAULT_NUM_SEQS if seqs is None else seqs), chosen


def _explain_limits(
    config: EngineConfig, final: int, before_memory: int, budget_tokens: int, budget: Budget, decisions: _Decisions
) -> None:
    if config.scheduler.max_num_seqs is not None:
        return
    if final < before_memory:
        why = f"states of more would take over half of what one full-length sequence leaves of {gib(budget.kv_bytes)}"
    elif final < DEFAULT_NUM_SEQS:
        why = f"lowered from {DEFAULT_NUM_SEQS}: each needs one of the step's max_num_batched_tokens {budget_tokens}"
    else:
        why = "the default; more sequences than this only wait for each other on a CPU"
    decisions.add("max_num_seqs", final, why)
