"""What matrices of codes cost: taking them into panels, decoding them, and the reference's product with them.

    python benchmarks/micro/stored_codes.py [--rows 4096] [--columns 4096] [--repeats 3]

Milliseconds of one thread, the least of the repeats. Packing codes is compared with rounding float32 to panels of the
same kind, the product of one row with that of float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.core.matrix_format import MatrixFormat, Shared
from penstock.core.panels import panels_of
from penstock.families.checkpoint import Codes
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.library import best_library
from penstock.ops.native.matrix import pack
from penstock.ops.ref.product import linear
from penstock.ops.stored import StoredMatrix
from penstock.weights.stored import STORED_FORMATS

GROUP = 128


def random_matrix(method: str, n: int, k: int, *, ordered: bool = False) -> StoredMatrix:
    """4 bits in groups of GROUP: of GPTQ symmetric, of AWQ with zero points."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, n * k // 8, dtype=np.uint32)
    scales = (rng.random((k // GROUP, n)) * 0.01).astype(np.float16)
    zeros = np.full((k // GROUP, n // 8), 0x77777777, np.uint32)
    order = rng.permutation(np.arange(k, dtype=np.int32) // GROUP).astype(np.int32) if ordered else None
    kinds = (Shared("uint4", 1, GROUP),) if method == "awq" else ()
    format = MatrixFormat("uint", 4, (Shared("float16", 1, GROUP),), kinds, offset=0 if kinds else 8, ordered=ordered)
    arrays = {"codes": words, "scales": scales, "zeros": zeros} | ({} if order is None else {"order": order})
    codes = Codes(method, format, numbers={"first_zero": 1 if method == "gptq" else 0})
    return STORED_FORMATS.get(method)(codes, arrays, (n, k), np.dtype(np.float32), None)


def least_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--rows", 4096), ("--columns", 4096), ("--repeats", 3)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    n, k, library = args.rows, args.columns, best_library()
    gptq, awq = random_matrix("gptq", n, k), random_matrix("awq", n, k)
    ordered, dense = random_matrix("gptq", n, k, ordered=True), gptq.values()
    x = np.random.default_rng(1).standard_normal((1, k), dtype=np.float32)
    table = Table(title=f"{n} x {k}, 4 bits, groups of {GROUP}, ms")
    for column in ("what", "codes", "float32"):
        table.add_column(column)

    def row(what: str, codes: Callable[[], object], plain: Callable[[], object] | None = None) -> None:
        ms = ["" if call is None else f"{least_ms(call, args.repeats):.1f}" for call in (codes, plain)]
        table.add_row(what, *ms)

    if library is not None:
        panels = panels_of(gptq.format, k)
        row(
            "into panels, GPTQ symmetric",
            lambda: pack(library, [gptq], Format.BLOCK, Act.F32, panels=panels, as_stored=True),
            lambda: pack(library, [dense], Format.BLOCK, Act.F32, panels=panels),
        )
    for name, matrix in (("GPTQ", gptq), ("GPTQ act-order", ordered), ("AWQ", awq)):
        row(f"all values, {name}", lambda m=matrix: m.values())
        row(f"one row's product, {name}", lambda m=matrix: linear(x, m), lambda: linear(x, dense))
    Console().print(table)


if __name__ == "__main__":
    main()
