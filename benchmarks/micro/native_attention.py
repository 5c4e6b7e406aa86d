"""The speed of native attention: decoding against the read bandwidth, prefill in GFLOP/s.

    python benchmarks/micro/native_attention.py [--isa avx512bf16] [--threads 1] [--dtype bfloat16 int8] [--repeat 5]

Decoding: GB/s of keys and values (and scales) looked at, and their share of what `pst_read` reaches in the same minute.
Prefill: a text from its beginning, 4 D multiply-and-adds' halves per pair of a query head and a key that it sees.
Types of planes, and the probe, take turns; the time is the least of `--repeat`, beside it stands the median. Every
figure's output is compared with a softmax in float64 on a few rows before it is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from penstock.base.bf16 import narrow
from penstock.core.kv_codec import scales_name
from penstock.ops.native.abi import Kind
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, Pool, StepMemory
from penstock.ops.plan import GroupPlan, Planes, StepPlan
from penstock.ops.ref.codecs.int8 import quantise
from penstock.ops.ref.storage import read_kv

SHAPES = ((14, 2, 64), (32, 8, 64))
CONTEXTS = (1024, 4096, 8192, 32768)
PREFILLS = (512, 1024, 4096)
BLOCK, LAYERS = 16, 2
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


class Bench:
    """One context of `length` tokens, of which a step runs the last `tokens`."""

    def __init__(self, pool: Pool, shape: tuple[int, int, int], dtype: str, length: int, tokens: int) -> None:
        self.heads, self.kv_heads, self.dim = shape
        self.length, self.tokens = length, tokens
        rng = np.random.default_rng(0)
        blocks = -(-length // BLOCK)
        self.planes: Planes = {}
        for name in ("k", "v"):
            self.planes |= self._plane(rng, blocks, dtype, name)
        self.table = rng.permutation(blocks).astype(np.int32)[None]
        layout = Layout()
        registers = [layout.register(self.heads * self.dim) for _ in range(2)]
        names = list(self.planes)
        n = (0, 1, self.heads, self.kv_heads, self.dim, self.dim, names.index("k"), names.index("v"))
        op = NativeOp(Kind.ATTEND, (registers[0],), registers[1], n, (self.dim**-0.5, 0.0), (None, None))
        self.program = NativeProgram(pool, [op], layout, [self.planes], max_tokens=tokens, max_rows=1)
        self.q = self.program.values(registers[0], tokens)
        self.q[:] = rng.standard_normal(self.q.shape, dtype=np.float32)
        self.out = self.program.values(registers[1], tokens)
        group = GroupPlan(LAYERS, BLOCK, (self.table,))
        ints = [np.zeros(tokens), np.arange(length - tokens, length), [0, tokens], [length], []]
        ids, positions, bounds, lens, none = (np.array(x, np.int32) for x in ints)
        self.plan = StepPlan(ids, positions, bounds, lens, none, (group,))
        self.rows = np.zeros(0, np.int32)
        self.memory = StepMemory(1)
        self.args = self.memory.args(self.plan, self.rows)

    def _plane(self, rng: np.random.Generator, blocks: int, dtype: str, name: str) -> Planes:
        x = rng.standard_normal((LAYERS * blocks, BLOCK, self.kv_heads, self.dim), dtype=np.float32)
        if dtype == "int8":
            whole, scales = quantise(x)
            return {name: whole, scales_name(name, "int8"): scales}
        return {name: narrow(x) if dtype == "bfloat16" else x.astype(DTYPES[dtype])}

    def run(self) -> None:
        self.program.run(self.args)

    def read_bytes(self) -> int:
        """Keys and values of the context, once, with what scales they have."""
        return self.length * sum(plane[0, 0].nbytes for plane in self.planes.values())

    def flops(self) -> int:
        """Of the products of queries and keys, and of weights and values."""
        seen = sum(range(self.length - self.tokens + 1, self.length + 1))
        return 4 * self.dim * self.heads * seen

    def worst_error(self) -> float:
        """Of some rows, against float64, relative to the largest value."""
        pages = self.table[0] * LAYERS + 1
        k, v = (read_kv(self.planes, name, pages, 0, self.length).astype(np.float64) for name in ("k", "v"))
        per, worst = self.heads // self.kv_heads, 0.0
        for t in {0, self.tokens // 2, self.tokens - 1}:
            end = self.length - self.tokens + t + 1
            for h in {0, self.heads - 1}:
                own = slice(h * self.dim, (h + 1) * self.dim)
                s = k[:end, h // per] @ self.q[t, own] * self.dim**-0.5
                w = np.exp(s - s.max())
                error = np.abs(self.out[t, own] - w @ v[:end, h // per] / w.sum()).max()
                worst = max(worst, float(error / np.abs(v).max()))
        return worst


def seconds_of(repeat: int, *work: Callable[[], object]) -> list[tuple[float, float]]:
    """Least and median seconds of each, taking turns."""
    times: list[list[float]] = [[] for _ in work]
    for run in work:
        run()
    for _ in range(repeat):
        for run, of_run in zip(work, times, strict=True):
            start = time.perf_counter()
            run()
            of_run.append(time.perf_counter() - start)
    return [(min(t), statistics.median(t)) for t in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["bfloat16", "int8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--prefills", nargs="+", type=int, default=PREFILLS)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    library = best_library(options.isa)
    if library is None:
        raise SystemExit("no native library was built")
    pool = Pool(library, options.threads)
    probe = np.ones(1 << 25, np.uint64)  # 256 MB: more than any cache
    print(f"{library.pst_isa_name().decode()}, {options.threads} threads")

    def read() -> None:
        library.pst_read(pool.handle, probe.ctypes.data, probe.nbytes)

    for shape in SHAPES:
        for context in options.contexts:
            # Several copies of a context, so that a short one does not stay in a cache.
            all_benches = []
            for dtype in options.dtype:
                benches = [Bench(pool, shape, dtype, context, 1)]
                copies = max(1, (1 << 26) // benches[0].read_bytes())
                all_benches.append(
                    benches + [Bench(pool, shape, dtype, context, 1) for _ in range(min(copies, 64) - 1)]
                )
            work = [lambda benches=benches: [bench.run() for bench in benches] for benches in all_benches]
            *times, (reading, _) = seconds_of(options.repeat, *work, read)
            for dtype, benches, (least, median) in zip(options.dtype, all_benches, times, strict=True):
                rate, best = len(benches) * benches[0].read_bytes() / least / 1e9, probe.nbytes / reading / 1e9
                print(
                    f"decode  {shape!s:12} context {context:6} {dtype:8}: {least / len(benches) * 1e6:8.0f} us (median "
                    f"{median / len(benches) * 1e6:.0f}), {rate:6.1f} GB/s, {rate / best:4.0%} of {best:.1f}; "
                    f"error {checked(benches[0], dtype):.1e}"
                )
        for length in options.prefills:
            benches = [Bench(pool, shape, dtype, length, length) for dtype in options.dtype]
            times = seconds_of(options.repeat, *(bench.run for bench in benches))
            for dtype, bench, (least, median) in zip(options.dtype, benches, times, strict=True):
                print(
                    f"prefill {shape!s:12} tokens  {length:6} {dtype:8}: {least * 1e3:8.2f} ms (median "
                    f"{median * 1e3:.2f}), {bench.flops() / least / 1e9:6.0f} GFLOP/s; error "
                    f"{checked(bench, dtype):.1e}"
                )


def checked(bench: Bench, dtype: str) -> float:
    """Halves of 16 bits are multiplied as they are where the processor can; float32 rounds less."""
    error = bench.worst_error()
    assert error < (2e-2 if dtype in ("bfloat16", "int8") else 1e-5), f"wrong by {error}"
    return error


if __name__ == "__main__":
    main()
