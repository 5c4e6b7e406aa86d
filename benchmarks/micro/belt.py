"""The speed of the belt: what scheduling costs per step, with nothing behind it.

    python benchmarks/micro/belt.py [--out belt.html] [--json belt.json]

The executor answers at once, so every microsecond is the engine's own. Two figures per point: `schedule` (the
scheduler's step alone) and `step` (intake to emit). Goal: schedule under 1 ms at 1,000 running and 10,000 waiting.
The run ends with the simulator's own speed and memory on a long synthetic load.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock.base.clock import MonotonicClock
from penstock.config import from_kwargs
from penstock.core.batch import Sampled, SchedulerOutput, StepOutput
from penstock.core.machine import Machine
from penstock.core.protocols import Executor
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.engine.core import EngineCore
from penstock.launch.assemble import engine_core
from penstock.plan.devices import device_preset
from penstock.plan.resolve import resolve
from penstock.report.chart import Chart, Line
from penstock.report.numbers import number
from penstock.sim.specs import find_spec
from penstock.sim.studies.study import Bench, Study, StudyTable, page
from penstock.sim.synthetic import synthetic

RUNNING = (1, 10, 100, 300, 1000, 3000)
WAITING = (0, 1000, 10000)
STEPS = 60
ROOM = Machine(num_cores=2, memory_bytes=1 << 43, available_bytes=1 << 43)


class Echo(Executor):
    """Answers every sample with the same token, at once."""

    depth = 1

    def __init__(self) -> None:
        self._queue: list[SchedulerOutput] = []

    def submit(self, output: SchedulerOutput) -> None:
        self._queue.append(output)

    def collect(self) -> StepOutput:
        out = self._queue.pop(0)
        return StepOutput(out.step, [Sampled(r.seq_id, [5]) for r in out.scheduled if r.num_samples])

    def close(self) -> None:
        self._queue.clear()


def engine(num_running: int) -> EngineCore:
    spec = find_spec("llama-3.1-8b")
    config = from_kwargs(
        model="(belt)", dtype="bfloat16", max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running),
        num_gpu_blocks_override=num_running * 16 + 100, max_model_len=512,
    )  # fmt: skip
    return engine_core(config, resolve(config, spec, ROOM), Echo(), MonotonicClock())


def load(core: EngineCore, n: int, first: int) -> None:
    for i in range(first, first + n):
        prompt = [(i * 7 + j) % 1000 for j in range(32)]
        core.add(Request(request_id=str(i), prompt_token_ids=prompt, rules=TokenRules(), max_tokens=400))


def point(num_running: int, num_waiting: int) -> tuple[list[float], list[float]]:
    """(seconds of schedule, seconds of step) of STEPS decode steps."""
    core = engine(num_running)
    load(core, num_running, 0)
    while len(core.scheduler.running) < num_running or any(not s.is_decoding for s in core.scheduler.running):
        core.step()
    load(core, num_waiting, num_running)
    core.step()
    schedule, inner = core.scheduler.schedule, []

    def timed(step: int, *, idle: bool, now_s: float = 0.0) -> SchedulerOutput | None:
        began = time.perf_counter()
        out = schedule(step, idle=idle, now_s=now_s)
        inner.append(time.perf_counter() - began)
        return out

    core.scheduler.schedule = timed  # type: ignore[method-assign]
    whole = []
    for _ in range(STEPS):
        began = time.perf_counter()
        core.step()
        whole.append(time.perf_counter() - began)
    assert len(core.scheduler.running) == num_running, "the load ran out"
    return inner, whole


def simulator() -> dict[str, float]:
    """Requests per second of one core, and bytes per request, of the simulator on 20,000 short requests."""
    bench = Bench(find_spec("llama-3.1-8b"), device_preset("h200"), 1.0, 0)
    text = "synthetic:poisson?rate=60&prompt=200&output=60&requests=20000"
    began = time.perf_counter()
    bench.run(synthetic(text), "speed", max_num_seqs=256)
    rate = 20000 / (time.perf_counter() - began)
    held = []
    for n in (2000, 6000):  # the difference leaves out what every run holds
        tracemalloc.start()
        result = bench.run(synthetic(f"synthetic:poisson?rate=60&prompt=200&output=60&requests={n}"), "memory")
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(result.requests) == n
    return {"requests_per_s": rate, "bytes_per_request": (held[1] - held[0]) / 4000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write a page with the curves")
    parser.add_argument("--json", help="write all medians")
    args = parser.parse_args()
    console = Console()
    grid = [(r, w) for w in WAITING for r in RUNNING]
    medians: dict[str, dict[str, float]] = {}
    table = StudyTable("Decode steps", ["running", "waiting", "schedule ms", "p95", "step ms", "p95"])
    for running, waiting in track(grid, description="points", console=console):
        schedule, step = (sorted(t * 1e3 for t in samples) for samples in point(running, waiting))
        medians[f"{running}/{waiting}"] = {
            "schedule_ms": statistics.median(schedule),
            "step_ms": statistics.median(step),
        }
        p95 = int(0.95 * STEPS)
        cells = (statistics.median(schedule), schedule[p95], statistics.median(step), step[p95])
        table.rows.append([f"{running:,}", f"{waiting:,}", *(f"{v:.3f}" for v in cells)])
    console.print("simulating ...")
    sim = simulator()
    shown = Table(title=table.title, title_justify="left")
    for column in table.columns:
        shown.add_column(column, justify="right")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
    goal = medians["1000/10000"]["schedule_ms"]
    findings = [
        f"Schedule at 1,000 running and 10,000 waiting: {goal:.3f} ms (goal: under 1 ms).",
        f"Simulator: {sim['requests_per_s']:,.0f} requests/s on one core (200 prompt and 60 output tokens each); "
        f"{sim['bytes_per_request'] * 1e6 / 2**20:,.0f} MiB held per million finished requests.",
    ]
    for line in findings:
        console.print(f"- {line}")
    study = Study("The speed of the belt", "What does the engine itself cost per step?", "our own measurement")
    study.findings, study.tables = findings, [table]
    study.charts = [
        Chart(
            title, x_format=number, y_format=lambda v: f"{v:.3g} ms", log_x=True,
            lines=[
                Line(f"{w:,} waiting", RUNNING, [medians[f"{r}/{w}"][key] for r in RUNNING], style=i)
                for i, w in enumerate(WAITING)
            ],
            note="running sequences, logarithmic",
        )
        for key, title in (("schedule_ms", "schedule"), ("step_ms", "whole step"))
    ]  # fmt: skip
    if args.out:
        Path(args.out).write_text(page(study), encoding="utf-8")
    if args.json:
        Path(args.json).write_text(json.dumps({"medians": medians, "simulator": sim}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
