"""Simulations of a machine that was measured: the file of `penstock sim calibrate` in place of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock import __version__
from penstock.backends import BACKENDS
from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError
from penstock.config import SETTINGS, EngineConfig, from_kwargs
from penstock.engine.core import EngineCore
from penstock.executor.sim_files import SimFolder
from penstock.kv.events import EventSettings
from penstock.launch.backend import device_of, traits_of
from penstock.launch.build import Engine
from penstock.launch.names import check_names
from penstock.launch.selection import keeping_of
from penstock.plan.calibrated import CalibratedTimer, Calibration, errors_of, fit
from penstock.plan.cost import RooflineTimer
from penstock.plan.measured import Sample
from penstock.plan.probe import probe
from penstock.plan.resolve import Plan, resolve
from penstock.sim.build import build_sim
from penstock.sim.driver import Progress, SimLimits, simulate
from penstock.sim.result import SimResult
from penstock.sim.workload import Workload

FREE = ("scheduler", "cache")
"""Sections whose settings a simulation may change: they decide what is in a step, not what a step costs."""
TIED = ("kv_cache_dtype", "kv_rotation")
"""Those of them that change what a step costs."""
ALSO_FREE = ("max_model_len",)


def calibration_of(engine: Engine, config: EngineConfig, fitted: list[Sample], held: list[Sample]) -> Calibration:
    """What was measured of `engine`, which was started with `config`, as data. Raises ConfigError for too few steps."""
    machine = msgspec.structs.replace(probe(), flags=frozenset())
    copy_bytes_per_s = device_of(_decided(engine, config), machine.num_cores).host_copy_bytes_per_s
    timer = CalibratedTimer(fit(fitted), copy_bytes_per_s)
    return Calibration(
        model=Path(config.model.model).name, spec=engine.spec, settings=_given(_decided(engine, config)),
        machine=machine, kv_bytes=engine.plan.kv_bytes, curve=timer.curve, copy_bytes_per_s=copy_bytes_per_s,
        num_samples=len(fitted), errors=errors_of(timer, held), version=__version__,
    )  # fmt: skip


def _decided(engine: Engine, config: EngineConfig) -> EngineConfig:
    """With the backend that `ops="auto"` became."""
    ops = next((d.value for d in engine.decisions if d.name == "ops"), config.execution.ops)
    return replace(config, execution=replace(config.execution, ops=ops))


def _given(config: EngineConfig) -> dict[str, Any]:
    """Settings that are not the defaults."""
    defaults = from_kwargs({}, model="-").as_kwargs()
    values = {name: value for name, value in config.as_kwargs().items() if value != defaults[name] and name != "model"}
    found: dict[str, Any] = msgspec.to_builtins(values)
    return found


def config_for(calibration: Calibration, given: Mapping[str, Any]) -> EngineConfig:
    """The measured engine's settings with others in their place.

    Raises ConfigError for a setting that changes what a step costs: it would have to be measured.
    """
    settings = dict(calibration.settings)
    for name, value in given.items():
        item = SETTINGS.get(name)
        free = item is None or (item.section in FREE and name not in TIED) or name in ALSO_FREE
        own = settings[name] if name in settings else _default(name) if item is not None else value
        if not free and name != "model" and value != own:
            raise ConfigError(
                f"{name}: these step times were measured with {own}, and {value} changes what a step costs; calibrate "
                "with it, or leave it away",
                field=name,
            )
        settings[name] = value
    if settings.get("kv_cache_memory_bytes") is None:
        settings["kv_cache_memory_bytes"] = calibration.kv_bytes
    config = from_kwargs({}, **(settings | {"model": calibration.model}))
    check_names(config)
    return config


def _default(name: str) -> Any:
    return from_kwargs({}, model="-").as_kwargs()[name]


def plan_for(calibration: Calibration, config: EngineConfig) -> Plan:
    """As the engine that was measured plans on its machine. Raises ConfigError, CapacityError."""
    # The pool is given in bytes and the weights have been there: memory beyond these decides nothing.
    machine = msgspec.structs.replace(calibration.machine, memory_bytes=1 << 44, available_bytes=1 << 44)
    return resolve(config, calibration.spec, machine, keeping=keeping_of(config), traits=traits_of(config))


def build_calibrated(
    calibration: Calibration, config: EngineConfig, plan: Plan, clock: VirtualClock, *, seconds_budget: bool = False,
    folder: SimFolder | None = None, events: EventSettings | None = None,
) -> EngineCore:  # fmt: skip
    """The engine that serves, on measured step times; its scheduler predicts with the same cost model as the real
    one's, which knows nothing of these."""
    device = BACKENDS.get(config.execution.ops).device(config, calibration.machine.num_cores)
    return build_sim(
        config, calibration.spec, plan, CalibratedTimer(calibration.curve, calibration.copy_bytes_per_s), clock,
        scheduler_timer=RooflineTimer(calibration.spec, device, dtype=plan.dtype, kv_dtype=plan.kv_dtype),
        depth=config.execution.depth, seconds_budget=seconds_budget, folder=folder, events=events,
    )  # fmt: skip


def run_calibrated(
    calibration: Calibration,
    given: Mapping[str, Any],
    workload: Workload,
    *,
    label: str = "",
    truncate: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> SimResult:
    """What `sim.real.run_real` would come to, predicted: the measured engine with the settings `given` in place of its
    own. Raises ConfigError, CapacityError for settings, InputError for a broken workload."""
    config = config_for(calibration, given)
    plan = plan_for(calibration, config)
    clock = VirtualClock()
    core = build_calibrated(calibration, config, plan, clock)
    limits = SimLimits(plan.max_model_len, plan.kv_capacity_tokens, calibration.spec.vocab_size, truncate=truncate)
    return simulate(core, clock, workload, limits, label=label, progress=progress)
