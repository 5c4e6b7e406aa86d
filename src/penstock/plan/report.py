"""Everything `penstock plan` can say about a model before a weight is read, as data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import msgspec

from penstock.base.errors import CapacityError, ConfigError
from penstock.config import EngineConfig
from penstock.config.selection import Keeping
from penstock.core.backend import BackendTraits
from penstock.core.cache_spec import DTYPE_BYTES, CacheGroup
from penstock.core.events import Decision
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec, cache_groups
from penstock.core.step_shape import EMPTY, StepShape
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import Device
from penstock.plan.drafts import NamedSpec
from penstock.plan.fit import Fit
from penstock.plan.flops import num_active_params
from penstock.plan.memory import asking_for_all
from penstock.plan.operators import Operator, operators
from penstock.plan.resolve import Plan, resolve
from penstock.plan.weights import NO_CODES, StoredFormats

BATCHES = (1, 4, 16, 64, 256)
DECODE_BATCHES = (1, 8, 64)
DEFAULT_CONTEXT = 2048
_NUM_CONTEXTS = 6
_SHORTEST_CONTEXT = 64


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that cache alike. `num_bytes`: per token ("paged", "window") or per sequence ("slot"), over all of them.

    `window`: tokens that a query of these layers sees; older ones are given up. None: all. `model`: the draft model
    whose layers they are; "": those of the model itself.
    """

    kind: str
    num_layers: int
    planes: str
    num_bytes: int
    window: int | None = None
    model: str = ""


class ContextLine(msgspec.Struct, frozen=True, kw_only=True):
    """`fits[i]` tells whether `BATCHES[i]` sequences of `context` tokens fit at once; `most` is the largest number."""

    context: int
    sequence_bytes: int
    fits: tuple[bool, ...]
    most: int


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction. `shares`: what part of `seconds` goes where, adding up to 1; `limit`: what holds the largest back.

    decode: `seconds` of one step in which each of `batch` sequences of `context` tokens gets a token. prefill:
    `seconds` until the first token of one prompt of `context` tokens.
    """

    what: str
    batch: int
    context: int
    fits: bool
    seconds: float
    tokens_per_s: float
    shares: dict[str, float]
    limit: Literal["compute", "memory", "overhead"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Units: bytes, tokens, seconds. `refusal`: why the settings as given do not fit, else None.

    `longest_context`: of one sequence alone; 0, and nothing in `contexts` and `speeds`, if the weights do not fit.
    `max_model_len`: as `resolve` decided; of a refused plan, what was asked for. `kv_bytes_per_token`: of a token that
    every layer still sees. `operators`: by step, where its FLOPs and bytes go. `weight_bytes`: if all weights were of a
    type; `held`: how they are, where some are not of `dtype`, and `held_bytes`, what that takes.
    """

    family: str
    num_params: int
    num_active_params: int
    num_layers: int
    max_position: int
    device: Device
    available_bytes: int
    dtype: str
    kv_dtype: str
    weight_bytes: dict[str, int]
    held: str
    held_bytes: int | None
    groups: tuple[GroupLine, ...]
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    max_model_len: int
    max_num_seqs: int | None
    kv_bytes: int | None
    longest_context: int
    batches: tuple[int, ...]
    contexts: tuple[ContextLine, ...]
    speeds: tuple[Speed, ...]
    decisions: tuple[Decision, ...]
    operators: dict[str, tuple[Operator, ...]]
    refusal: str | None


