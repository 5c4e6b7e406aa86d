"""Published traces through a real engine with real files, and through the simulator: what each tier is hit for.

    python -m benchmarks.serving.tier_traces --trace mooncake --trace azure --out tier-traces.json

The bundled model serves the trace, shrunk: `SHRINK` tokens of it are one here, so one of Mooncake's blocks of 512 is a
block of 16. Equal block ids are equal tokens. Azure's trace has lengths and times only; conversations are drawn over it
by a seed: a request goes on with the prompt of an earlier one that is shorter, in seven of ten cases. Three tiers hold
less than what comes: device, host, disk. While nothing is to be done the clock jumps to the next arrival, as soon as
what waits to be written is.

Then the simulator serves the same, on the same plan, with a cost table fitted to the real steps and the rates of the
disk measured: hits of each tier in per cent of the prompt tokens that were looked up, and how far both are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import about, save
from rich.console import Console

from penstock.base.clock import MonotonicClock, VirtualClock
from penstock.core.page_ops import DISK
from penstock.core.step_shape import StepShape, shape_of
from penstock.executor.sim_files import DiskRates, SimFolder
from penstock.plan.measured import MeasuredTimer
from penstock.runner.block_files import OVERHEAD, BlockFiles, seal
from penstock.sim.build import build_sim
from penstock.sim.driver import SimLimits, simulate
from penstock.sim.result import SimResult
from penstock.sim.traces import open_trace
from penstock.sim.workload import TimedRequest, Workload

BLOCK = 16
SHRINK = {"mooncake": 512 // BLOCK, "azure": 8}
FILES = {"mooncake": "mooncake_conversation.jsonl", "azure": "azure2023_conv.csv"}
TIERS = ("device", "host", "disk")
CONTINUED, OPEN = 0.7, 400
"""Share of Azure's requests that go on with an earlier one, and how many of these can be gone on with."""


