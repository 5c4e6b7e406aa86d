"""Every engine that is installed, one after the other on every repeat, into a file that can be continued.

    python -m benchmarks.peers.run --engines penstock:bf16,llamacpp:bf16,openvino:bf16 --out results.jsonl

A cell is one engine and precision, model, workload and repeat within a group of engines that share the machine. Only
figures of one group are compared: its engines take turns, and the order turns too. What is in the file is not measured
again; what failed is, with --retry-failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import measure, refcheck
from benchmarks.peers.engines import (
    ANCHORS,
    ENGINES,
    Place,
    Spec,
    default_place,
    highest_id,
    make_groups,
    options_of,
    problem,
    resident_bytes,
)
from benchmarks.peers.process import EngineError, EngineProcess, names, started
from benchmarks.peers.results import Results, opened
from benchmarks.peers.workloads import WARM_UP, workload
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock.bench.bandwidth import ReadProbe
from penstock.plan.probe import probe as probe_machine

MOST_STARTS = 2
"""After so many failed starts in a row an engine's remaining cells of the group are failures too."""
KEPT_TOKENS = 64
KEPT_REQUESTS = 2
"""Of every cell so much is kept, for the check of correctness."""


@dataclass(frozen=True)
class Cell:
    group: str
    spec: Spec
    model: str
    workload: str
    repeat: int

    @property
    def key(self) -> str:
        return "|".join((self.group, str(self.spec), self.model, self.workload, str(self.repeat)))

    def about(self) -> dict[str, Any]:
        return {
            "key": self.key, "group": self.group, "engine": self.spec.engine, "precision": self.spec.precision,
            "model": self.model, "workload": self.workload, "repeat": self.repeat,
        }  # fmt: skip


@dataclass
class Settings:
    """How to run. Times in seconds."""

    place: Place
    threads: int
    cell_s: float = 600.0
    start_s: float = 900.0
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    retry_failed: bool = False
    freeze_idle: bool = False


def order(group: Sequence[Spec], repeat: int) -> list[Spec]:
    """The group's turns in a repeat: each repeat begins with the next engine, so that none always follows the same."""
    shift = repeat % len(group)
    return [*group[shift:], *group[:shift]]


def cells(group: Sequence[Spec], model: str, workloads: Sequence[str], repeats: dict[str, int]) -> Iterator[Cell]:
    """In the order in which they are measured."""
    name = names(group)
    for w in workloads:
        for repeat in range(repeats[w]):
            for spec in order(group, repeat):
                yield Cell(name, spec, model, w, repeat)


def due(wanted: Sequence[Cell], results: Results, *, retry_failed: bool) -> list[Cell]:
    """Those that the file does not have yet."""
    there = results.latest("cell")
    return [c for c in wanted if c.key not in there or (retry_failed and "error" in there[c.key])]


