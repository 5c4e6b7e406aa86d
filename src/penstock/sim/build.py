"""An engine whose device is a formula, and the plan for it."""

from __future__ import annotations

from dataclasses import replace

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.offload import offload_of
from penstock.core.events import Decision
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import StepTimer
from penstock.engine.core import EngineCore
from penstock.executor.sim import SimExecutor
from penstock.executor.sim_files import SimFolder
from penstock.kv.events import EventSettings
from penstock.launch.adaptive import adapt
from penstock.launch.assemble import engine_core
from penstock.plan.devices import Device
from penstock.plan.memory import asking_for_all
from penstock.plan.probe import probe
from penstock.plan.resolve import Plan, resolve
from penstock.sim.store import SimStore

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


def build_sim(
    config: EngineConfig,
    spec: ModelSpec,
    plan: Plan,
    timer: StepTimer,
    clock: VirtualClock,
    *,
    scheduler_timer: StepTimer | None = None,
    depth: int = 1,
    seconds_budget: bool = False,
    check_invariants: bool = False,
    folder: SimFolder | None = None,
    events: EventSettings | None = None,
) -> EngineCore:
    """The engine that serves, with a SimExecutor that takes as long as `timer` says. `depth`: steps in flight.

    `scheduler_timer`: what the scheduler predicts with, if that is another one. `seconds_budget` lets it bound its
    steps in seconds too. `folder`: in place of the one that `kv_offload` names, if it names any; by default one of its
    own, empty and at default rates. `events`: which blocks it holds is recorded (`kv.events`).
    """
    store, wanted = None, offload_of(config.cache.kv_offload)
    if wanted is not None and wanted.remotes:
        raise ConfigError("kv_offload: a simulation knows no remote; give disk:FOLDER,20GiB alone", field="kv_offload")
    if wanted is not None and wanted.disk is not None:
        ahead_bytes = int(config.cache.kv_fetch_ahead * 2**30)
        store = SimStore.of(
            plan, wanted.disk.limit_bytes, folder, load=config.cache.kv_load_policy, ahead_bytes=ahead_bytes
        )
    executor = SimExecutor(
        timer,
        clock,
        vocab_size=spec.vocab_size,
        depth=depth,
        page_bytes=[g.slab_bytes(plan.block_size) // g.pages_per_slab for g in plan.groups],
        files=None if store is None else store.files,
    )
    core = engine_core(
        config,
        plan,
        executor,
        clock,
        timer=scheduler_timer or timer,
        seconds_budget=seconds_budget,
        check_invariants=check_invariants,
        store=None if store is None else store.settings,
        events=events,
    )
    if store is not None:
        core.store_news = store.news
    adapt(config, core)
    return core