def shrunk(workload: Workload, factor: int, speed: float) -> Workload:
    """Lengths divided by `factor`, times by `speed`."""

    def source() -> Iterator[TimedRequest]:
        for r in workload:
            yield replace(
                r, arrival_s=r.arrival_s / speed, num_prompt=-(-r.num_prompt // factor),
                num_output=-(-r.num_output // factor),
            )  # fmt: skip

    return replace(workload, source=source, block_tokens=max(1, workload.block_tokens // factor))


def conversations(workload: Workload, seed: int) -> Workload:
    """The same lengths and times; who goes on with whose prompt is drawn. All prompts consist of blocks."""

    def source() -> Iterator[TimedRequest]:
        rng, fresh = random.Random(seed), iter(range(1, 1 << 40))
        left: list[tuple[int, ...]] = []
        for r in workload:
            num_blocks = -(-r.num_prompt // BLOCK)
            shorter = [n for n, blocks in enumerate(left) if len(blocks) < num_blocks]
            known = left.pop(rng.choice(shorter)) if shorter and rng.random() < CONTINUED else ()
            blocks = (*known, *(next(fresh) for _ in range(num_blocks - len(known))))
            left = [*left, blocks][-OPEN:]
            yield replace(r, blocks=blocks)

    return replace(workload, source=source, block_tokens=BLOCK)


def load(name: str, folder: Path, requests: int, speed: float, seed: int) -> Workload:
    workload = shrunk(open_trace(folder / FILES[name]).limited(requests), SHRINK[name], speed)
    return workload if name == "mooncake" else conversations(workload, seed)


class JumpingClock(MonotonicClock):
    """The machine's, but for idle times, which it leaves out."""

    def __init__(self, written: Any) -> None:
        super().__init__()
        self._skipped_s = 0.0
        self._written = written

    def now(self) -> float:
        return super().now() + self._skipped_s

    def advance_to(self, time_s: float) -> None:
        while self.now() < time_s and not self._written():
            time.sleep(0.001)
        self._skipped_s += max(0.0, time_s - self.now())


class Real:
    """A real engine over real files, and what its steps took."""

    def __init__(self, model: str, folder: Path, sizes: dict[str, int]) -> None:
        from penstock import LLM

        self.llm = LLM(
            model, skip_tokenizer_init=True, block_size=BLOCK, enable_hierarchical_cache=True,
            num_gpu_blocks_override=sizes["device"], swap_space=sizes["host"] * sizes["bytes"] / 2**30,
            kv_offload=f"disk:{folder},{sizes['disk'] * (sizes['bytes'] + OVERHEAD) / 2**20:.2f}MiB",
            kv_load_policy="wait",  # what other policies read depends on how fast the machine happens to be
        )  # fmt: skip
        self.core: Any = self.llm.engine.core
        self.files: BlockFiles = self.core.executor._runner.storage.outside.tiers[DISK]
        self.samples: list[tuple[StepShape, float]] = []
        self._shapes: list[StepShape] = []
        submit, step = self.core.executor.submit, self.core.step

        def submitted(output: Any) -> None:
            self._shapes.append(shape_of(output.scheduled))
            submit(output)

        def stepped() -> Any:
            began_s = time.perf_counter()
            news = step()
            if len(self._shapes) == 1 and self._shapes[0].num_tokens:
                self.samples.append((self._shapes[0], time.perf_counter() - began_s))
            self._shapes.clear()
            return news

        self.core.executor.submit, self.core.step = submitted, stepped

    @property
    def limits(self) -> SimLimits:
        plan = self.llm.engine.plan
        return SimLimits(plan.max_model_len, plan.kv_capacity_tokens, self.llm.engine.spec.vocab_size, truncate=True)

    def run(self, workload: Workload) -> SimResult:
        clock = JumpingClock(lambda: not self.files._waiting_bytes)
        self.core.clock = clock
        return simulate(self.core, clock, workload, self.limits)  # type: ignore[arg-type]


def rates_of(files: BlockFiles, repeats: int = 12) -> DiskRates:
    """What this disk takes: medians of blocks written and read by one thread as an engine does."""
    size = files._bytes[False] + OVERHEAD
    writes, reads = [], []
    for number in range(repeats):
        path, copy = f"probe/probe/{number:032x}-0", bytearray(os.urandom(size))
        stamps = [time.perf_counter()]
        seal(files._key, path, copy)
        files._write(path, copy)
        stamps.append(time.perf_counter())
        assert files._read(path, bytearray(size)), "a file that was just written cannot be read"
        stamps.append(time.perf_counter())
        (files._folder / path).unlink()
        writes.append(stamps[1] - stamps[0])
        reads.append(stamps[2] - stamps[1])
    for name in ("probe/probe", "probe"):
        (files._folder / name).rmdir()
    # All blocks are of one size, so what a file takes can be said as a time alone.
    return DiskRates(1e15, 1e15, statistics.median(reads), statistics.median(writes))


def copy_rate() -> float:
    """Bytes/s of a copy in memory."""
    data = bytearray(1 << 24)
    began_s = time.perf_counter()
    for _ in range(4):
        bytes(data)
    return 4 * len(data) / (time.perf_counter() - began_s)


def simulated(real: Real, workload: Workload, rates: DiskRates) -> SimResult:
    """The same plan and settings; steps by a cost table fitted to the real ones."""
    engine = real.llm.engine
    timer = MeasuredTimer.from_samples(real.samples, copy_bytes_per_s=copy_rate())
    clock = VirtualClock()
    core = build_sim(real.llm.config, engine.spec, engine.plan, timer, clock, folder=SimFolder(rates))
    return simulate(core, clock, workload, real.limits)


def told(result: SimResult) -> dict[str, Any]:
    hits = result.hits
    shares = {tier: 100 * hits[tier] / max(1, hits["queried"]) for tier in TIERS}
    return {
        "percent": shares, "queried_tokens": hits["queried"], "requests": len(result.requests),
        "preemptions": result.stats.num_preemptions, "span_s": result.span_s,
        "mean_ttft_s": float((result.requests.first_token_s - result.requests.arrival_s).mean()),
    }  # fmt: skip


def compare(name: str, traces: Path, args: argparse.Namespace, place: str | None = None) -> dict[str, Any]:
    """One trace, both ways."""
    sizes = {"device": args.device_blocks, "host": args.host_blocks, "disk": args.disk_blocks}
    workload = load(name, traces, args.requests, args.speed, args.seed)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        real = Real(args.model, Path(folder) / "kv", sizes | {"bytes": args.block_bytes})
        rates = rates_of(real.files)
        by_real = told(real.run(workload))
        by_sim = told(simulated(real, workload, rates))
        real.files.close(60.0)
    apart = {tier: by_sim["percent"][tier] - by_real["percent"][tier] for tier in TIERS}
    return {
        "trace": name, "requests": args.requests, "speed": args.speed, "blocks": sizes, "real": by_real, "sim": by_sim,
        "points_apart": apart, "most_apart": max(map(abs, apart.values())),
        "seconds_of_a_block": {"read": rates.read_s, "written": rates.write_s},
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    out.add_argument("--model", default="nano")
    out.add_argument("--trace", choices=sorted(FILES), action="append", help="both by default")
    out.add_argument("--traces", type=Path, default=Path("shared/data/traces"), help="the folder with the files")
    out.add_argument("--requests", type=int, default=800)
    out.add_argument("--speed", type=float, default=1.0, help="requests come so many times as fast")
    out.add_argument("--seed", type=int, default=1)
    out.add_argument("--device-blocks", type=int, default=600)
    out.add_argument("--host-blocks", type=int, default=2400)
    out.add_argument("--disk-blocks", type=int, default=10_000)
    out.add_argument("--block-bytes", type=int, default=36_864, help="of a block of the model, for sizes of tiers")
    out.add_argument("--out")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console()
    found = []
    for name in args.trace or sorted(FILES):
        with console.status(name):
            found.append(compare(name, args.traces, args))
        console.print_json(json.dumps(found[-1]))
    save(args.out, about(seed=args.seed, found=found))
    return 0 if all(one["most_apart"] <= 2.0 for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
