"""Native products of every format of weights: how much of memory and of the registers they use.

    python -m benchmarks.micro.block_formats [--formats bf16 q4_k] [--threads 1] [--seconds 1] [--rows 512]
    python -m benchmarks.micro.block_formats --against OTHER.so             (two builds of the library, in turns)

One row meets 96 MiB of panels and more, copies in turns, so that nothing comes from a cache: GB/s, the share of what
`pst_read` reaches on the same memory between the runs. Many rows: Gop/s, and the share of the registers' rate
(`pst_multiply`, also between the runs). Both are of the fastest runs: on a machine that does other work, those that
nothing disturbed. Bytes per weight are those of panels, over those of the file. Numbers are random; every product is
checked against what its panels unpack to. "faster": the other build's time over this one's.
"""

from __future__ import annotations

import argparse
import ctypes as c
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.micro.kernels.products import step_of
from rich.console import Console
from rich.table import Table

from penstock.base.bf16 import narrow
from penstock.ops.native.abi import PANEL, Act, Code, Format, Kind, Matrix, Scale, Zero
from penstock.ops.native.library import best_library, open_library
from penstock.ops.native.matrix import aligned
from penstock.ops.native.program import Layout, NativeOp, NativeProgram, Pool

COLD_BYTES = 96 << 20
I8, F32, BF16 = Act.I8, Act.F32, Act.BF16


@dataclass(frozen=True)
class Case:
    """A format, how rows meet it, and what a file takes for a weight."""

    code: Code
    group: int
    scale: Scale
    zero: Zero
    offset: int
    bits: float
    act: Act = I8
    format: Format = Format.BLOCK


def plain(format: Format, bits: int, act: Act) -> Case:
    return Case(Code(0), 0, Scale(0), Zero.NONE, 0, bits, act, format)


FORMATS = {
    "f32": plain(Format.F32, 32, F32),
    "f16": plain(Format.F16, 16, F32),
    "bf16xf32": plain(Format.BF16, 16, F32),
    "bf16": plain(Format.BF16, 16, BF16),
    "int8": Case(Code.U8, 0, Scale.F32, Zero.NONE, 128, 8),
    "q8_0": Case(Code.U8, 32, Scale.F16, Zero.NONE, 128, 8.5),
    "q6_k": Case(Code.U6, 16, Scale.I8_F16, Zero.NONE, 32, 6.5625),
    "q5_k": Case(Code.U5, 32, Scale.U8_F16, Zero.U8_F16, 0, 5.5),
    "q5_0": Case(Code.U5, 32, Scale.F16, Zero.NONE, 16, 5.5),
    "q4_k": Case(Code.U4, 32, Scale.U8_F16, Zero.U8_F16, 0, 4.5),
    "q4_0": Case(Code.U4, 32, Scale.F16, Zero.NONE, 8, 4.5),
    "int4:64": Case(Code.U4, 64, Scale.F16, Zero.NONE, 8, 4.25),
    "int4:128": Case(Code.U4, 128, Scale.F16, Zero.NONE, 8, 4.125),
    "gptq4:128": Case(Code.U4, 128, Scale.F16, Zero.U8, 0, 4.15625),
    "q3_k": Case(Code.U3, 16, Scale.I8_F16, Zero.NONE, 4, 3.4375),
    "q2_k": Case(Code.U2, 16, Scale.U8_F16, Zero.U8_F16, 0, 2.625),
    "tq2_0": Case(Code.U2, 256, Scale.F16, Zero.NONE, 1, 2.0625),
    "iq4_xs": Case(Code.T4, 32, Scale.I8_F16, Zero.NONE, 0, 4.25),
    "mxfp4": Case(Code.T4, 32, Scale.E8M0, Zero.NONE, 0, 4.25),
    "nvfp4": Case(Code.T4, 16, Scale.E4M3, Zero.NONE, 0, 4.5),
    "nf4": Case(Code.F4, 64, Scale.F32, Zero.NONE, 0, 4.5, F32),
    "fp8": Case(Code.E4M3, 128, Scale.F32, Zero.NONE, 0, 8.002, BF16),
    "fp8 f32": Case(Code.E4M3, 128, Scale.F32, Zero.NONE, 0, 8.002, F32),
    "q4_k wo": Case(Code.U4, 32, Scale.U8_F16, Zero.U8_F16, 0, 4.5, BF16),
    "int4:64 wo": Case(Code.U4, 64, Scale.F16, Zero.NONE, 8, 4.25, BF16),
    "int8 wo": Case(Code.U8, 0, Scale.F32, Zero.NONE, 128, 8, BF16),
    "iq3_s": Case(Code.IQ3_S, 0, Scale.F32, Zero.NONE, 0, 3.4375),
    "iq2_xs": Case(Code.IQ2_XS, 0, Scale.F32, Zero.NONE, 0, 2.3125),
    "iq1_m": Case(Code.IQ1_M, 0, Scale.F32, Zero.NONE, 0, 1.75),
    "tq1_0": Case(Code.TQ1_0, 0, Scale.F32, Zero.NONE, 0, 1.6875),
}
ERRORS = {F32: 1e-5, BF16: 1e-2, I8: 3e-2}
"""Largest error of an output over the largest output: a row's numbers are rounded. The tests are tighter."""
BITS = {Code.U8: 8, Code.U6: 6, Code.U5: 5, Code.U3: 3, Code.U2: 2, Code.E4M3: 8}
SUPERS = (Scale.U8_F16, Scale.I8_F16)
TABLE = np.arange(-8, 8, dtype=np.float32)


