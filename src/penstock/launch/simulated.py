"""An engine whose device is simulated: `simulated_device` names one, or a file of step times of this model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import msgspec

from penstock.base.clock import Clock
from penstock.config import EngineConfig
from penstock.core.events import Decision
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import StepTimer
from penstock.executor.paced import PacedRank
from penstock.launch.backend import traits_of
from penstock.launch.selection import keeping_of
from penstock.plan.calibrated import CalibratedTimer, check_spec, is_calibration, load
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import find_device
from penstock.plan.resolve import Plan, resolve
from penstock.plan.simulated import device_plan


def simulated_plan(config: EngineConfig, spec: ModelSpec, machine: Machine) -> tuple[EngineConfig, Plan]:
    """A file's engine is planned as on this machine, without weights; a device's as `penstock sim` plans.

    Raises ConfigError for a device that is unknown, a file of another model's steps; CapacityError.
    """
    name = config.execution.simulated_device
    assert name is not None
    if is_calibration(name):
        check_spec(load(name), spec, name)
        # Weights are not there: memory beyond the pool decides nothing.
        machine = msgspec.structs.replace(machine, memory_bytes=1 << 44, available_bytes=1 << 44)
        plan = resolve(config, spec, machine, keeping=keeping_of(config), traits=traits_of(config))
    else:
        # Engines share this machine's memory, and each has a device of its own.
        one = replace(config.execution, data_parallel_size=1, data_parallel_size_local=None, max_replicas=None)
        alone = replace(config, execution=one)
        alone, plan = device_plan(alone, spec, find_device(name))
        config = replace(alone, execution=config.execution)
    said = Decision("simulated_device", name, "nothing is computed: tokens are made up, at the pace of this device")
    return config, msgspec.structs.replace(plan, decisions=(said, *plan.decisions))


def simulated_timer(config: EngineConfig, spec: ModelSpec, plan: Plan) -> StepTimer:
    """Seconds of its steps."""
    name = config.execution.simulated_device
    assert name is not None
    if is_calibration(name):
        found = load(name)
        return CalibratedTimer(found.curve, found.copy_bytes_per_s)
    return RooflineTimer(spec, find_device(name), dtype=plan.dtype, kv_dtype=plan.kv_dtype)


def scheduling_timer(config: EngineConfig, spec: ModelSpec, plan: Plan, own: StepTimer) -> StepTimer:
    """What the scheduler predicts with: `own`, this machine's, where the file is of such a machine."""
    name = config.execution.simulated_device
    return own if name is None or is_calibration(name) else simulated_timer(config, spec, plan)


def simulated_rank(config: EngineConfig, plan: Plan, spec: ModelSpec, ends: Collection[int], clock: Clock) -> PacedRank:
    """`ends`: tokens that end sequences, which it never tells. Reads no weights."""
    return PacedRank(
        simulated_timer(config, spec, plan), clock, vocab_size=spec.num_ids, never=ends,
        page_bytes=[group.slab_bytes(plan.block_size) // group.pages_per_slab for group in plan.groups],
        vector_bytes=4 * spec.vector_size,
    )  # fmt: skip
