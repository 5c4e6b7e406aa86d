"""Routers between simulated replicas on a trace: prompts' tokens found cached, times, how uneven the work is.

    python -m benchmarks.studies.replica_routers /work/data/mooncake_conversation.jsonl --requests 2000 --out FILE.json

On the virtual clock, so the same every time. `one big cache` is one engine with the memory and the speed of all
replicas together: what a router could find at most. `blind` is the router by prefixes that engines tell nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.common import about, save
from rich.console import Console

from penstock.config import from_kwargs
from penstock.plan.devices import Device, find_device
from penstock.plan.simulated import device_plan
from penstock.report.tables import table
from penstock.route import ROUTERS
from penstock.route.prefix import PrefixRoute
from penstock.sim.metrics import distributions
from penstock.sim.replicas import Replicas
from penstock.sim.result import SimResult
from penstock.sim.service import SimulatedService
from penstock.sim.specs import find_spec
from penstock.sim.traces import open_trace
from penstock.sim.workload import Workload, from_list


class BlindPrefix(PrefixRoute):
    """Knows what was placed where, and nothing else."""

    def told(self, number: int, stored: Sequence[int], removed: Sequence[int], *, cleared: bool = False) -> None:
        pass


def times_as_fast(device: Device, n: int) -> Device:
    return msgspec.structs.replace(
        device, name=f"{n} x {device.name}", flops_per_s={k: n * v for k, v in device.flops_per_s.items()},
        read_bytes_per_s=n * device.read_bytes_per_s, memory_bytes=n * (device.memory_bytes or 0),
    )  # fmt: skip


def service(model: str, device: Device, context: int, blocks: int) -> SimulatedService:
    spec = find_spec(model)
    config = from_kwargs({}, model=model, max_model_len=context, num_gpu_blocks_override=blocks)
    return SimulatedService(device.name, spec, *device_plan(config, spec, device), device)


def first(workload: Workload, count: int) -> Workload:
    kept = [request for _, request in zip(range(count), workload, strict=False)]
    return from_list(workload.name, kept, block_tokens=workload.block_tokens)


def figures(result: SimResult) -> dict[str, Any]:
    ttft = distributions(result)["ttft"]
    return {
        "hit rate": round(result.hits["device"] / max(1, result.hits["queried"]), 4),
        "ttft p50 s": round(ttft.percentile(50), 3), "ttft p99 s": round(ttft.percentile(99), 3),
        "span s": round(result.span_s, 1), "refused": sum(result.refused.values()),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--blocks", type=int, default=16384, help="of KV memory of each replica")
    parser.add_argument("--routers", nargs="+", default=["prefix", "blind", "round-robin", "least-tokens", "least-kv"])
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    ROUTERS.add("blind", "benchmarks.studies.replica_routers:BlindPrefix")
    workload, device = first(open_trace(args.trace), args.requests), find_device(args.device)
    whole = service(args.model, times_as_fast(device, args.replicas), args.context, args.blocks * args.replicas)
    found = {"one big cache": figures(whole.run(workload, truncate=True))}
    each = service(args.model, device, args.context, args.blocks)
    for router in args.routers:
        found[router] = figures(Replicas(each, args.replicas, router).run(workload, truncate=True))
    heads = ["router", *next(iter(found.values()))]
    Console().print(table(heads, [[name, *map(str, row.values())] for name, row in found.items()]))
    asked = {name: str(value) if name != "trace" else Path(value).name for name, value in vars(args).items()
             if name != "out"}  # fmt: skip
    save(args.out, about(asked=asked, found=found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