class Runner:
    """One group on one model. Engines start when their first cell comes and stay until the group is done."""

    def __init__(self, settings: Settings, results: Results, probe: ReadProbe, say: Any) -> None:
        self.settings, self.results, self.probe, self.say = settings, results, probe, say
        self._engines: dict[Spec, EngineProcess] = {}
        self._told: dict[Spec, dict[str, Any]] = {}
        self._failed_starts: dict[Spec, tuple[int, str]] = {}
        self._warm: set[tuple[Spec, str]] = set()

    def measure(self, cell: Cell) -> bool:
        """Measure and record; a failure is recorded like a figure. Says whether it went well."""
        began = time.time()
        try:
            engine = self._engine(cell)
            self._thaw(cell.spec)
            self._warm_up(cell, engine)
            entry = self._figures(cell, engine)
        except EngineError as error:
            entry = {"error": str(error)}
            if error.is_gone:
                self._forget(cell.spec)
        except ValueError as error:  # answers of the wrong length
            entry = {"error": str(error)}
        told = self._told.get(cell.spec, {})
        about: dict[str, Any] = {k: told[k] for k in ("version", "weight_bytes", "start_s") if k in told}
        self.results.add({"kind": "cell", **cell.about(), "at": began, **about, **entry})
        return "error" not in entry

    def close(self) -> None:
        for spec, engine in self._engines.items():
            engine.freeze(False)
            peak = engine.stop()
            if peak:
                key = f"peak|{spec}|{time.time():.0f}"
                self.results.add({"kind": "note", "key": key, "engine": str(spec), "peak_bytes": peak})
        self._engines.clear()

    def _engine(self, cell: Cell) -> EngineProcess:
        spec, s = cell.spec, self.settings
        if spec in self._engines:
            return self._engines[spec]
        count, why = self._failed_starts.get(spec, (0, ""))
        if count >= MOST_STARTS:
            raise EngineError(f"did not start {count} times: {why}", is_gone=False)
        self.say(f"starting {spec}")
        try:
            engine, told = started(
                spec, s.place, cell.model, s.threads, options_of(spec, s.place, s.options), timeout_s=s.start_s,
                logs=s.place.folder / "logs",
            )  # fmt: skip
        except EngineError as error:
            self._failed_starts[spec] = (count + 1, str(error))
            raise EngineError(f"did not start: {error}", is_gone=True) from None
        self._failed_starts.pop(spec, None)
        self._engines[spec], self._told[spec] = engine, told
        return engine

    def _forget(self, spec: Spec) -> None:
        engine = self._engines.pop(spec, None)
        if engine is not None:
            engine.kill()
        self._warm = {(s, w) for s, w in self._warm if s != spec}

    def _thaw(self, spec: Spec) -> None:
        if self.settings.freeze_idle:
            for other, engine in self._engines.items():
                engine.freeze(other != spec)

    def _warm_up(self, cell: Cell, engine: EngineProcess) -> None:
        """Once per start and workload: buffers, caches, compiled shapes. Not measured."""
        if (cell.spec, cell.workload) not in self._warm:
            self._ask(cell, engine, WARM_UP)
            self._warm.add((cell.spec, cell.workload))

    def _ask(self, cell: Cell, engine: EngineProcess, repeat: int) -> tuple[Any, dict[str, Any]]:
        w = workload(cell.workload, repeat, highest=highest_id(cell.model, self.settings.place))
        if w.before:
            engine.ask(self.settings.cell_s, op="run", requests=w.before)
        return w, engine.ask(self.settings.cell_s, op="run", requests=w.requests)

    def _figures(self, cell: Cell, engine: EngineProcess) -> dict[str, Any]:
        before = self.probe.measure(3)
        w, answer = self._ask(cell, engine, cell.repeat)
        after = self.probe.measure(3)
        return {
            "figures": measure.figures(w.requests, answer["stamps"], answer["wall_s"]),
            "probe_before": before.median, "probe_after": after.median, "probe": before.method,
            "tokens": [ids[:KEPT_TOKENS] for ids in answer["tokens"][:KEPT_REQUESTS]],
        }  # fmt: skip


def machine() -> dict[str, Any]:
    """What the figures were taken on, for the head of the report."""
    found = probe_machine()
    name = ""
    with Path("/proc/cpuinfo").open() as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": name, "arch": found.arch, "cores": found.num_cores, "memory_bytes": found.memory_bytes,
        "python": platform.python_version(), "load_before": os.getloadavg()[0],
    }  # fmt: skip