def panel(library: Any, case: Case, m: Matrix) -> npt.NDArray[np.uint8]:
    """One panel of random numbers or codes."""
    rng, k = np.random.default_rng(0), m.cols
    if case.format != Format.BLOCK:
        memory = aligned(library.pst_panel_bytes(m))
        numbers = rng.standard_normal(memory.nbytes * 8 // int(case.bits), np.float32)
        half = {Format.F16: numbers.astype(np.float16), Format.BF16: narrow(numbers)}
        memory[:] = half.get(case.format, numbers).view(np.uint8)
        return memory
    groups, chunks = k // case.group if case.group else 1, k // 256

    def rows(array: npt.NDArray[Any]) -> Any:
        kept.append(array)
        return (c.c_void_p * PANEL)(*(array.ctypes.data + j * array.strides[0] for j in range(PANEL)))

    kept: list[npt.NDArray[Any]] = []
    halves = np.full((PANEL, chunks), 0.01, np.float16)
    if case.code > Code.E4M3:
        blocks = rng.integers(0, 0x30, (PANEL, k), dtype=np.uint8)  # no half of such bytes is infinite
        arrays = [rows(blocks), None, None, None, None]
    else:
        top = 0x77 if case.code == Code.E4M3 else 1 << BITS.get(case.code, 4)
        low = 1 if case.offset == 128 else 0  # as who rounds to 8 bits does
        types = {Scale.F32: np.float32, Scale.F16: np.float16}
        scales = rng.integers(1, 16, (PANEL, groups)).astype(types.get(case.scale, np.uint8))
        zeros = rng.integers(0, 16, (PANEL, groups)).astype(np.uint8)
        has_super = case.scale in SUPERS
        arrays = [
            rows(rng.integers(low, top, (PANEL, k)).astype(np.uint8)), rows(scales),
            rows(halves) if has_super else None,
            rows(zeros) if case.zero else None, rows(halves) if case.zero == Zero.U8_F16 else None,
        ]  # fmt: skip
    out = aligned(library.pst_panel_bytes(m))
    assert library.pst_pack_codes(m, *arrays, 0, 1, out.ctypes.data) == 0
    return out


class Product:
    """[rows, k] x [k, n], over copies of the weights in turn."""

    def __init__(self, pool: Pool, case: Case, k: int, n: int, num_rows: int, copies: int) -> None:
        struct = Matrix(
            format=case.format, act=case.act, rows=n, cols=k, group=case.group, code=case.code, scale=case.scale,
            zero=case.zero, offset=case.offset, factor=1.0, table=TABLE.ctypes.data if case.code in (6, 7) else None,
        )  # fmt: skip
        one = panel(pool.library, case, struct)
        self.bytes = one.nbytes * (n // PANEL)
        self.bits = 8 * one.nbytes / (PANEL * k)
        self.operations = 2.0 * num_rows * n * k
        self.programs, self.keep, self.turn = [], [], 0
        self.args, keep = step_of(num_rows)
        self.keep.append(keep)
        for _ in range(max(1, min(copies, -(-COLD_BYTES // self.bytes)))):
            data = aligned(self.bytes)
            data.reshape(-1, one.nbytes)[:] = one
            m = Matrix.from_buffer_copy(struct)
            m.data = data.ctypes.data
            self.keep.append((data, m))
            holder = type("Holder", (), {"address": c.addressof(m)})()
            layout = Layout()
            source, out = layout.register(k), layout.register(n)
            op = NativeOp(Kind.LINEAR, (source,), out, n=(0, 0, 0), f=(0.0, 1.0), pointers=(holder,))
            self.programs.append(NativeProgram(pool, [op], layout, [], max_tokens=num_rows, max_rows=1))
            x = np.random.default_rng(1).standard_normal((num_rows, k), np.float32)
            self.programs[-1].values(source, num_rows)[:] = x
        self()
        values = np.empty((PANEL, k), np.float32)
        assert pool.library.pst_unpack(m, 0, values.ctypes.data) == 0
        expected = x[-1].astype(np.float64) @ values.T
        wrong = np.abs(self.programs[0].values(out, num_rows)[-1, -PANEL:] - expected).max()
        assert wrong <= ERRORS[case.act] * np.abs(expected).max(), f"{case}: {num_rows} rows are wrong by {wrong}"

    def __call__(self) -> None:
        self.programs[self.turn].run(self.args)
        self.turn = (self.turn + 1) % len(self.programs)


def fastest(runs: list[Any], for_seconds: float, between: Any, clock: Any) -> tuple[list[float], float]:
    """Of each of `runs` in seconds, and of `between`, a rate. All take turns."""
    best, rate, begin = [float("inf")] * len(runs), 0.0, time.perf_counter()
    while rate == 0.0 or time.perf_counter() - begin < for_seconds:
        rate = max(rate, between())
        for _ in range(8):
            for i, run in enumerate(runs):
                start = clock()
                run()
                best[i] = min(best[i], clock() - start)
    return best, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=[512])
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1.0, help="of every cell")
    parser.add_argument("--isa", default="", help="this instruction set, not the best")
    parser.add_argument("--against", type=Path, help="another build of this library, to compare with")
    args = parser.parse_args()
    library = best_library(args.isa)
    if library is None:
        raise SystemExit("no native library was built")
    pools = [Pool(one, args.threads) for one in (library, *([open_library(args.against)] if args.against else []))]
    # One thread's own time leaves out what other programs take. Several have only the clock on the wall.
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    memory = aligned(COLD_BYTES)
    memory[:] = 1

    def read() -> float:
        start = clock()
        library.pst_read(pools[0].handle, memory.ctypes.data, memory.nbytes)
        return memory.nbytes / (clock() - start)

    def faster(took: list[float]) -> list[str]:
        return [f"{other / took[0]:.3f}" for other in took[1:]]

    last = ["faster"] if args.against else []
    many = [f"{what} {rows}".strip() for rows in args.rows for what in ("Gop/s", "of registers", *last)]
    header = ["format", "bits", "of file", "GB/s", "of read", *last, *many]
    table = Table(*header, title=f"{library.pst_isa_name().decode()}, {args.threads} threads")
    for name in args.formats:
        case = FORMATS[name]

        def multiply(case: Case = case) -> float:
            start = clock()
            done = library.pst_multiply(pools[0].handle, case.format, case.act, 20000)
            return float(done / (clock() - start))

        ones = [Product(pool, case, args.inputs, 8192, 1, 1 << 10) for pool in pools]
        took, probe = fastest(ones, args.seconds, read, clock)
        line = [name, f"{ones[0].bits:.3f}", f"{ones[0].bits / case.bits:.3f}", f"{ones[0].bytes / took[0] / 1e9:.1f}"]
        line += [f"{ones[0].bytes / took[0] / probe:.2f}", *faster(took)]
        del ones
        for num_rows in args.rows:
            some = [Product(pool, case, args.inputs, 1024, num_rows, 1) for pool in pools]
            took, probe = fastest(some, args.seconds, multiply, clock)
            rate = some[0].operations / took[0]
            line += [f"{rate / 1e9:.0f}", f"{rate / probe:.2f}", *faster(took)]
        table.add_row(*line)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
