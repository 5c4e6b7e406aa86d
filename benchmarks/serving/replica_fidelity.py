"""Routers between real engine processes on simulated devices, beside the simulator's prediction of the same requests.

    python -m benchmarks.serving.replica_fidelity MODEL [--device NAME|FILE] [--replicas 3] [--trace FILE]
        [--routers round-robin virtual-usage] [--rounds 3] [--out FILE.json]

Server, engine processes, sockets and routers are real; what they compute is not: their steps take as long as the
device's (`--simulated-device`), so that three of them do not wait for each other's cores. The simulator runs the same
requests through the same routers on the virtual clock. What is left of an error is the front end, the processes and
the engine's own work between steps.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from benchmarks.common import about, save
from rich.console import Console

from penstock.bench.http import HttpClient
from penstock.bench.metrics import Outcome
from penstock.bench.serve import one
from penstock.config import from_kwargs, serve_from_kwargs
from penstock.families.registry import read_model
from penstock.launch.hub import local_path
from penstock.plan.devices import find_device
from penstock.plan.simulated import device_plan
from penstock.report.tables import table
from penstock.server.live import LiveServer
from penstock.sim.metrics import distributions
from penstock.sim.replicas import Replicas
from penstock.sim.service import SimulatedService
from penstock.sim.synthetic import synthetic
from penstock.sim.traces import open_trace
from penstock.sim.workload import Workload, from_list, prompt_ids

FIGURES = (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99))


def workload_of(args: argparse.Namespace) -> Workload:
    if args.trace is None:
        return synthetic(args.synthetic, args.seed)
    whole = open_trace(Path(args.trace))
    kept = list(islice(whole, args.requests))
    load = from_list(whole.name, kept, block_tokens=whole.block_tokens)
    return load.resized(args.scale_lengths).scaled(args.scale_rate)


async def ask(url: str, load: Workload, vocab_size: int) -> tuple[list[Outcome], list[int]]:
    """Every request when it is due; its prompt is the simulator's."""
    client, began_s = HttpClient(url), time.perf_counter()

    async def send(number: int, request: Any) -> Outcome:
        ids = prompt_ids(request, number, vocab_size, load.block_tokens).tolist()
        body = msgspec.json.encode({
            "prompt": ids, "max_tokens": request.num_output, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        })  # fmt: skip
        await asyncio.sleep(max(0.0, began_s + request.arrival_s - time.perf_counter()))
        return await one(client, "/v1/completions", body)

    requests = list(load)
    found = await asyncio.gather(*(send(number, request) for number, request in enumerate(requests)))
    await client.close()
    return list(found), [request.num_output for request in requests]


def figures(outcomes: Sequence[Outcome], lengths: Sequence[int]) -> dict[str, float]:
    failed = [outcome.error for outcome in outcomes if not outcome.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed; the first: {failed[0]}")
    ttft = [outcome.ttft_s for outcome in outcomes]
    tpot = [(o.latency_s - o.ttft_s) / (n - 1) for o, n in zip(outcomes, lengths, strict=True) if n > 1]
    values = {"ttft": ttft, "tpot": tpot}
    return {f"{name} p{p}, s": float(np.percentile(values[name], p)) for name, p in FIGURES} | {
        "ttft mean, s": float(np.mean(ttft))
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default=str(Path(__file__).with_name("paced_device.toml")))
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--trace")
    parser.add_argument("--synthetic", default="synthetic:poisson?rate=4&requests=120&prompt=400&output=60&output_cv=1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--scale-lengths", type=float, default=1.0)
    parser.add_argument("--scale-rate", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--routers", nargs="+", default=["round-robin", "least-requests", "virtual-usage"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    load = workload_of(args)
    settings: dict[str, Any] = {
        "model": args.model, "max_num_seqs": args.max_num_seqs, "num_gpu_blocks_override": args.blocks,
        "max_model_len": args.context, "simulated_device": args.device,
    }  # fmt: skip
    spec = read_model(local_path(args.model, None, weights=False))[0]
    device = find_device(args.device)
    plain = from_kwargs({}, **{name: value for name, value in settings.items() if name != "simulated_device"})
    service = SimulatedService(device.name, spec, *device_plan(plain, spec, device), device, seconds_budget=True)
    measured: dict[str, list[dict[str, float]]] = {router: [] for router in args.routers}
    for turn in range(args.rounds):
        order = args.routers[turn % len(args.routers) :] + args.routers[: turn % len(args.routers)]
        for router in order:
            serving = serve_from_kwargs(
                **settings, port=0, data_parallel_size=args.replicas, route_policy=router, request_log=False
            )
            with LiveServer(serving) as server:
                measured[router].append(figures(*asyncio.run(ask(server.url, load, spec.vocab_size))))
            print(f"round {turn + 1}, {router}: {measured[router][-1]}", file=sys.stderr)
    rows, found = [], {}
    for router in args.routers:
        result = Replicas(service, args.replicas, router).run(load)
        seen = distributions(result)
        said = {f"{name} p{p}, s": seen[name].percentile(p) for name, p in FIGURES}
        said["ttft mean, s"] = float(np.mean(result.requests.first_token_s - result.requests.arrival_s))
        for name, predicted in said.items():
            values = [one_round[name] for one_round in measured[router]]
            middle = median(values)
            rows.append([router, name, f"{middle:.4g}", f"{min(values):.4g} to {max(values):.4g}", f"{predicted:.4g}",
                         f"{predicted / middle:.3f}"])  # fmt: skip
            found.setdefault(router, {})[name] = {
                "measured": values,
                "simulated": predicted,
                "ratio": predicted / middle,
            }
    heads = ["router", "figure", "measured", "rounds", "simulated", "ratio"]
    Console().print(table(heads, rows, title=load.description, left=2, box=True))
    asked = {name: value for name, value in vars(args).items() if name not in ("out", "model", "trace")}
    asked |= {"device": device.name, "model": Path(args.model).name, "trace": args.trace and Path(args.trace).name}
    save(args.out, about(asked=asked, workload=load.description, found=found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
