"""What of a decode step is not the model: microseconds per step, by part.

    python benchmarks/engine/python_share.py [--model MODEL] [--batches 1,8,64] [--quantization int4-w4a8] [--threads 2]

Greedy decoding of the bundled nano (or MODEL) on native kernels, through `LLM` and through the loop of
the server's engine process. Of each step: its whole time, the time inside the model's program (`pst_program_run`), and
the rest. "outside" is measured with that one hook in place; the parts, in a run of their own, with hooks at each part's
border, whose own cost (about half a microsecond each) is in them. Only steps that run one token of
every sequence count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock import LLM, SamplingParams
from penstock.core.batch import SchedulerOutput
from penstock.core.messages import Outputs
from penstock.engine import client, commit, core, loop
from penstock.engine.blackbox import BlackBox
from penstock.kv.manager import KVManager
from penstock.ops.native.program import NativeProgram, StepMemory
from penstock.runner import input_batch, rows, runner, sampler
from penstock.sched.scheduler import Scheduler

PARTS: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "schedule", "scheduler"),
    (KVManager, "drain", "kv"), (KVManager, "submitted", "kv"), (KVManager, "retired", "kv"),
    (rows.RowStore, "apply", "rows"),
    (input_batch.InputBatch, "build", "input batch"),
    (StepMemory, "args", "step arguments"),
    (NativeProgram, "run", "binding"),
    (runner.Runner, "execute", "runner"),
    (commit.Commit, "apply", "commit"),
    (client.OutputProcessor, "process", "detokenise"),
    (core.EngineCore, "step", "engine core"),
)  # fmt: skip


class Clocks:
    """Time by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self._inner = [0]
        self._undo: list[Callable[[], None]] = []

    def hook(self, owner: Any, name: str, part: str) -> None:
        """Every call of `owner.name` counts for `part` from now on."""
        inner, now, clock = self._inner, self.now, time.perf_counter_ns
        original = getattr(owner, name)

        @wraps(original)
        def timed(*args: Any, **kw: Any) -> Any:
            inner.append(0)
            began = clock()
            try:
                return original(*args, **kw)
            finally:
                took = clock() - began
                now[part] += took - inner.pop()
                inner[-1] += took

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, original))

    def unhook(self) -> None:
        while self._undo:
            self._undo.pop()()

    def take(self) -> dict[str, int]:
        """Of the step that ends. Mutates: the times, to zero."""
        found = dict(self.now)
        self.now.clear()
        return found


def hook_all(clocks: Clocks, llm: LLM, *, parts: bool) -> list[tuple[int, dict[str, int]]]:
    """(nanoseconds of the step, of each part) of every decode step of as many rows as there are."""
    library = llm.engine.core.executor.runner._forward.pool.library  # type: ignore[attr-defined]
    clocks.hook(library, "pst_program_run", "program")
    if parts:
        kinds = {type(llm.engine.core.executor.runner.sampler), sampler.Sampler}  # type: ignore[attr-defined]
        for kind in kinds:
            if "sample" in vars(kind):
                clocks.hook(kind, "sample", "sampling")
        for owner, name, part in PARTS:
            clocks.hook(owner, name, part)
    return []


def watch(clocks: Clocks, owner: Any, name: str, core_: Any, batch: int) -> list[tuple[int, dict[str, int]]]:
    """Steps, as `owner.name` makes them."""
    steps: list[tuple[int, dict[str, int]]] = []
    original = getattr(owner, name)
    shapes: list[SchedulerOutput] = []
    submit = core_.executor.submit

    def submitted(output: SchedulerOutput) -> None:
        shapes.append(output)
        submit(output)

    core_.executor.submit = submitted

    def step(*args: Any, **kw: Any) -> Any:
        shapes.clear()
        clocks.take()
        began = time.perf_counter_ns()
        out = original(*args, **kw)
        took = time.perf_counter_ns() - began
        if len(shapes) == 1 and len(shapes[0].scheduled) == batch == shapes[0].num_tokens and not shapes[0].added:
            steps.append((took, clocks.take()))
        return out

    setattr(owner, name, step)
    clocks._undo.append(lambda: setattr(owner, name, original))
    clocks._undo.append(lambda: setattr(core_.executor, "submit", submit))
    return steps


def through_llm(llm: LLM, batch: int, num_steps: int, *, parts: bool) -> list[tuple[int, dict[str, int]]]:
    clocks = Clocks()
    hook_all(clocks, llm, parts=parts)
    steps = watch(clocks, llm, "_step", llm.engine.core, batch)
    try:
        params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
        llm.generate([f"{i} There was once a king who" for i in range(batch)], params)
    finally:
        clocks.unhook()
    return steps


