"""One simulated engine as data: a model, settings and a plan on a device that is a data sheet or was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.base.clock import VirtualClock
from penstock.config import EngineConfig
from penstock.core.model_spec import ModelSpec
from penstock.core.protocols import StepTimer
from penstock.engine.core import EngineCore
from penstock.executor.sim_files import SimFolder
from penstock.kv.events import EventSettings
from penstock.plan.calibrated import CalibratedTimer, Calibration
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import Device
from penstock.plan.resolve import Plan
from penstock.sim.build import build_sim
from penstock.sim.calibrated import build_calibrated
from penstock.sim.driver import Progress, SimLimits, simulate
from penstock.sim.result import SimResult
from penstock.sim.search import TensorTimer
from penstock.sim.workload import Workload


@dataclass(frozen=True)
class SimulatedService:
    """What `penstock sim` runs a workload through. `seconds_budget`: steps are bounded in seconds too. `degree`: so
    many devices share every layer; `plan` is of all of them together (`sim.search.parallel`)."""

    label: str
    spec: ModelSpec
    config: EngineConfig
    plan: Plan
    device: Device | Calibration
    seconds_budget: bool = False
    degree: int = 1

    @property
    def device_name(self) -> str:
        if isinstance(self.device, Device):
            return self.device.name
        return f"a measured machine of {self.device.machine.num_cores} cores"

    @property
    def timer_name(self) -> str:
        return "roofline" if isinstance(self.device, Device) else "calibrated"

    @property
    def timer(self) -> StepTimer:
        """What steps take on the device, without the engine's own time between them."""
        if isinstance(self.device, Calibration):
            return CalibratedTimer(self.device.curve, self.device.copy_bytes_per_s)
        if self.degree > 1:
            return TensorTimer(self.spec, self.device, self.degree, dtype=self.plan.dtype, kv_dtype=self.plan.kv_dtype)
        return RooflineTimer(self.spec, self.device, dtype=self.plan.dtype, kv_dtype=self.plan.kv_dtype)

    def core(
        self, clock: VirtualClock, folder: SimFolder | None = None, events: EventSettings | None = None
    ) -> EngineCore:
        """A fresh engine on `clock`; `folder` and `events` as in `build_sim`."""
        if isinstance(self.device, Calibration):
            return build_calibrated(
                self.device,
                self.config,
                self.plan,
                clock,
                seconds_budget=self.seconds_budget,
                folder=folder,
                events=events,
            )
        return build_sim(
            self.config, self.spec, self.plan, self.timer, clock, depth=self.config.execution.depth,
            seconds_budget=self.seconds_budget, folder=folder, events=events,
        )  # fmt: skip

    def limits(self, *, truncate: bool = False) -> SimLimits:
        plan = self.plan
        return SimLimits(plan.max_model_len, plan.kv_capacity_tokens, self.spec.vocab_size, truncate=truncate)

    def run(
        self, workload: Workload, *, truncate: bool = False, folder: SimFolder | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> SimResult:  # fmt: skip
        """A workload through a fresh engine. Raises as `simulate`."""
        clock = VirtualClock()
        limits = self.limits(truncate=truncate)
        return simulate(self.core(clock, folder), clock, workload, limits, label=self.label, progress=progress)
