"""Native matrix products against what the machine can do: bytes per second of few rows, operations of many.

    python -m benchmarks.micro.native_gemm [--formats bf16 f32] [--rows 1 8 64 512] [--threads 1] [--torch]

Shapes are those of Qwen2.5-0.5B. For M = 1 the weights are copied until no cache holds them, and the copies take turns;
"of read" is the share of what reading the same memory with all threads gives, measured between the products, "of peak"
the share of the best speed of the tile in this run (a product that stays in the caches). Every cell is checked against
numpy first. The figure is the median over the rounds; machines that do other work want more of them. `--torch` times
the bfloat16 product of torch, if it is installed, in turns with ours (same copies, one thread per thread of ours).

`--against LIBRARY` compares with another build, one thread of each in turns for `--seconds`, and gives the fastest of
the single runs: on a machine that does other work, those that nothing disturbed. "of peak" is then of registers alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.micro.peak import register_peak
from rich.console import Console
from rich.table import Table

from penstock.base.bf16 import F32, narrow, widen
from penstock.core.panels import Panels
from penstock.ops.native.abi import Act, Format, Kind, StepArgs
from penstock.ops.native.library import best_library, open_library
from penstock.ops.native.matrix import Packed, aligned, pack
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, Pool, StepMemory
from penstock.ops.plan import StepPlan

FORMATS: dict[str, tuple[Format, Act, Panels | None]] = {
    "f32": (Format.F32, Act.F32, None), "f16": (Format.F16, Act.F32, None), "bf16xf32": (Format.BF16, Act.F32, None),
    "bf16": (Format.BF16, Act.BF16, None), "i8": (Format.BLOCK, Act.I8, Panels("U8", 0, "F32", "NONE", 128)),
    "i4": (Format.BLOCK, Act.I8, Panels("U4", 128, "F16", "NONE", 8)),
    "i4:32": (Format.BLOCK, Act.I8, Panels("U4", 32, "F16", "NONE", 8)),
}  # fmt: skip
"""Weights, activations, and what rounded weights are. Formats of files: `block_formats.py`."""
SHAPES = {
    "qkv": (896, 1152, False), "out": (896, 896, False), "gate+up": (896, 9728, True), "down": (4864, 896, False),
    "lm head": (896, 151936, False),
    # A few panels of the large ones: runs short enough to find undisturbed ones.
    "gate+up/38": (896, 256, True), "down/7": (4864, 128, False), "down/4": (4864, 256, False),
}  # fmt: skip
COLD_BYTES = 96 << 20
"""Copies of a matrix that take turns add up to this at least: three times a large last-level cache."""


@dataclass
class Case:
    """One product [M, K] x [K, N], over copies of its weights in turn."""

    copies: list[Packed]
    programs: list[NativeProgram]
    args: StepArgs
    keep: Any
    num_bytes: int
    num_operations: float
    turn: int = 0

    def __call__(self) -> None:
        self.programs[self.turn].run(self.args)
        self.turn = (self.turn + 1) % len(self.programs)


def arguments(num_rows: int) -> tuple[StepArgs, Any]:
    """A step of `num_rows` tokens of one sequence, and what has to outlive it."""
    zeros = np.zeros(num_rows, np.int32)
    plan = StepPlan(zeros, zeros, np.array([0, num_rows], np.int32), np.array([num_rows], np.int32), zeros, ())
    memory, rows = StepMemory(0), np.zeros(0, np.int32)
    return memory.args(plan, rows), (plan, memory, rows)


def copy(m: Packed) -> Packed:
    data = aligned(m.data.nbytes)
    data[:] = m.data
    s = m.struct
    return Packed(Format(s.format), Act(s.act), m.num_rows, m.num_cols, bool(s.pair), data, panels=m.panels)


def weights(k: int, n: int) -> Any:
    """[n, k] bfloat16 bits around 1 / sqrt(k); blocks repeat, since random numbers take long."""
    block = narrow(np.random.default_rng(k).standard_normal((1024, k), np.float32) / np.float32(k**0.5))
    return np.ascontiguousarray(np.tile(block, (-(-n // 1024), 1))[:n])


def case(pool: Pool, fmt: str, shape: str, num_rows: int, w: Any, cold_rows: int = 1) -> Case:
    """Packed, checked, and, up to `cold_rows` rows, copied until a product finds nothing in the caches."""
    k, n, pair = SHAPES[shape]
    kind, act, panels = FORMATS[fmt]
    source = w if kind is Format.BF16 else widen(w)
    parts = [source[: n // 2], source[n // 2 :]] if pair else [source]
    first = pack(pool.library, parts, kind, act, pair=pair, panels=panels)
    copies = [first]
    while num_rows <= cold_rows and len(copies) * first.num_bytes < COLD_BYTES:
        copies.append(copy(first))
    x = np.random.default_rng(1).standard_normal((num_rows, k), np.float32)
    args, keep = arguments(num_rows)
    programs = []
    for m in copies:
        layout = Layout()
        source_register, out = layout.register(k), layout.register(n // 2 if pair else n)
        op = NativeOp(Kind.LINEAR, (source_register,), out, n=(0, 2 if pair else 0, 0), f=(0.0, 1.0), pointers=(m,))
        programs.append(NativeProgram(pool, [op], layout, [], max_tokens=num_rows, max_rows=1))
        programs[-1].values(source_register, num_rows)[:] = x
    programs[0].run(args)
    check(programs[0].values(out, num_rows), x, source, pair, panels is not None and panels.code == "U4")
    return Case(copies, programs, args, keep, first.num_bytes, 2.0 * num_rows * k * n)


def check(actual: F32, x: F32, w: Any, pair: bool, coarse: bool) -> None:
    """A few rows against float64; loose, as the tests are tight."""
    wide = (widen(w) if w.dtype == np.uint16 else w).astype(np.float64)
    rows = [0, len(x) // 2, len(x) - 1]
    y = x[rows].astype(np.float64) @ wide.T
    if pair:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    worst = np.abs(actual[rows] - y).max()
    assert worst <= (0.6 if coarse else 0.1) * (1 + np.abs(y).max()), f"wrong by {worst}"


def seconds(run: Callable[[], None], least: float, clock: Callable[[], float]) -> float:
    """Of one run, repeated for `least` seconds of this clock."""
    count, begin = 0, clock()
    while True:
        run()
        count += 1
        passed = clock() - begin
        if passed >= least:
            return passed / count


def torch_case(shape: str, num_rows: int, w: Any, num_copies: int, threads: int) -> Callable[[], None] | None:
    """The same product by torch, over as many copies, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    k = SHAPES[shape][0]
    first = torch.from_numpy(w.view(np.int16)).view(torch.bfloat16)
    copies = [first.clone() for _ in range(num_copies)]
    x = torch.randn(num_rows, k).to(torch.bfloat16)
    turn = iter(range(1 << 60))

    def run() -> None:
        torch.nn.functional.linear(x, copies[next(turn) % len(copies)])

    with torch.no_grad():
        run()
    return run


