"""One budget for weights, keys and values (`memory_bytes`): what this machine does, and what a search makes of it.

The machine is measured once, at the first start with a budget, by a small engine of the same model within the same
budget; what was found is kept in the cache folder. Without it (`penstock plan` before a first start) it is estimated.
"""

from __future__ import annotations

import mmap
import os
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.base.cache import cache_folder
from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.events import Decision
from penstock.core.machine import Machine
from penstock.core.matrix_format import codes_matrices
from penstock.core.model_spec import ModelSpec
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.core.step_shape import StepShape
from penstock.engine.core import EngineCore
from penstock.families.checkpoint import Checkpoint
from penstock.launch.backend import backend_of, device_of, packed_weights, traits_of
from penstock.launch.selection import keeping_of
from penstock.plan.cost import RooflineTimer
from penstock.plan.layerkv import check_layerkv
from penstock.plan.memory import MODEST_TOKENS, gib
from penstock.plan.offload import OffloadModel, OffloadPlan, OffloadRates, best_plan, kept_layers, offload_plans
from penstock.plan.resolve import Plan, resolve
from penstock.plan.weights import NO_CODES, StoredFormats

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences that are tried where max_num_seqs is not given."""
FEW, MANY = 1, 8
"""Rows of the steps that are measured."""
_STEPS, _WARM, _LENGTH = 16, 4, 32
_DRIVE = 2e9
"""Bytes/s of a disk that nobody has measured."""
_READ_BYTES, _PART_BYTES, _SMALL_BYTES = 256 << 20, 4 << 20, 64 << 10
_READERS = 2
_LAYER = re.compile(r"layers\.(\d+)\.")
Start = Callable[[EngineConfig], EngineCore]


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a file of rates has: `OffloadRates`, and bytes of packed layers and of what is no layer's."""

    read: float
    step_s: float
    row_s: float
    layers_share: float
    read_load: float = 0.0
    kv_read: float | None = None
    layers: list[int] = []
    beside: int = 0

    @property
    def rates(self) -> OffloadRates:
        return OffloadRates(self.read, self.step_s, self.row_s, self.layers_share, self.read_load, self.kv_read)


class OffloadSearch(NamedTuple):
    """All that the search had: `plans`, the first one with most tokens/s; `chosen` of them; `how` rates are known."""

    model: OffloadModel
    rates: OffloadRates
    how: str
    plans: list[OffloadPlan]
    chosen: OffloadPlan


def choose_offload(
    config: EngineConfig, spec: ModelSpec, machine: Machine, stored: StoredFormats = NO_CODES,
    checkpoint: Checkpoint | None = None, start: Start | None = None,
) -> tuple[EngineConfig, tuple[Decision, ...]]:  # fmt: skip
    """`memory_bytes` decided: settings for weights, keys and values, and why. `ops` must have been decided.
    `checkpoint`, `start`: of an engine that may be measured, where nobody has yet.

    Raises: ConfigError for a budget that is too small, or a model that cannot do with one.
    """
    memory = config.execution.memory_bytes
    if memory is None:
        return config, ()
    if not traits_of(config).quantizes or not spec.has_head:
        what = f"ops is {config.execution.ops}" if spec.has_head else "this model generates nothing"
        raise ConfigError(
            f"memory_bytes: weights are shared out for native kernels that generate, and {what}; leave it away",
            field="memory_bytes",
        )
    length = config.model.max_model_len or min(spec.max_position, MODEST_TOKENS)
    config = replace(config, model=replace(config.model, max_model_len=length))
    found = search(config, spec, machine, stored, checkpoint, start)
    return planned(config, found), _decisions(memory, length, found)


