"""What the device can do at most, measured: the ceilings that every share of this run refers to."""

from __future__ import annotations

import torch
from benchmarks.gpu.bench import Bench

COPY, PRODUCT = "copy_bytes_per_s", "product_flops_per_s"


def run(bench: Bench) -> None:
    """A copy within the device's memory, counted as bytes read plus bytes written; a pass that only reads; a large
    product in bfloat16, added in float32; the smallest launch."""
    _memory(bench)
    _product(bench)
    _launches(bench)


def _memory(bench: Bench) -> None:
    n = 1 << 20 if bench.tiny else 2 << 30
    source = torch.empty(n, dtype=torch.uint8, device=bench.device).random_(0, 255)
    target = torch.empty_like(source)
    took = bench.seconds(lambda: target.copy_(source))
    bench.figure(COPY, 2 * n / took["low"], "B/s", seconds=took, said=f"{n} bytes, read and written, the fastest")
    wide = source.view(torch.float32)
    wide.nan_to_num_(0.0)
    took = bench.seconds(lambda: wide.sum())
    bench.figure("read_bytes_per_s", n / took["low"], "B/s", seconds=took, said="a sum of float32, the fastest")


def _product(bench: Bench) -> None:
    size = 128 if bench.tiny else 8192
    a, b = (torch.randn(size, size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    took = bench.seconds(lambda: torch.mm(a, b.t()))
    flops = 2 * size**3
    bench.figure(PRODUCT, flops / took["median"], "FLOP/s", seconds=took, said=f"{size} cubed, random data, the median")


def _launches(bench: Bench) -> None:
    one = torch.zeros(1, device=bench.device)
    many = 1000

    def launches() -> None:
        for _ in range(many):
            one.add_(1.0)

    took = bench.seconds(launches, repeats=5)
    bench.figure("launch_s", took["low"] / many, "s", said="from the host, one behind the other")
