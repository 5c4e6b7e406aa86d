"""The speed of native attention: decoding against the read bandwidth, prefill in GFLOP/s.

    python -m benchmarks.micro.native_attention [--isa avx512bf16] [--threads 1] [--dtype bfloat16 int8] [--repeat 5]

Decoding: GB/s of keys and values (and scales) looked at, and their share of what `pst_read` reaches in the same minute.
Prefill: a text from its beginning, 4 D multiply-and-adds' halves per pair of a query head and a key that it sees.
Types of planes, and the probe, take turns; the time is the least of `--repeat`, beside it stands the median. Every
figure's output is compared with a softmax in float64 on a few rows before it is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from benchmarks.common import figures, take_turns
from benchmarks.micro.kernels.attention import DTYPES, QWEN, Call

from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool

SHAPES = (QWEN, (32, 8, 64))
CONTEXTS = (1024, 4096, 8192, 32768)
PREFILLS = (512, 1024, 4096)


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

    def show(what: str, dtype: str, call: Call, samples: list[float], rate: str) -> None:
        low, median = figures(samples)["low"], figures(samples)["median"]
        error = call.check(call.result(), dtype)
        print(f"{what} {dtype:8}: {low * 1e6:8.0f} us (median {median * 1e6:.0f}), {rate}; error {error:.1e}")

    for shape in SHAPES:
        for context in options.contexts:
            works: dict[str, Callable[[], object]] = {"read": read}
            firsts, counts = {}, {}
            for dtype in options.dtype:
                firsts[dtype] = Call(pool, shape, [context], 1, dtype=dtype)
                # Several copies of a context, so that a short one does not stay in a cache.
                copies = min(64, max(1, (1 << 26) // firsts[dtype].read_bytes))
                calls = [firsts[dtype], *(Call(pool, shape, [context], 1, dtype=dtype) for _ in range(copies - 1))]
                works[dtype] = lambda calls=calls: [call() for call in calls]
                counts[dtype] = copies
            samples = take_turns(works, options.repeat)
            best = probe.nbytes / min(samples.pop("read")) / 1e9
            for dtype, all_copies in samples.items():
                of = [s / counts[dtype] for s in all_copies]
                rate = firsts[dtype].read_bytes / min(of) / 1e9
                show(
                    f"decode  {shape!s:12} context {context:6}", dtype, firsts[dtype], of,
                    f"{rate:6.1f} GB/s, {rate / best:4.0%} of {best:.1f}",
                )  # fmt: skip
        for length in options.prefills:
            prompts = {dtype: Call(pool, shape, [length], length, dtype=dtype) for dtype in options.dtype}
            for dtype, of in take_turns(prompts, options.repeat).items():
                speed = f"{prompts[dtype].flops / min(of) / 1e9:6.0f} GFLOP/s"
                show(f"prefill {shape!s:12} tokens  {length:6}", dtype, prompts[dtype], of, speed)


if __name__ == "__main__":
    main()
