"""An engine whose device is a formula."""

from __future__ import annotations

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.offload import offload_of
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import StepTimer
from penstock.engine.core import EngineCore
from penstock.executor.sim import SimExecutor
from penstock.executor.sim_files import SimFolder
from penstock.kv.events import EventSettings
from penstock.launch.adaptive import adapt
from penstock.launch.assemble import engine_core
from penstock.plan.resolve import Plan
from penstock.sim.store import SimStore


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