@contextmanager
def bar(total: int, console: Console) -> Iterator[tuple[Any, Any]]:
    """(say, advance) of a progress bar with an estimate of what is left."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left about"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)
        yield (
            lambda text: progress.update(task, description=text),
            lambda: progress.advance(task),
        )


def run(
    groups: Sequence[Sequence[Spec]], models: Sequence[str], workloads: Sequence[str], repeats: dict[str, int],
    settings: Settings, results: Results, console: Console, *, probe_bytes: int = 512 << 20,
) -> int:  # fmt: skip
    """All cells that are due; returns how many failed."""
    results.add({"kind": "note", "key": f"machine|{time.time():.3f}", "machine": machine()})
    failed = 0
    with ReadProbe(probe_bytes, settings.threads) as probe:
        todo = [list(cells(group, model, workloads, repeats)) for model in models for group in groups]
        left = [due(part, results, retry_failed=settings.retry_failed) for part in todo]
        num, there = sum(map(len, left)), sum(map(len, todo)) - sum(map(len, left))
        console.print(f"{num} cells to measure, {there} already there")
        with bar(num, console) as (say, advance):
            for part in left:
                runner = Runner(settings, results, probe, say)
                try:
                    for cell in part:
                        say(f"{cell.spec} {cell.model} {cell.workload} #{cell.repeat}")
                        if not runner.measure(cell):
                            failed += 1
                            why = results.latest("cell")[cell.key]["error"]
                            console.print(f"{cell.key}: {why}", style="red", markup=False)
                        advance()
                finally:
                    runner.close()
    return failed


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", help="NAME:PRECISION,...; default: all that are installed")
    parser.add_argument("--groups", help="groups by hand: lists like --engines, with ; between them")
    parser.add_argument("--anchor", help="the engine that runs in every group; default: the first of " + str(ANCHORS))
    parser.add_argument("--models", default="qwen2.5-0.5b", help="names in models/, or folders; default: qwen2.5-0.5b")
    parser.add_argument("--workloads", default="W1,W2,W3,W4")
    parser.add_argument("--repeats", type=int, default=7, help="of W1 and W2 (default: 7)")
    parser.add_argument("--batch-repeats", type=int, default=5, help="of W3 and W4 (default: 5)")
    parser.add_argument("--threads", type=int, default=probe_machine().num_cores)
    parser.add_argument("--memory-gib", type=float, help="for the engines of a group; default: 80 %% of what is free")
    parser.add_argument("--peers", type=Path, help="default: $PENSTOCK_PEERS or ~/.cache/penstock-peers")
    parser.add_argument("--out", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--options", default="{}", metavar="JSON", help='{"penstock:bf16": {"ops": "blas"}}')
    parser.add_argument("--retry-failed", action="store_true")
    parser.add_argument("--freeze-idle", action="store_true", help="stop the processes of engines that wait")
    parser.add_argument("--cell-timeout-s", type=float, default=600.0)
    parser.add_argument("--start-timeout-s", type=float, default=900.0)
    parser.add_argument("--no-check", action="store_true", help="do not compare tokens with the reference")
    parser.add_argument("--plan", action="store_true", help="say what would be done, and end")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace, place: Place, models: list[str], console: Console) -> list[list[Spec]]:
    """The groups of what can be measured; says why the rest cannot."""
    if args.groups:
        given = [[Spec.parse(t) for t in part.split(",")] for part in args.groups.split(";")]
    elif args.engines:
        given = [[Spec.parse(t) for t in args.engines.split(",")]]
    else:
        given = [[Spec(e.name, p) for e in ENGINES.values() if e.name != "fake" for p in e.precisions if p != "fp32"]]
    skipped: dict[str, None] = {}
    here = []
    for group in given:
        missing = {s: why for s in group for m in models if (why := problem(s, m, place)) is not None}
        skipped |= dict.fromkeys(missing.values())
        here.append([s for s in dict.fromkeys(group) if s not in missing])
    for why in skipped:
        console.print(f"skipped: {why}", style="yellow", markup=False)
    if args.groups:
        return [group for group in here if group]
    (specs,) = here
    anchor = (
        Spec.parse(args.anchor) if args.anchor else next((s for a in ANCHORS if (s := Spec.parse(a)) in specs), None)
    )
    wanted = list(dict.fromkeys([*specs, *([anchor] if anchor is not None else [])]))
    sizes = {s: max(resident_bytes(s, m, place) for m in models) for s in wanted}
    memory = args.memory_gib * 2**30 if args.memory_gib else 0.8 * probe_machine().available_bytes
    return make_groups(specs, anchor=anchor, sizes=sizes, memory_bytes=int(memory))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    place = Place(args.peers.expanduser()) if args.peers else default_place()
    models, workloads = args.models.split(","), args.workloads.split(",")
    groups = chosen(args, place, models, console)
    for group in groups:
        console.print("group: " + ", ".join(map(str, group)), markup=False)
    if args.plan or not groups:
        return 0 if groups else 1
    repeats = {w: args.repeats if w in ("W0", "W1", "W2") else args.batch_repeats for w in workloads}
    settings = Settings(
        place, args.threads, args.cell_timeout_s, args.start_timeout_s, json.loads(args.options), args.retry_failed,
        args.freeze_idle,
    )  # fmt: skip
    with opened(args.out) as results:
        failed = run(groups, models, workloads, repeats, settings, results, console)
        wrong = 0 if args.no_check else refcheck.check_all(results, place, console)
    probes = [e[k] for e in results.entries for k in ("probe_before", "probe_after") if k in e]
    if probes:
        console.print(f"memory around the cells: median {statistics.median(probes) / 1e9:.1f} GB/s, "
                      f"{min(probes) / 1e9:.1f} to {max(probes) / 1e9:.1f}")  # fmt: skip
    console.print(f"report: python -m benchmarks.peers.report {args.out}", markup=False)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
