"""Which backend runs a model: the decision, and the backend."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from penstock.backends import BACKENDS, PREFERRED
from penstock.backends.backend import Backend, WeightStore
from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.backend import BackendTraits
from penstock.core.events import Decision
from penstock.core.held_weights import WeightMemory
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec
from penstock.families.checkpoint import Checkpoint
from penstock.launch.selection import keeping_of
from penstock.plan.devices import Device
from penstock.plan.memory import gib
from penstock.plan.probe import probe
from penstock.plan.ranks import ranks_here
from penstock.plan.resolve import Plan

ON_CPU = ("auto", "cpu")
"""`device` where kernels of this package run."""


def choose_ops(config: EngineConfig, spec: ModelSpec) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """`ops="auto"` decided, and why.

    Raises: ConfigError if a backend is asked for, by `ops` or by `quantization`, and cannot be had.
    """
    given, scheme, place = config.execution.ops, config.model.quantization, config.execution.device
    if place not in ON_CPU:
        if given not in ("auto", "torch"):
            raise ConfigError(f"ops: {given} runs on the CPU, and device is {place}; use ops auto", field="ops")
        given = "torch"
    tried = PREFERRED if given == "auto" else (given,)
    problems: list[str] = []
    for name in tried:
        problem = BACKENDS.get(name).why_not(config, spec)
        if problem is None:
            break
        problems.append(problem)
    else:
        hint = "ops auto" if place in ON_CPU else "device cpu"
        raise ConfigError(f"ops: {given} kernels cannot run this: {problems[0]}; use {hint}", field="ops")
    traits = BACKENDS.traits(name)
    if scheme != "none" and not (traits.quantizes or traits.rounds):
        why = problems[0] if problems else f"ops is {given}"
        raise ConfigError(f"quantization: {scheme} needs the native kernels, and {why}", field="quantization")
    if config.execution.num_ranks > 1 and name != "native":
        why, field = problems[0] if problems else f"ops is {given}", config.execution.ranks_field
        raise ConfigError(f"{field}: only native kernels run on several ranks, and {why}; use 1", field=field)
    if config.execution.ops != "auto":
        return config, ()
    execution = replace(config.execution, ops=name)
    decision = Decision("ops", name, "; ".join([*problems, BACKENDS.get(name).why()]))
    return replace(config, execution=execution), (decision,)


def traits_of(config: EngineConfig) -> BackendTraits:
    """Of the backend that `ops` names; of the reference where that is still open."""
    return BACKENDS.traits(_name(config))


def device_of(config: EngineConfig, num_cores: int) -> Device:
    """What the chosen backend runs on, for predictions."""
    return BACKENDS.get(_name(config)).device(config, num_cores)


def machine_of(config: EngineConfig, machine: Machine, spec: ModelSpec) -> Machine:
    """The machine with the memory of the device that the model runs on. `ops` must have been decided."""
    free = BACKENDS.get(_name(config)).memory(config, spec)
    if free is None:
        return machine
    return msgspec.structs.replace(machine, memory_bytes=free.memory_bytes, available_bytes=free.available_bytes)


def backend_decisions(config: EngineConfig, spec: ModelSpec, plan: Plan) -> tuple[Decision, ...]:
    """What the chosen backend decides by itself. `ops` must have been decided."""
    return BACKENDS.get(_name(config)).decisions(config, spec, plan)


def measuring_backend(config: EngineConfig, threads: int = 0) -> Backend:
    """The same with one product for all rows of a step: who only measures needs no exact batches. `threads`: 0 for as
    many as the settings say."""
    name = traits_of(config).in_batches or _name(config)
    return BACKENDS.get(name).of(config, threads or probe().num_cores)


def backend_of(config: EngineConfig) -> Backend:
    """As `ops` says, with the settings' threads."""
    sharers = ranks_here(config) * config.execution.replicas_here
    return BACKENDS.get(_name(config)).of(config, max(1, probe().num_cores // sharers))


def packed_weights(
    config: EngineConfig, checkpoint: Checkpoint, plan: Plan, backend: Backend, part: str = ""
) -> WeightStore | None:
    """Where the backend keeps the model's weights as it holds them; None where making them anew is quicker, or where
    other matrices are made of them than of the model by itself. `part`: see `Backend.store`."""
    keeping = keeping_of(config)
    if keeping is not None and keeping.ahead:
        return None
    files = sorted({tensor.path for weight in checkpoint.weights.values() for tensor in weight.tensors})
    return backend.store(
        files, checkpoint.spec, held=plan.held, quantization=config.model.quantization, num_bytes=plan.weight_bytes,
        copy=plan.packed_weights == "copied", memory=weight_memory(config), part=part,
    )  # fmt: skip


def weight_memory(config: EngineConfig) -> WeightMemory | None:
    """None: packed weights are in memory, or mapped, before the first step."""
    run = config.execution
    if run.weight_memory_bytes is None and run.packed_weights != "streamed":
        return None
    return WeightMemory(run.weight_memory_bytes, run.weight_prefetch)


def packed_decision(config: EngineConfig, checkpoint: Checkpoint, plan: Plan) -> Decision:
    """Whether the next start finds the model's weights packed; hashes its files if no start has.

    `ops` must have been decided.
    """
    store = packed_weights(config, checkpoint, plan, backend_of(config))
    if store is None:
        return Decision("packed_file", "none", "weights so small, or of these operations, are not kept packed")
    if store.path.exists():
        return Decision("packed_file", "there", f"{gib(store.path.stat().st_size)}, at {store.path}")
    return Decision("packed_file", "missing", f"the next start packs, and leaves {store.path}")


def _name(config: EngineConfig) -> str:
    if config.execution.ops == "auto":
        return "ref" if config.execution.device in ON_CPU else "torch"
    return config.execution.ops
