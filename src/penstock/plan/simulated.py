"""Plans for devices that are formulas: what `resolve` decides where nothing is computed."""

from __future__ import annotations

from dataclasses import replace

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.events import Decision
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec
from penstock.plan.devices import Device
from penstock.plan.memory import asking_for_all
from penstock.plan.probe import probe
from penstock.plan.resolve import Plan, resolve

NUM_SEQS = 256
BATCHED_TOKENS = 2048


def device_plan(config: EngineConfig, spec: ModelSpec, device: Device) -> tuple[EngineConfig, Plan]:
    """`sim_plan` for a device; one that is a CPU is planned as `resolve` plans for CPUs. `memory_bytes` None is this
    machine's available memory. Raises ConfigError, CapacityError.
    """
    _check(config)
    machine = probe()
    memory_bytes = device.memory_bytes or machine.available_bytes
    if device.name.startswith("cpu"):
        machine = Machine(num_cores=machine.num_cores, memory_bytes=memory_bytes, available_bytes=memory_bytes)
        return config, resolve(config, spec, machine)
    return sim_plan(config, spec, memory_bytes)


def _check(config: EngineConfig) -> None:
    if config.selection is not None:
        raise ConfigError(
            f"kv_selector: what {config.selection.method} keeps follows from attention, of which a simulation knows "
            "nothing; use none",
            field="kv_selector",
        )


def sim_plan(config: EngineConfig, spec: ModelSpec, memory_bytes: int) -> tuple[EngineConfig, Plan]:
    """(settings with a simulated accelerator's defaults, the plan for them on a device with so much memory).

    What `resolve` decides for a CPU (float32 where it fits, small steps) does not suit a simulated accelerator: the
    type is the checkpoint's own, a step holds BATCHED_TOKENS tokens of NUM_SEQS sequences unless the settings say
    otherwise. Raises ConfigError, CapacityError.
    """
    _check(config)
    config = asking_for_all(config)  # nobody else uses an accelerator's memory
    chosen: list[Decision] = []
    model, scheduler = config.model, config.scheduler
    if model.dtype == "auto":
        model = replace(model, dtype=spec.dtype)
        chosen.append(Decision("dtype", spec.dtype, "the checkpoint's own type; the simulated device computes in it"))
    budget = scheduler.max_num_batched_tokens
    if scheduler.max_num_seqs is None:
        n = NUM_SEQS if budget is None else min(NUM_SEQS, budget)
        scheduler = replace(scheduler, max_num_seqs=n)
        chosen.append(Decision("max_num_seqs", n, "the default of simulated devices; give it to change it"))
    if budget is None:
        n = max(BATCHED_TOKENS, scheduler.max_num_seqs or 1)
        if not scheduler.enable_chunked_prefill:
            n = max(n, model.max_model_len or spec.max_position)
        scheduler = replace(scheduler, max_num_batched_tokens=n)
        chosen.append(Decision("max_num_batched_tokens", n, "the default of simulated devices; give it to change it"))
    config = replace(config, model=model, scheduler=scheduler)
    machine = Machine(num_cores=1, memory_bytes=memory_bytes, available_bytes=memory_bytes, arch="simulated")
    plan = resolve(config, spec, machine)
    named = {decision.name for decision in plan.decisions}
    kept = [decision for decision in chosen if decision.name not in named]
    return config, _with(plan, (*kept, *plan.decisions))


def _with(plan: Plan, decisions: tuple[Decision, ...]) -> Plan:
    fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return Plan(**(fields | {"decisions": decisions}))
