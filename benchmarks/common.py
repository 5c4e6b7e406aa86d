"""What the benchmarks of native kernels share: taking turns, describing the machine, writing results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock import __version__
from penstock.bench.bandwidth import ReadProbe
from penstock.report.tables import table

Samples = dict[str, list[float]]
Clock = Callable[[], float]


def clock_of(threads: int) -> Clock:
    """One thread's own time leaves out what other programs take. Several have only the clock on the wall."""
    return time.thread_time if threads == 1 else time.perf_counter


def seconds(work: Callable[[], object], clock: Clock, least_s: float = 0.0) -> float:
    """Of one call, repeated for `least_s` seconds."""
    count, began = 0, clock()
    while True:
        work()
        count += 1
        passed = clock() - began
        if passed >= least_s:
            return passed / count


def take_turns(
    works: Mapping[str, Callable[[], object]], repeats: int, clock: Clock = time.perf_counter, least_s: float = 0.0
) -> Samples:
    """Seconds per call, `repeats` of each: every round runs all of them, and begins with another one."""
    names = list(works)
    samples: Samples = {name: [] for name in names}
    for name in names:
        works[name]()
    for turn in range(repeats):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            samples[name].append(seconds(works[name], clock, least_s))
    return samples


def read_rate(probe: ReadProbe, clock: Clock) -> float:
    """Bytes per second of one pass over the probe's memory."""
    began = clock()
    probe.measure(1)
    return probe.num_bytes / (clock() - began)


def figures(samples: Sequence[float]) -> dict[str, float]:
    """The fastest, the median and the slowest, as they were given."""
    return {"low": min(samples), "median": statistics.median(samples), "high": max(samples)}


def ratios(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """a / b: of the fastest ones, which no other program has slowed down, and round by round."""
    each = [x / y for x, y in zip(a, b, strict=True)]
    return {"of_low": min(a) / min(b), **figures(each)}


def about(**more: Any) -> dict[str, Any]:
    """The machine and the version, and what else is said."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"penstock": __version__, "processor": name, "cores": cores, "load": os.getloadavg()[0], **more}


def save(path: str | None, result: Any) -> None:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def show(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table whose first `left` columns are words."""
    console.print(table(columns, rows, title=title, left=left, box=True))


def ms(value: float) -> str:
    """Seconds as milliseconds of three digits."""
    return f"{value * 1e3:.3g}" if value < 1 else f"{value * 1e3:.0f}"
