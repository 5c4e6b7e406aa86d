"""A table of kernels: who computes what how fast, and what paging, splits, choice and fusion are worth.

    python -m benchmarks.micro.kernel_table [--threads 2] [--out benchmarks/results/kernel_table.json]
    python -m benchmarks.micro.kernel_table --sections paths --ops ref blas native

Sections, and the rows of the catalogue that they measure:

- paths (C53): products of one row (decode) and of many (prefill), attention of decoding sequences and of a prompt, by
  the reference operations (numpy, row by row), by whole-batch BLAS products (numpy) and by the native kernels. The
  reference is the slow baseline and the oracle.
- paging (C49): decoding with page tables in random order, with pages in order, and with one block per sequence.
- splits (C45): one sequence at a long context on 1, 2 and 3 threads; one kv head, so that only keys can be shared out,
  and two. A machine with fewer cores than threads has nothing to win.
- choice (C54): products of 1 to 64 rows as the operation chooses its kernels, against calls of a fixed number of rows.
  A fixed path fills its last tile up and reads its weights once into the second-level cache.
- fusion (C59): layers with fused operations and without, decoding and reading a prompt, in Qwen2.5-0.5B's shape, where
  memory is what takes time, and in a tiny one, where the number of operations does.

Every output is compared in the same run: with float64 on some rows (paths, paging, splits), bit by bit with the other
side (paging, splits, choice), or with the unfused program to 1e-5 in float32 (fusion). Within a comparison the sides
take turns. Ratios are of the fastest runs. With one thread, times are this thread's own, without what other programs
took.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import about, ms, save, show
from benchmarks.micro.kernels import attention, fusion, products
from rich.console import Console

from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool

SECTIONS = ("paths", "paging", "splits", "choice", "fusion")
TOLERATED = 1.05
"""A chosen kernel may be so much slower than the best fixed one."""
ODD_LENGTHS = (1, 15, 16, 17, 255, 256, 257, 1000, 4095, 4096, 4097, 8192, 8193, 12289)


def paths(pool: Pool, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    sizes = [1, *([8, 128] if args.quick else [8, 64, 512])]
    found = products.compare_paths(pool, args.shapes, sizes, args.formats, args.ops, args.repeats)
    columns = ("call", "path", "ms", "median", "x ref", "error")
    show(console, "Matrix products, Qwen2.5-0.5B's shapes", columns, products.path_rows(found), 2)
    prompt = 256 if args.quick else 1024
    calls = [
        ("decode, 1 x 1,024", [1024], 1), ("decode, 8 x 1,024", [1024] * 8, 1), ("decode, 1 x 8,192", [8192], 1),
        (f"prefill, {prompt:,} tokens", [prompt], prompt),
    ]  # fmt: skip
    dtypes = ["float32", "bfloat16"]
    attended = attention.compare_paths(pool, calls, dtypes, args.ops, args.repeats)
    show(console, "Attention, 14 query and 2 kv heads of 64, random pages", columns, attention.path_rows(attended), 2)
    return found + attended


def paging(pool: Pool, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    contexts = [1024, 8192] if args.quick else [1024, 4096, 8192, 32768]
    found = attention.compare_orders(pool, contexts, [1, 8], [16, 32, 128], "bfloat16", args.repeats)
    rows = [
        [f"{r['batch']} x {r['context']:,}", r["order"], ms(r["seconds"]["low"]), f"{r['gb_per_s']:.1f}",
         f"{r['of_contiguous']['of_low']:.2f}"]
        for r in found
    ]  # fmt: skip
    show(console, "Decoding, bfloat16 KV: pages", ("call", "pages", "ms", "GB/s", "x contiguous"), rows, 2)
    return found


def splits(pool: Pool, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    pools = {n: Pool(pool.library, n) for n in (1, 2, 3)}
    contexts = [8192] if args.quick else [8192, 32768]
    found = attention.compare_threads(pools, contexts, "bfloat16", args.repeats)
    rows = [
        [r["heads"], f"{r['context']:,}", str(r["threads"]), ms(r["seconds"]["low"]), f"{r['speed_up']:.2f}",
         f"{r['error_f32']:.0e}"]
        for r in found
    ]  # fmt: skip
    columns = ("heads/kv heads", "context", "threads", "ms", "speed-up", "error, float32 KV")
    show(console, "One sequence's keys on several threads (wall clock)", columns, rows, 1)
    worst = attention.worst_of_lengths(pools, ODD_LENGTHS)
    console.print(f"{len(ODD_LENGTHS)} lengths from 1 to {max(ODD_LENGTHS):,}: equal bits, error {worst:.0e}")
    return {"points": found, "lengths": ODD_LENGTHS, "worst_error": worst}


def choice(pool: Pool, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    shapes = [s for s in args.shapes if s != "lm head"]
    sizes = [1, 4, 12, 16, 64] if args.quick else list(products.GRID_ROWS)
    found = products.compare_tiles(pool, shapes, sizes, args.formats, args.repeats)
    rows = [
        [r["format"], r["shape"], str(r["rows"]), ms(r["chosen_s"]), ms(r["best_s"]), str(r["best_tile"]),
         f"{'[red]' if r['ratio'] > TOLERATED else ''}{r['ratio']:.3f}"]
        for r in found
    ]  # fmt: skip
    columns = ("format", "shape", "rows", "chosen ms", "best fixed ms", "its rows", "chosen / best")
    show(console, "The chosen kernel against fixed ones", columns, rows, 2)
    slower = [r for r in found if r["ratio"] > TOLERATED]
    worst = max(r["ratio"] for r in found)
    console.print(f"{len(slower)} of {len(found)} cells more than {TOLERATED - 1:.0%} slower; the worst {worst:.3f}")
    return found


def fused(pool: Pool, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    layers, prompt = (2, 64) if args.quick else (6, 256)
    batches, found = [1, 8] if args.quick else [1, 8, 32], []
    for shape in ("qwen2.5-0.5b", "tiny"):
        found += fusion.compare(pool, shape, layers, ["float32", "bfloat16"], batches, prompt, args.repeats)
    rows = [
        [f"{r['shape']}, {r['dtype']}", r["step"], r["passes"], f"{r['ops_per_layer']:.0f}", ms(r["seconds"]["low"]),
         f"{r['of_unfused']['of_low']:.3f}", f"{r['error']:.0e}"]
        for r in found
    ]  # fmt: skip
    columns = ("model", "step", "passes", "ops a layer", "ms", "x unfused", "error")
    show(console, f"Fusion, {layers} layers", columns, rows, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--ops", nargs="+", choices=("ref", "blas", "native"), default=["ref", "blas", "native"])
    parser.add_argument("--formats", nargs="+", choices=products.FORMATS, default=["f32", "bf16", "i8", "i4"])
    parser.add_argument("--shapes", nargs="+", choices=products.SHAPES, default=["qkv", "gate+up", "down"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--isa", default="", help="this instruction set, not the best")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points: a try-out")
    parser.add_argument("--out", help="write all figures as JSON")
    args = parser.parse_args()
    library = best_library(args.isa)
    if library is None:
        raise SystemExit("no native library was built")
    console, pool = Console(), Pool(library, args.threads)
    isa = library.pst_isa_name().decode()
    console.print(f"{isa}, {args.threads} threads, {args.repeats} repeats")
    run = {"paths": paths, "paging": paging, "splits": splits, "choice": choice, "fusion": fused}
    result: dict[str, Any] = {"about": about(isa=isa, threads=args.threads, repeats=args.repeats, quick=args.quick)}
    for section in args.sections:
        result[section] = run[section](pool, args, console)
        save(args.out, result)


if __name__ == "__main__":
    main()
