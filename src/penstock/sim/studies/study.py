"""What a study is: a question, runs that answer it, tables and charts, and the words that go with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.base.clock import VirtualClock
from penstock.config import EngineConfig, from_kwargs
from penstock.core.batch import SchedulerOutput
from penstock.core.events import EngineStats
from penstock.core.model_spec import ModelSpec
from penstock.engine.core import EngineCore
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import Device
from penstock.plan.resolve import Plan
from penstock.plan.simulated import sim_plan
from penstock.report.chart import Chart
from penstock.report.page import render
from penstock.sched.policy.slot_use import SlotUse
from penstock.sim.build import build_sim
from penstock.sim.driver import SimLimits, simulate
from penstock.sim.result import SimResult
from penstock.sim.workload import Workload

Tell = Callable[[str], None]
"""Called with a line that says which run begins."""


@dataclass
class StudyTable:
    """Rows of cells; the first column names the row."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Study:
    """`setup` and `findings` are sentences. Every number in them is taken from the tables' runs."""

    title: str
    question: str
    sources: str
    setup: list[str] = field(default_factory=list)
    tables: list[StudyTable] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The simulated device and model that a study runs on. `scale`: 1 is the full study, less is quicker."""

    spec: ModelSpec
    device: Device
    scale: float
    seed: int

    def requests(self, n: int) -> int:
        return max(20, round(n * self.scale))

    def core(self, **settings: Any) -> tuple[EngineCore, VirtualClock, Plan]:
        """A fresh engine on a fresh clock."""
        # The papers admit whoever fits: what that costs in preemptions is part of the questions.
        config: EngineConfig = from_kwargs(model="(study)", **({"schedule_conservativeness": 0} | settings))
        config, plan = sim_plan(config, self.spec, self.device.memory_bytes or 1 << 34)
        timer = RooflineTimer(self.spec, self.device, dtype=plan.dtype, kv_dtype=plan.kv_dtype)
        clock = VirtualClock()
        return build_sim(config, self.spec, plan, timer, clock, depth=config.execution.depth), clock, plan

    def run(self, workload: Workload, label: str, **settings: Any) -> SimResult:
        """One simulated run."""
        return self.run_with_stats(workload, label, **settings)[0]

    def run_with_stats(self, workload: Workload, label: str, **settings: Any) -> tuple[SimResult, EngineStats, SlotUse]:
        """One simulated run, the engine's own counters and what became of its slots."""
        core, clock, plan = self.core(**settings)
        limits = SimLimits(plan.max_model_len, plan.kv_capacity_tokens, self.spec.vocab_size)
        slots, submit, scheduler = SlotUse(), core.executor.submit, core.scheduler

        def watch(output: SchedulerOutput) -> None:
            # Nothing ran before this step exactly if all that runs now entered with it.
            new_batch = len(output.added) == len(scheduler.running)
            slots.step(len(scheduler.running), len(scheduler.waiting), new_batch=new_batch)
            submit(output)

        core.executor.submit = watch  # type: ignore[method-assign]
        return simulate(core, clock, workload, limits, label=label), core.stats, slots


def page(study: Study) -> str:
    """The study as one self-contained HTML page."""
    return render(
        "sheet.html", title=study.title, intro=(), findings=[study.question, *study.findings], charts=study.charts,
        tables=[(table.title, table.columns, table.rows) for table in study.tables], left_out=(),
        setup=[*study.setup, f"Sources: {study.sources}"], foot="",
    )  # fmt: skip
