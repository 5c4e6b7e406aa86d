"""Runs stages one after the other in one process, for `run`: a stage that breaks the device ends with its process."""

from __future__ import annotations

import argparse
import gc
import importlib
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.stages import STAGES

BROKEN = 3
"""Exit status: the device, or the process, is of no more use; another process may go on."""


def about(bench: Bench) -> dict[str, Any]:
    """Versions of everything, and the device."""
    from importlib.metadata import PackageNotFoundError, version

    import numpy

    import penstock

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    found: dict[str, Any] = {
        "penstock": penstock.__version__, "python": platform.python_version(), "numpy": numpy.__version__,
        "torch": torch.__version__, "triton": of("triton"), "flashinfer": of("flashinfer-python"), "vllm": of("vllm"),
        "cuda": torch.version.cuda, "device": bench.name,
    }  # fmt: skip
    if bench.device.type == "cuda":
        own = torch.cuda.get_device_properties(bench.device)
        found |= {"card": own.name, "memory_bytes": own.total_memory, "multiprocessors": own.multi_processor_count,
                  "capability": f"{own.major}.{own.minor}"}  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("lines", type=Path)
    parser.add_argument("stages")
    parser.add_argument("--device", required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--seconds", type=float, required=True, help="for all of them")
    args = parser.parse_args()
    end_s = time.monotonic() + args.seconds
    if args.tiny:
        torch.set_num_threads(1)
    bench = Bench(args.device, args.tiny, args.lines, depth=args.depth)
    bench.write("about", **about(bench))
    torch.manual_seed(0)
    named = args.stages.split(",")
    for stage in (stage for stage in STAGES if stage.name in named):
        if end_s - time.monotonic() < 2.0:
            return 0
        bench.stage, bench.until_s = stage.name, min(end_s, time.monotonic() + stage.budget_s)
        bench.write("begin", at_s=time.time())
        room = importlib.import_module(f"benchmarks.gpu.{stage.room}")
        bench.attempt(stage.name, lambda room=room, stage=stage: stage.make(room)(bench))
        gc.collect()  # engines are circles, and the next stage wants the memory
        try:
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
            bench.sync()
        except Exception as error:
            bench.write("failed", name=stage.name, said=f"the device is of no more use: {error}", trace="")
            bench.write("end", at_s=time.time())
            return BROKEN
        bench.write("end", at_s=time.time())
    return 0


if __name__ == "__main__":
    sys.exit(main())