def through_loop(llm: LLM, batch: int, num_steps: int, *, parts: bool) -> list[tuple[int, dict[str, int]]]:
    """The engine process's loop, with messages encoded as they are for the socket; the other end does nothing."""
    clocks = Clocks()
    encode = msgspec.msgpack.Encoder().encode
    hook_all(clocks, llm, parts=parts)
    core_ = llm.engine.core
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    requests = [llm._request(llm._tokens(f"{i} There was once a king who"), params)[0] for i in range(batch)]

    def emit(message: Outputs) -> None:
        encode(message)
        if not core_.has_work:
            engine_loop.stop()

    engine_loop = loop.EngineLoop(core_, emit, BlackBox())
    steps = watch_turns(clocks, engine_loop, core_, batch)
    try:
        engine_loop.send(requests)
        engine_loop.run()
    finally:
        clocks.unhook()
        core_.watch = None
    return steps


def watch_turns(clocks: Clocks, engine_loop: Any, core_: Any, batch: int) -> list[tuple[int, dict[str, int]]]:
    """Steps: what lies between two looks at the intake."""
    steps: list[tuple[int, dict[str, int]]] = []
    shapes: list[SchedulerOutput] = []
    submit, following = core_.executor.submit, engine_loop._next
    began = [0]

    def submitted(output: SchedulerOutput) -> None:
        shapes.append(output)
        submit(output)

    def turn() -> Any:
        took = time.perf_counter_ns() - began[0]
        found = clocks.take()
        if len(shapes) == 1 and len(shapes[0].scheduled) == batch == shapes[0].num_tokens and not shapes[0].added:
            steps.append((took, found))
        shapes.clear()
        began[0] = time.perf_counter_ns()
        return following()

    core_.executor.submit, engine_loop._next = submitted, turn
    clocks._undo.append(lambda: setattr(core_.executor, "submit", submit))
    return steps


def measure(llm: LLM, batch: int, num_steps: int, drive: Callable[..., Any]) -> dict[str, dict[str, float]]:
    """Microseconds: {what: {"median": ..., "tenth": ..., "min": ...}}, the second what nine tenths exceed."""

    def of(values: list[float]) -> dict[str, float]:
        ranked = sorted(values)
        tenth = ranked[len(ranked) // 10]
        return {"median": statistics.median(ranked) / 1e3, "tenth": tenth / 1e3, "min": ranked[0] / 1e3}

    drive(llm, batch, 8, parts=False)
    plain = drive(llm, batch, num_steps, parts=False)
    out = {
        "step": of([took for took, _ in plain]),
        "program": of([found["program"] for _, found in plain]),
        "outside": of([took - found["program"] for took, found in plain]),
    }
    detailed = drive(llm, batch, num_steps, parts=True)
    names = dict.fromkeys(name for _, found in detailed for name in found if name != "program")
    for name in names:
        out[f"- {name}"] = of([found.get(name, 0) for _, found in detailed])
    out["- other"] = of([took - sum(found.values()) for took, found in detailed])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="write the table as JSON")
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    llm = LLM(
        args.model, ops="native", threads=args.threads, quantization=args.quantization, max_num_seqs=max(batches),
        max_model_len=args.steps + 64,
    )  # fmt: skip
    console = Console()
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for way, drive in (("LLM", through_llm), ("server's loop", through_loop)):
        found = results[way] = {str(b): measure(llm, b, args.steps, drive) for b in batches}
        table = Table(title=f"{way}: µs per step: median, lowest tenth, least", title_justify="left")
        table.add_column("what")
        for batch in found:
            table.add_column(f"batch {batch}", justify="right")
        names = dict.fromkeys(name for rows_ in found.values() for name in rows_)
        for name in names:
            cells = [rows_.get(name, dict.fromkeys(("median", "tenth", "min"), 0.0)) for rows_ in found.values()]
            table.add_row(name, *(f"{c['median']:.0f}  {c['tenth']:.0f}  {c['min']:.0f}" for c in cells))
        console.print(table)
    if args.out:
        settings = vars(args) | {"model": Path(args.model).name}
        with open(args.out, "w", encoding="utf-8") as f:
            json.dump({"machine": platform.machine(), "settings": settings, "results": results}, f, indent=1)


if __name__ == "__main__":
    main()