def search(
    config: EngineConfig, spec: ModelSpec, machine: Machine, stored: StoredFormats = NO_CODES,
    checkpoint: Checkpoint | None = None, start: Start | None = None,
) -> OffloadSearch:  # fmt: skip
    """Every plan for `config`, whose max_model_len is decided."""
    memory = config.execution.memory_bytes
    assert memory is not None, "there is a budget"
    plan = _alone(config, spec, machine, stored)
    known, how = _known(config, spec, machine, plan, checkpoint, start)
    model = _model(config, spec, plan, known)
    given = config.scheduler.max_num_seqs
    plans = offload_plans(model, memory, known.rates, ROWS if given is None else (given,))
    chosen = best_plan(plans)
    if chosen is None:
        rows = given or 1
        each = model.sets if model.moved else model.row
        kv_bytes = max(model.least_kv, rows * each)
        where = ", all but two layers of them on the disk" if model.moved else ""
        raise ConfigError(
            f"memory_bytes: {gib(memory)} are too few: what is no layer's takes {gib(model.beside)}, the largest layer "
            f"{gib(max(model.layers))}, keys and values of max_num_seqs {rows}{where}, {gib(kv_bytes)}; give at least "
            f"{model.beside + max(model.layers) + kv_bytes}, or a lower max_num_seqs or max_model_len",
            field="memory_bytes",
        )
    return OffloadSearch(model, known.rates, how, plans, chosen)


def planned(config: EngineConfig, found: OffloadSearch) -> EngineConfig:
    """The settings that `found.chosen` stands for."""
    plan, model = found.chosen, found.model
    whole = plan.weight_bytes >= model.beside + sum(model.layers)
    execution = replace(
        config.execution, memory_bytes=None, weight_memory_bytes=None if whole else plan.weight_bytes,
        weight_prefetch=plan.prefetch,
    )  # fmt: skip
    cache = replace(config.cache, kv_cache_memory_bytes=plan.kv_bytes)
    if plan.away:
        swap = plan.rows * max(model.row, model.least_kv)
        cache = replace(
            cache, kv_allocator="layerkv", swap_tier="disk", swap_space=swap / 2**30, kv_layer_rows=plan.rows,
        )  # fmt: skip
    scheduler = replace(config.scheduler, max_num_seqs=plan.rows)
    return replace(config, execution=execution, cache=cache, scheduler=scheduler)


def _decisions(memory: int, length: int, found: OffloadSearch) -> tuple[Decision, ...]:
    plan, model, rates = found.chosen, found.model, found.rates
    keeps = kept_layers(model.layers, plan.weight_bytes, plan.prefetch, beside=model.beside)
    read = sum(size for size, stays in zip(model.layers, keeps, strict=True) if not stays) + plan.away * model.moved
    value = f"{plan.rows} sequences, {keeps.count(True)} of {len(keeps)} layers stay, {plan.prefetch} read ahead"
    if plan.away:
        value += f", keys and values of {plan.away} on the disk"
    others = [other for other in found.plans if (other.rows, other.away) != (plan.rows, plan.away)]
    next_best = f"; next, {others[0].rows} sequences with {others[0].tokens_s:.3g}" if others else ""
    why = (
        f"{plan.tokens_s:.3g} tokens/s expected, {gib(read)} moved in a step of {plan.step_s:.3g} s, the best of "
        f"{len(found.plans)} ways to share {gib(memory)} out{next_best}. Weights {gib(plan.weight_bytes)}, keys and "
        f"values {gib(plan.kv_bytes)}; activations of a step stay in memory besides. Sequences of "
        f"{min(length, MODEST_TOKENS)} tokens are reckoned with"
    )
    said = (
        f"read {rates.read / 1e9:.2f} GB/s, a step {1e3 * rates.step_s:.3g} ms and {1e3 * rates.row_s:.3g} a row, "
        f"{100 * rates.layers_share:.0f} % in layers"
    )
    return Decision("offload_policy", value, why), Decision("offload_rates", said, found.how)


def _alone(config: EngineConfig, spec: ModelSpec, machine: Machine, stored: StoredFormats) -> Plan:
    """Of one sequence: how weights and caches are held."""
    execution = replace(config.execution, memory_bytes=None, weight_memory_bytes=config.execution.memory_bytes)
    one = replace(config, execution=execution, scheduler=replace(config.scheduler, max_num_seqs=1))
    return resolve(one, spec, machine, (), keeping_of(config), stored, traits_of(config))