class Probes:
    """What the machine can do: reading memory, and the tile on data of its own cache."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # One thread's own time leaves out what other programs take. Several have only the clock on the wall.
        self.clock = time.thread_time if pool.num_threads == 1 else time.perf_counter
        self._memory = aligned(COLD_BYTES)
        self._memory[:] = 1
        self._tiles: dict[str, Case] = {}
        SHAPES["probe"] = (512, 512, False)  # 512 KB of bfloat16

    def read(self) -> float:
        """Bytes per second."""

        def run() -> None:
            self._pool.library.pst_read(self._pool.handle, self._memory.ctypes.data, len(self._memory))

        return len(self._memory) / seconds(run, 0.0, self.clock)

    def tile(self, fmt: str) -> float:
        """Operations per second of all threads."""
        if fmt not in self._tiles:
            self._tiles[fmt] = case(self._pool, fmt, "probe", 192, weights(512, 512))
        run = self._tiles[fmt]
        return run.num_operations / seconds(run, 0.01, self.clock)


def measure(
    pool: Pool, probes: Probes, fmt: str, shape: str, num_rows: int, rounds: int, w: Any, torch: bool
) -> list[str]:
    """One line of the table: every round times the product, the probes and torch one after the other."""
    ours = case(pool, fmt, shape, num_rows, w)
    theirs = torch_case(shape, num_rows, w, len(ours.copies), pool.num_threads) if torch else None
    ours()
    least = 0.02
    mine, read, peak, other = [], [], [], []
    for _ in range(rounds):
        mine.append(seconds(ours, least, probes.clock))
        read.append(probes.read())
        peak.append(probes.tile(fmt))
        if theirs is not None:
            other.append(seconds(theirs, least, probes.clock))
    took = statistics.median(mine)
    line = [
        fmt, shape, str(num_rows), f"{took * 1e6:.0f}", f"{ours.num_bytes / took / 1e9:.1f}",
        f"{ours.num_bytes / took / statistics.median(read):.2f}" if num_rows == 1 else "",
        f"{ours.num_operations / took / 1e9:.0f}",
        f"{ours.num_operations / took / max(peak):.2f}" if num_rows > 1 else "",
    ]  # fmt: skip
    return [*line, f"{statistics.median(other) / took:.2f}" if other else ""] if torch else line


def compare(pools: list[Pool], fmt: str, shape: str, num_rows: int, for_seconds: float, w: Any) -> list[str]:
    """One line of the table of `--against`: the fastest run of each pool's library, [other, ours]."""
    cases = [case(pool, fmt, shape, num_rows, w) for pool in pools]
    register = register_peak(pools[-1].library.pst_isa_name().decode(), fmt.split(":")[0])
    best, peak, begin, count = [float("inf")] * 2, 0.0, time.perf_counter(), 0
    while count < 4 or time.perf_counter() - begin < for_seconds:
        count += 1
        if register is not None and count % 8 == 1:
            peak = max(peak, register())
        for i, run in enumerate(cases):
            start = time.thread_time()
            run()
            best[i] = min(best[i], time.thread_time() - start)
    speeds = [cases[0].num_operations / b for b in best]
    return [
        fmt, shape, str(num_rows), *(f"{b * 1e6:.0f}" for b in best), *(f"{s / 1e9:.1f}" for s in speeds),
        *(f"{s / peak:.2f}" if peak else "" for s in speeds), f"{best[0] / best[1]:.3f}",
    ]  # fmt: skip


