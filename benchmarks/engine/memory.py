"""What paging is worth in memory: rows B02, B03, B07 and B08, in counts of slots that no clock can blur.

    python benchmarks/engine/memory.py [--requests 300] [--traces FOLDER]

The real scheduler and KV managers, in virtual time, on a device that computes nothing. Every allocator gets the same
memory, the same requests at once, and runs them to the end. Figures are means over the steps in which a request waits
for memory (saturation), as shares of all slots: *used* ones hold a token, *reserved* ones will before their sequence
ends, *internal* ones never will, *external* ones are free and of no use to whoever waits (`penstock.kv.waste`).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.base.clock import VirtualClock
from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.core.step_shape import StepShape
from penstock.engine.core import EngineCore
from penstock.executor.sim import SimExecutor
from penstock.kv.waste import Waste, waste
from penstock.launch.assemble import engine_core
from penstock.plan.resolve import resolve

ALLOCATORS = ("contiguous", "contiguous-pow2", "contiguous-oracle", "virtual", "paged")
BLOCK_SIZES = (1, 8, 16, 32, 64)
MAX_MODEL_LEN = 4096
POOL_SLOTS = 10 * MAX_MODEL_LEN
VOCAB = 1000
SPEC = ModelSpec(
    family="bench", vocab_size=VOCAB, hidden_size=1, max_position=MAX_MODEL_LEN,
    layers=(Layer(mixer=Attention(num_heads=1, num_kv_heads=1, head_dim=1), ffn=FeedForward(width=1)),),
)  # fmt: skip
TRACES = {
    "azure conversations": ("azure2023_conv.csv", 1, 2),
    "azure code": ("azure2023_code.csv", 1, 2),
    "vidur arxiv": ("vidur_arxiv_summarization_lengths.csv", 0, 1),
}
"""Real lengths: file, columns of prompt and answer. Azure: Splitwise, arXiv 2311.18677; Vidur: arXiv 2405.05465."""

Lengths = list[tuple[int, int]]


class OneSecond:
    """Every step takes a second: only counts matter here."""

    name = "one second"

    def step_s(self, shape: StepShape) -> float:
        return 1.0

    def copy_s(self, num_bytes: int) -> float:
        return 0.0


@cache
def uniform(n: int) -> Lengths:
    """Prompts and answers of 1 to half of the context, all equally likely."""
    draws = np.random.default_rng(7).integers(1, MAX_MODEL_LEN // 2, size=(n, 2)).tolist()
    return [(p, o) for p, o in draws]


@cache
def lognormal(n: int) -> Lengths:
    """Most are short, a few are long: median 200, sigma 1, cut at half of the context."""
    draws = np.random.default_rng(7).lognormal(math.log(200), 1.0, size=(n, 2)).tolist()
    return [(min(int(p) + 1, MAX_MODEL_LEN // 2), min(int(o) + 1, MAX_MODEL_LEN // 2)) for p, o in draws]


def traced(file: Path, prompt: int, answer: int, n: int) -> Lengths:
    """The first `n` real requests that fit into the context."""
    pairs: Lengths = []
    with file.open() as lines:
        next(lines)
        for line in lines:
            fields = line.split(",")
            p, o = int(fields[prompt]), max(1, int(fields[answer]))
            if p > 0 and p + o <= MAX_MODEL_LEN:
                pairs.append((p, o))
            if len(pairs) == n:
                break
    return pairs


@dataclass
class Result:
    """Shares of the pool and sequences running, both as means at saturation; `peak` is the most that ever ran.

    `worst_tail` is the most slots that one sequence held and had not filled. `table_bytes`: of all block
    tables, 4 bytes a block. `step_us`: wall time of a step, all of it bookkeeping, since the device computes nothing.
    """

    used: float
    reserved: float
    internal: float
    external: float
    free: float
    batch: float
    peak: int
    worst_tail: int
    table_bytes: float
    num_steps: int
    num_preemptions: int
    step_us: float


def build(allocator: str, block_size: int) -> EngineCore:
    config = from_kwargs(
        schedule_conservativeness=0,  # as in the papers: whoever fits enters
        model="(benchmark)", kv_allocator=allocator, block_size=block_size, enable_prefix_caching=False,
        num_gpu_blocks_override=POOL_SLOTS // block_size, max_num_seqs=256, max_num_batched_tokens=8192,
    )  # fmt: skip
    machine = Machine(num_cores=1, memory_bytes=1 << 34, available_bytes=1 << 34)
    plan = resolve(config, SPEC, machine)
    clock = VirtualClock()
    return engine_core(config, plan, SimExecutor(OneSecond(), clock, vocab_size=VOCAB), clock)


def measure(lengths: Lengths, allocator: str, block_size: int = 16) -> Result:
    """Run one load on one allocator to its end."""
    core = build(allocator, block_size)
    for i, (p, o) in enumerate(lengths):
        tokens = [(i * 7 + j) % VOCAB for j in range(p)]
        core.add(Request(request_id=f"r{i}", prompt_token_ids=tokens, rules=TokenRules(), max_tokens=o))
    seen: list[Waste] = []
    batches: list[int] = []
    tables: list[int] = []
    tail = peak = 0
    spent_s = 0.0
    while core.has_work:
        began = time.perf_counter()
        core.step()
        spent_s += time.perf_counter() - began
        running = core.scheduler.running
        peak = max(peak, len(running))
        if core.scheduler.waiting and running:
            w = waste(core.kv, running, core.scheduler.waiting[0])
            seen.append(w)
            batches.append(len(running))
            tail = max(tail, *(core.kv.num_held(s) * block_size - s.num_computed for s in running))
            tables.append(sum(4 * len(t.ids) for seq in running for t in seq.tables))
    share = np.array(seen, float).mean(axis=0) / seen[0].total
    return Result(
        used=share[0], reserved=share[1], internal=share[2], external=share[3], free=share[5],
        batch=float(np.mean(batches)), peak=peak, worst_tail=tail, table_bytes=float(np.mean(tables)),
        num_steps=core.stats.num_steps, num_preemptions=core.stats.num_preemptions,
        step_us=1e6 * spent_s / core.stats.num_steps,
    )  # fmt: skip


def print_allocators(name: str, lengths: Lengths, console: Console) -> None:
    mean = np.mean(lengths, axis=0)
    table = Table(title=f"{name}: {len(lengths)} requests, on average {mean[0]:.0f} + {mean[1]:.0f} tokens")
    table.add_column("allocator")
    for column in ("used", "reserved", "internal", "external", "free", "batch", "peak", "steps", "preempted"):
        table.add_column(column, justify="right")
    for allocator in ALLOCATORS:
        r = measure(lengths, allocator)
        shares = [f"{100 * x:.1f} %" for x in (r.used, r.reserved, r.internal, r.external, r.free)]
        label = allocator if allocator == "paged" else f"{allocator} (baseline)"
        table.add_row(label, *shares, f"{r.batch:.1f}", str(r.peak), str(r.num_steps), str(r.num_preemptions))
    console.print(table)


def print_block_sizes(name: str, lengths: Lengths, console: Console) -> None:
    table = Table(title=f"{name}: paged, by block size (1: TokenAttention)")
    for column in ("block size", "used", "reserved + internal", "batch", "table bytes", "us per step"):
        table.add_column(column, justify="right")
    for size in BLOCK_SIZES:
        r = measure(lengths, "paged", size)
        wasted = f"{100 * (r.reserved + r.internal):.2f} %"
        row = (f"{100 * r.used:.1f} %", wasted, f"{r.batch:.1f}", f"{r.table_bytes:.0f}", f"{r.step_us:.0f}")
        table.add_row(str(size), *row)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--traces", type=Path, help="folder with the files of real lengths")
    args = parser.parse_args()
    console = Console(width=120)
    loads = {"uniform": uniform(args.requests), "lognormal": lognormal(args.requests)}
    for name, (file, prompt, answer) in TRACES.items():
        if args.traces is not None and (args.traces / file).exists():
            loads[name] = traced(args.traces / file, prompt, answer, args.requests)
    console.print(f"{POOL_SLOTS} slots, context {MAX_MODEL_LEN}, blocks of 16, everybody arrives at once")
    for name, lengths in loads.items():
        print_allocators(name, lengths, console)
    print_block_sizes("lognormal", loads["lognormal"], console)


if __name__ == "__main__":
    main()