def _model(config: EngineConfig, spec: ModelSpec, plan: Plan, known: Known) -> OffloadModel:
    layers, beside = (known.layers, known.beside) if known.layers else _estimated_sizes(spec, plan)
    size, length = plan.block_size, plan.max_model_len
    per_block = sum(g.slab_bytes(size) for g in plan.groups if g.spec.per_token)
    states = sum(g.slab_bytes(size) for g in plan.groups if not g.spec.per_token)
    row = -(-min(length, MODEST_TOKENS) // size) * per_block + states
    whole = -(-length // size) * per_block + states
    return OffloadModel(tuple(layers), beside, row, row + per_block if _may_leave(config, spec, plan) else 0, whole)


def _may_leave(config: EngineConfig, spec: ModelSpec, plan: Plan) -> bool:
    """Whether keys and values of single layers may wait on the disk."""
    cache = config.cache
    if (cache.kv_allocator, cache.kv_selector, cache.kv_offload) != ("paged", "none", "none") or cache.swap_space:
        return False
    away = replace(cache, kv_allocator="layerkv", swap_space=1.0, swap_tier="disk")
    try:
        check_layerkv(replace(config, cache=away), plan.groups, len(spec.layers))
    except ConfigError:
        return False
    return len(spec.layers) > 2


def _estimated_sizes(spec: ModelSpec, plan: Plan) -> tuple[list[int], int]:
    layers = [0] * len(spec.layers)
    for name, shape in codes_matrices(spec).items():
        if (found := _LAYER.match(name)) is not None:
            layers[int(found[1])] += plan.held.matrix_bytes(name, shape)
    return layers, max(0, plan.weight_bytes - sum(layers))


# -- what the machine does ---------------------------------------------------------------------------------------------


def _known(
    config: EngineConfig, spec: ModelSpec, machine: Machine, plan: Plan, checkpoint: Checkpoint | None,
    start: Start | None,
) -> tuple[Known, str]:  # fmt: skip
    given = config.execution.offload_rates
    if given != "auto":
        return _read(Path(given)), f"from {given}"
    path = rates_path(config, spec, machine, plan)
    if path.exists():
        try:
            return _read(path), f"measured on this machine, with this model; kept in {path}: remove it to measure again"
        except ConfigError:
            path.unlink(missing_ok=True)
    if start is None or checkpoint is None:
        return _estimated(config, spec, machine, plan), "estimated; the first start measures"
    known = measured(config, checkpoint, plan, start)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(known)) + b"\n")
    beside.replace(path)
    return known, f"measured just now, with this model; kept in {path}"


def rates_path(config: EngineConfig, spec: ModelSpec, machine: Machine, plan: Plan) -> Path:
    """Where rates of this machine with this model are kept."""
    what = (spec, str(plan.held), plan.kv_dtype, config.model.quantization, config.model.activation_quantization)
    where = (machine.num_cores, machine.arch, sorted(machine.flags), config.execution.threads)
    name = sha256(repr((config.model.model, what, where)).encode()).hexdigest()
    return cache_folder("offload") / f"{name[:32]}.json"


def _read(path: Path) -> Known:
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Known)
    except OSError as error:
        raise ConfigError(f"offload_rates: {path}: {error.strerror or error}", field="offload_rates") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"offload_rates: {path} has no rates: {error}", field="offload_rates") from None
    if min(known.read, known.step_s + known.row_s, 1.0 if known.kv_read is None else known.kv_read) <= 0:
        raise ConfigError(f"offload_rates: {path}: rates must be more than 0", field="offload_rates")
    return known


def _estimated(config: EngineConfig, spec: ModelSpec, machine: Machine, plan: Plan) -> Known:
    timer = RooflineTimer(spec, device_of(config, machine.num_cores), dtype=plan.dtype, kv_dtype=plan.kv_dtype)
    few, many = (timer.step_s(StepShape(n, n, n * _LENGTH, n * _LENGTH, n)) for n in (FEW, MANY))
    return _step_rates(few, many, spec, plan, read=_DRIVE, kv_read=_DRIVE / 2)


