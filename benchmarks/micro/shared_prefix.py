"""Attention of sequences that begin with the same pages, which are read once, or (`--no-cascade-attention`) for each.

    python -m benchmarks.micro.shared_prefix [--isa avx512bf16] [--threads 1 2] [--dtype bfloat16] [--out FILE]

Sequences of 1,024 or 2,048 tokens in common and some of their own, one new token each: microseconds of one layer, by
how many they are (B10: the time grows more slowly than their number), both ways in turns. The numbers of both are
compared bit by bit, and with a softmax in float64. Keys that were looked up are counted.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import figures, take_turns
from benchmarks.micro.kernels.attention import DTYPES, QWEN, Call

from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool

SHAPES = {
    "Qwen2.5-0.5B": QWEN,
    "Qwen2.5-1.5B": (12, 2, 128),
    "SmolLM2-135M": (9, 3, 64),
    "Llama-3.2-1B": (32, 8, 64),
    "Llama-3.1-8B": (32, 8, 128),
    "a kv head per head": (16, 16, 64),
}
COUNTS, OWN = (1, 2, 4, 8, 16, 32), 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["bfloat16"])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    library = best_library(options.isa)
    if library is None:
        raise SystemExit("no native library was built")
    found = []
    for threads, dtype, prefix, (name, shape) in product(
        options.threads, options.dtype, options.prefixes, SHAPES.items()
    ):
        pool = Pool(library, threads)
        for count in COUNTS:
            row = compared(pool, shape, prefix, count, dtype, options.repeat)
            found.append(
                {"model": name, "threads": threads, "dtype": dtype, "prefix": prefix, "sequences": count} | row
            )
            print(
                f"{name:20} {threads} threads {dtype} {prefix} in common, {count:3} sequences: once "
                f"{row['once']['low'] * 1e6:7.0f} us, for each {row['each']['low'] * 1e6:7.0f} us, {row['ratio']:.2f}; "
                f"keys {row['keys_once']} of {row['keys_each']}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps({"isa": library.pst_isa_name().decode(), "rows": found}, indent=1) + "\n")


def compared(
    pool: Pool, shape: tuple[int, int, int], prefix: int, count: int, dtype: str, repeat: int
) -> dict[str, Any]:
    call = Call(
        pool, shape, [prefix + OWN + i for i in range(count)], 1, dtype=dtype, common=[0] + [prefix] * (count - 1)
    )
    keys, results = {}, {}

    def run(shares: bool) -> None:
        call.program.share_prefixes(shares)
        call()

    for shares in (True, False):
        before = call.program.keys_read()
        run(shares)
        keys[shares], results[shares] = (call.program.keys_read() - before) // shape[1], call.result().copy()
    assert np.array_equal(results[True], results[False]), "other bits"
    call.check(results[True], "a common beginning")
    samples = take_turns({"once": lambda: run(True), "each": lambda: run(False)}, repeat)
    low = {name: min(of) for name, of in samples.items()}
    return {"once": figures(samples["once"]), "each": figures(samples["each"]), "ratio": low["each"] / low["once"],
            "keys_once": keys[True], "keys_each": keys[False]}  # fmt: skip


if __name__ == "__main__":
    main()