def report(
    config: EngineConfig, spec: ModelSpec, machine: Machine, device: Device, context: int = DEFAULT_CONTEXT,
    drafts: Sequence[NamedSpec] = (), keeping: Keeping | None = None, stored: StoredFormats = NO_CODES,
    traits: BackendTraits | None = None,
) -> Report:  # fmt: skip
    """Plan for a machine whose memory is `machine`'s and whose rates are `device`'s.

    `context`: tokens a sequence has when its speed is predicted (cut to what fits). `drafts`, `keeping`, `stored`,
    `traits`: as `resolve` takes them; predicted is the model's speed without them. Raises ConfigError for settings that
    contradict the model, the device or each other; what only lacks memory is reported, not raised.
    """
    config, extra = _with_dtype(config, spec, device, traits)
    if device.is_accelerator and not config.sizes_kv:
        config = asking_for_all(config)
        why = "nobody else uses an accelerator's memory; on a CPU, which others use too, the default is less"
        extra = (*extra, Decision("gpu_memory_utilization", config.cache.gpu_memory_utilization, why))
    traits = traits or BackendTraits(widens=device.widens_halves)
    refusal: CapacityError | None = None
    plan = fit = None
    try:
        plan = resolve(config, spec, machine, drafts, keeping, stored, traits)
    except CapacityError as error:
        refusal = error
    with suppress(CapacityError):
        fit = Fit(config, spec, machine, drafts, keeping, stored, traits)
    known = plan or (fit.base if fit is not None else None)
    dtype, kv_dtype = (known.dtype, known.kv_dtype) if known else _given_dtypes(config, spec)
    groups = known.groups if known else cache_groups(spec, kv_dtype)
    size = config.cache.block_size
    draft_models = {g: draft.name for draft in known.drafts for g in draft.groups} if known else {}
    timer = RooflineTimer(spec, device, dtype=dtype, kv_dtype=kv_dtype)
    max_model_len = plan.max_model_len if plan else config.model.max_model_len or spec.max_position
    longest = fit.longest_context() if fit is not None else 0
    budget = known.max_num_batched_tokens if known else 1
    return Report(
        family=spec.family,
        num_params=spec.num_params,
        num_active_params=num_active_params(spec),
        num_layers=len(spec.layers),
        max_position=spec.max_position,
        device=device,
        available_bytes=machine.available_bytes,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weight_bytes={name: spec.num_params * size for name, size in DTYPE_BYTES.items()},
        held=str(known.held) if known and known.held.matrices else "",
        held_bytes=known.weight_bytes if known and known.held.matrices else None,
        groups=tuple(_group_line(group, draft_models.get(group.index, ""), size) for group in groups),
        kv_bytes_per_token=sum(g.token_bytes(size) for g in groups if g.spec.per_token),
        state_bytes_per_sequence=sum(g.slab_bytes(1) for g in groups if not g.spec.per_token),
        max_model_len=max_model_len,
        max_num_seqs=plan.max_num_seqs if plan else None,
        kv_bytes=plan.kv_bytes if plan else None,
        longest_context=longest,
        batches=BATCHES,
        contexts=tuple(_context_line(fit, c) for c in _contexts(max_model_len)) if fit is not None else (),
        speeds=_speeds(timer, fit, min(context, max_model_len, longest), budget) if fit is not None else (),
        decisions=(*extra, *_decisions(config, plan, fit, longest)),
        operators={
            name: operators(spec, timer.work, shape, device, dtype)
            for name, shape in _steps(min(context, max_model_len)).items()
        },
        refusal=None if refusal is None else str(refusal),
    )


def _with_dtype(
    config: EngineConfig, spec: ModelSpec, device: Device, traits: BackendTraits | None
) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """`resolve` decides "auto" for operations that widen 16-bit weights; other devices use the checkpoint's own."""
    own = traits is not None and not traits.widens and spec.dtype in device.flops_per_s  # what `resolve` decides, too
    if config.model.dtype != "auto" or device.widens_halves or own:
        return config, ()
    if spec.dtype in device.flops_per_s:
        dtype, why = spec.dtype, f"the checkpoint's own type; {device.name} computes with it"
    else:
        dtype, why = next(iter(device.flops_per_s)), f"{device.name} does not compute with {spec.dtype}"
    return replace(config, model=replace(config.model, dtype=dtype)), (Decision("dtype", dtype, why),)


def _given_dtypes(config: EngineConfig, spec: ModelSpec) -> tuple[str, str]:
    """(dtype, KV dtype) of a model that does not fit at all: nothing was resolved."""
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    return dtype, dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype


def _decisions(config: EngineConfig, plan: Plan | None, fit: Fit | None, longest: int) -> tuple[Decision, ...]:
    """Of a refused plan: those of the nearest one that fits, if there is one."""
    if plan is not None or fit is None:
        return plan.decisions if plan is not None else ()
    why = "the longest context that fits; what follows is decided for it"
    try:
        near = fit.resolved(config.scheduler.max_num_seqs, longest)
    except ConfigError:
        near = fit.base
        why = "nothing longer fits with these settings; what follows is decided for one sequence"
    return Decision("max_model_len", near.max_model_len, why), *near.decisions


def _group_line(group: CacheGroup, model: str, block_size: int) -> GroupLine:
    dtypes = sorted({p.dtype for p in group.spec.planes})
    parts = [" + ".join(f"{p.name} {p.heads}x{p.dim}" for p in group.spec.planes), *dtypes] if dtypes else []
    for p in group.spec.page_planes:
        each = "each block" if p.every is None else f"every {p.every} tokens"
        parts.append(f"{p.name} {p.heads}x{p.dim} for {each}")
    planes = ", ".join(parts)
    return GroupLine(
        kind=group.spec.kind,
        num_layers=len(group.layers),
        planes=planes,
        num_bytes=group.token_bytes(block_size),
        window=group.spec.window,
        model=model,
    )


def _steps(context: int) -> dict[str, StepShape]:
    """Steps that are taken apart: a prompt of `context` tokens, and decodes behind so many of them."""
    many = DECODE_BATCHES[-1]
    decode = EMPTY.plus(context - 1, 1, 1)
    return {
        "prefill": EMPTY.plus(0, context, 1),
        "decode x1": decode,
        f"decode x{many}": StepShape(*(many * part for part in decode)),
    }


def _contexts(longest: int) -> list[int]:
    """`longest` and quarter after quarter of it, shortest first."""
    out = [longest]
    while len(out) < _NUM_CONTEXTS and out[-1] // 4 >= _SHORTEST_CONTEXT:
        out.append(out[-1] // 4)
    return out[::-1]


def _context_line(fit: Fit, context: int) -> ContextLine:
    most = fit.most_seqs(context)
    return ContextLine(
        context=context,
        sequence_bytes=fit.kv_bytes(1, context),
        fits=tuple(n <= most for n in BATCHES),
        most=most,
    )


def _speeds(timer: RooflineTimer, fit: Fit, context: int, budget: int) -> tuple[Speed, ...]:
    prefill = _speed("prefill", timer, _prefill_shapes(context, budget), 1, context, tokens=context, fits=True)
    decodes = [
        _speed(
            "decode", timer, [StepShape(n, n, n * context, n * context, n)], n, context, tokens=n,
            fits=fit.fits(n, context),
        )
        for n in DECODE_BATCHES
    ]  # fmt: skip
    return prefill, *decodes


def _prefill_shapes(context: int, budget: int) -> list[StepShape]:
    """One prompt alone, cut by the step's token budget; the last step yields a token."""
    starts = range(0, context, budget)
    return [EMPTY.plus(s, min(budget, context - s), int(s + budget >= context)) for s in starts]


def _speed(
    what: str, timer: RooflineTimer, shapes: list[StepShape], batch: int, context: int, *, tokens: int, fits: bool
) -> Speed:
    parts = [timer.phases(shape) for shape in shapes]
    sums = {"overhead": timer.overhead_s * len(shapes)}
    limits: dict[str, Literal["compute", "memory", "overhead"]] = {"overhead": "overhead"}
    for same in zip(*parts, strict=True):
        name = same[0].name
        sums[name] = sum(phase.seconds for phase in same)
        limits[name] = max(same, key=lambda phase: phase.seconds).limit
    seconds = sum(timer.step_s(shape) for shape in shapes)
    return Speed(
        what=what,
        batch=batch,
        context=context,
        fits=fits,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        shares={name: part / seconds for name, part in sums.items()},
        limit=limits[max(sums, key=lambda name: sums[name])],
    )