def _step_rates(few_s: float, many_s: float, spec: ModelSpec, plan: Plan, **more: Any) -> Known:
    row_s = max(0.0, (many_s - few_s) / (MANY - FEW))
    layers, beside = _estimated_sizes(spec, plan)
    head = min(beside, max((plan.held.matrix_bytes(n, s) for n, s in codes_matrices(spec).items()
                            if not _LAYER.match(n)), default=beside))  # fmt: skip
    share = sum(layers) / max(1, sum(layers) + head)
    return Known(step_s=max(few_s - FEW * row_s, 1e-6), row_s=row_s, layers_share=share, **more)


def measured(config: EngineConfig, checkpoint: Checkpoint, plan: Plan, start: Start) -> Known:
    """By an engine that reads its layers within the budget: what steps of few and of many rows take beside the waiting
    for the disk; then the disk by itself."""
    memory = config.execution.memory_bytes
    assert memory is not None, "there is a budget"
    size = config.cache.block_size
    blocks = MANY * -(-_LENGTH // size)
    layers, beside = _estimated_sizes(checkpoint.spec, plan)
    # With a budget near the least this takes a little more, for a moment.
    weights = max(memory - blocks * sum(g.slab_bytes(size) for g in plan.groups), (beside + max(layers)) * 9 // 8)
    bare = replace(
        config,
        model=replace(config.model, max_model_len=_LENGTH, skip_tokenizer_init=True),
        cache=replace(config.cache, num_gpu_blocks_override=blocks, enable_prefix_caching=False, kv_allocator="paged",
                      kv_selector="none", kv_offload="none", enable_hierarchical_cache=False, kv_events_config=None,
                      swap_space=0.0),
        scheduler=replace(config.scheduler, max_num_seqs=MANY, max_num_batched_tokens=None, preemption_mode="auto"),
        execution=replace(config.execution, memory_bytes=None, weight_memory_bytes=weights, weight_prefetch=0,
                          executor="inproc", depth=1, speculative_config=None, log_file=None),
        lora=replace(config.lora, enable_lora=False),
    )  # fmt: skip
    core = start(bare)
    few_s, many_s = (_steps(core, n) for n in (FEW, MANY))
    del core
    store: Any = packed_weights(bare, checkpoint, plan, backend_of(bare))
    sizes: list[int] = store.sizes()
    read, load, kv_read = drive(store.path)
    spec = checkpoint.spec
    known = _step_rates(few_s, many_s, spec, plan, read=read, read_load=load, kv_read=kv_read)
    num = len(spec.layers)
    return msgspec.structs.replace(known, layers=sizes[-num:], beside=sum(sizes[:-num]))


def _steps(core: EngineCore, rows: int) -> float:
    """Seconds of a step that decodes so many, without the waiting for weights."""
    taken = []
    for i in range(rows):
        core.add(Request(request_id=f"{rows}-{i}", prompt_token_ids=[1 + i] * 8, rules=TokenRules(), max_tokens=_STEPS))
    while core.has_work:
        before, began = core.stats.weight_wait_s, time.perf_counter()
        core.step()
        taken.append(time.perf_counter() - began - (core.stats.weight_wait_s - before))
    return statistics.median(taken[_WARM:-1])


def drive(path: Path) -> tuple[float, float, float]:
    """Of a file past the system's cache: bytes/s in large parts, seconds of all processors that go with a byte, bytes/s
    in small parts."""
    import numpy as np

    from penstock.ops.native.direct_file import U8, DirectFile  # who has no budget needs no disk

    file, num_bytes = DirectFile(os.open(path, os.O_RDONLY)), path.stat().st_size // 4096 * 4096
    rates, loads = [], []
    for part in (_PART_BYTES, _SMALL_BYTES):
        out: U8 = np.frombuffer(mmap.mmap(-1, _READERS * part), np.uint8)
        out[:] = 0
        cuts = list(range(0, num_bytes - part, part))[: _READ_BYTES // part]

        def go(k: int, part: int = part, out: U8 = out, cuts: list[int] = cuts) -> None:
            for at in cuts[k::_READERS]:
                file.read(at, out[k * part : (k + 1) * part])

        began, busy = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(go, range(_READERS)))
        total = max(1, len(cuts) * part)
        rates.append(total / max(1e-9, time.perf_counter() - began))
        loads.append((time.process_time() - busy) / total / (os.cpu_count() or 1))
    return rates[0], loads[0], rates[1]