def show_comparison(library: Any, args: argparse.Namespace) -> None:
    pools = [Pool(open_library(args.against), 1), Pool(library, 1)]
    names = ["us", "GFLOP/s", "of peak"]
    header = ["format", "shape", "M", *(f"{n} {side}" for n in names for side in ("other", "ours")), "faster"]
    table = Table(*header, title=f"{library.pst_isa_name().decode()}, one thread, fastest runs")
    for shape in args.shapes:
        k, n, _ = SHAPES[shape]
        w = weights(k, n)
        for fmt in args.formats:
            for num_rows in args.rows:
                table.add_row(*compare(pools, fmt, shape, num_rows, args.seconds, w))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "f32", "f16"])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES)[:5])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", default="", help="this instruction set, not the best")
    parser.add_argument("--torch", action="store_true", help="compare with torch's bfloat16 product")
    parser.add_argument("--against", type=Path, help="another build of this library, to compare with")
    parser.add_argument("--seconds", type=float, default=3.0, help="of every cell of --against")
    args = parser.parse_args()
    library = best_library(args.isa)
    if library is None:
        raise SystemExit("no native library was built")
    if args.against:
        show_comparison(library, args)
        return
    pool = Pool(library, args.threads)
    probes = Probes(pool)
    header = ["format", "shape", "M", "us", "GB/s", "of read", "GFLOP/s", "of peak"]
    if args.torch:
        header.append("torch / ours")
    table = Table(*header, title=f"{library.pst_isa_name().decode()}, {args.threads} threads")
    for column in table.columns[2:]:
        column.justify = "right"
    for shape in args.shapes:
        k, n, _ = SHAPES[shape]
        w = weights(k, n)
        for fmt in args.formats:
            for num_rows in args.rows:
                if shape == "lm head" and num_rows > 64:
                    continue  # logits of so many rows are never wanted, and would be 300 MB
                table.add_row(*measure(pool, probes, fmt, shape, num_rows, args.rounds, w, args.torch))
    console = Console()
    console.print(table)
    console.print(f"reading: {probes.read() / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
