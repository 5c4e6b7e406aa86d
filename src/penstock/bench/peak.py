"""How fast this machine multiplies in registers: what prompts and large batches are measured against."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from penstock.ops.native.abi import Act, Format
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.plan.probe import probe

_RUN_S = 0.02
"""A run is at least so long: starting the threads takes microseconds."""
_RUNS = 5
_MOST_TURNS = 1 << 26


@dataclass(frozen=True)
class Peak:
    """Operations per second (a multiply-add counts two). `method` says what multiplied."""

    per_s: float
    method: str


def register_peak(format: Format, act: Act, threads: int | None = None) -> Peak | None:
    """The best of five runs of nothing but the multiply-adds of such a product, on all threads at once.

    `threads` None: as many as this process may use. None without the native library, or if it has no such product.
    """
    library = best_library()
    if library is None:
        return None
    pool = Pool(library, threads or probe().num_cores)
    try:

        def run(turns: int) -> tuple[int, float]:
            began_s = time.perf_counter()
            done = library.pst_multiply(pool.handle, format, act, turns)
            return done, time.perf_counter() - began_s

        turns = 1 << 14
        rates: list[float] = []
        while len(rates) < _RUNS:
            done, took_s = run(turns)
            if done < 0:
                return None
            if took_s < _RUN_S and turns < _MOST_TURNS:
                turns, rates = 4 * turns, []  # the first run, which wakes the threads, may look long enough
            else:
                rates.append(done / took_s)
    finally:
        pool.close()
    numbers = {Act.F32: "float32", Act.BF16: "bfloat16", Act.I8: "8 bits"}
    return Peak(max(rates), f"registers, {pool.num_threads} threads, {numbers[act]}")


def blas_peak(size: int = 1024) -> Peak:
    """The best of five large products of numpy's."""
    a = np.ones((size, size), np.float32)
    b, out = a.copy(), np.empty_like(a)
    times = []
    for _ in range(6):
        began_s = time.perf_counter()
        np.matmul(a, b, out=out)
        times.append(time.perf_counter() - began_s)
    return Peak(2 * size**3 / min(times[1:]), "numpy, float32")
