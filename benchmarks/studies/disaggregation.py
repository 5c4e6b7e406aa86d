"""Engines for prompts and for tokens beside engines that do both, on the virtual clock: where it pays, and where not.

    python -m benchmarks.studies.disaggregation [--traces FOLDER] [--parts sizing,goodput] --out FILE.json

sizing: the cheapest cluster that keeps a service level, with roles and without (Splitwise). goodput: requests/s of four
devices under limits from tight to loose, with roles (placed across nodes or within) and without, mixed engines with
chunks of several sizes (DistServe). lengths: how uneven engines that decode are (TetriInfer). overload: prompts that
were computed in vain, and requests in time (Mooncake). reuse: tokens of prompts found, with a memory in common and
without. Every run has a seed and comes out the same again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import about, save
from rich.console import Console

from penstock.core.protocols import StepTimer
from penstock.core.step_shape import StepShape
from penstock.measure.cost import PRICES
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import find_device
from penstock.report.tables import table
from penstock.sim.disaggregated import EARLY, WASTED, Cluster, EngineLink, imbalance
from penstock.sim.metrics import Slo, distributions
from penstock.sim.service import SimulatedService
from penstock.sim.sizing import EngineLayout, Machines, attained, cheapest, goodputs, layouts, plain
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.traces import open_trace
from penstock.sim.workload import TimedRequest, Workload, from_list

ROLES = ("prefill", "decode", "mixed")
NETWORK, NODE = EngineLink(25e9), EngineLink(300e9)
"""200 Gbit/s between nodes; 300 GB/s of links within one (an estimate of NVLink of an A100, one way)."""
SLOW = EngineLink(1.25e9)
"""10 Gbit/s."""


def machines(prefill: str = "a100-80g", decode: str = "a100-80g", mixed: str = "a100-80g", **settings: Any) -> Machines:
    names = dict(zip(ROLES, (prefill, decode, mixed), strict=True))
    devices = {role: find_device(name) for role, name in names.items()}
    prices = {role: PRICES[name].per_hour for role, name in names.items()}
    how = {"max_model_len": 8192} | settings
    router = how.pop("router", "least-tokens")
    return Machines(
        find_spec("llama-3.1-8b"), "llama-3.1-8b", devices, prices, NETWORK, NODE, how, router
    )  # fmt: skip


def first(trace: Path, count: int, factor: float = 1.0) -> Workload:
    """Requests that fit the context."""
    kept = [r for _, r in zip(range(count), open_trace(trace).scaled(factor), strict=False)]
    return from_list(trace.stem, [r for r in kept if r.num_prompt + r.num_output <= 8192])


def poisson(rate: float, requests: int, prompt: int, output: int, seed: int) -> Workload:
    sizes = f"prompt={prompt}&output={output}&prompt_cv=0.5&output_cv=0.7"
    return synthetic(f"synthetic:poisson?rate={rate:g}&requests={requests}&{sizes}", seed)


def said(sized: Any) -> None:
    rate = "" if sized.goodput is None else f", {sized.goodput:.4g}/s"
    print(f"    {sized.layout.label}: {sized.attainment:.1%}{rate}", flush=True)


LIMITS = {"tight: TTFT 0.5 s, TPOT 0.0107 s": Slo(0.5, 0.0107), "loose: 2 s, 0.1 s": Slo(2.0, 0.1)}
FINE = 192
"""Tokens of a step for which reading the weights takes about as long as computing, on an A100."""


def loads(args: argparse.Namespace) -> dict[str, Workload]:
    made = {"made: prompts of 1,500, answers of 60, 16/s": poisson(16, args.requests, 1500, 60, args.seed)}
    if args.traces is not None:
        made["azure2023_code, 5 times as fast"] = first(args.traces / "azure2023_code.csv", args.requests, 5)
        made["azure2023_conv, 3 times as fast"] = first(args.traces / "azure2023_conv.csv", args.requests, 3)
    return made


def kinds() -> dict[str, Callable[[EngineLayout], bool]]:
    """Families that are compared."""
    return {
        "mixed": lambda one: not one.has_roles and not one.chunk,
        f"mixed, steps of {FINE}": lambda one: not one.has_roles and one.chunk == FINE,
        "roles": lambda one: one.has_roles,
    }  # fmt: skip


def sizing(args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each load the cheapest of each family."""
    out = []
    for name, load in loads(args).items():
        for limits, slo in LIMITS.items():
            row: dict[str, Any] = {"load": name, "limits": limits}
            for kind, fits in kinds().items():
                tried = [one for n in range(1, args.most + 1) for one in layouts(n, chunks=(0, FINE)) if fits(one)]
                best = cheapest(machines(), tried, load, slo, 0.9)
                row[kind] = "none" if best is None else f"{best.layout.label}: {best.price:g}"
            print(row, flush=True)
            out.append(row)
    return out


class OneAfterTheOther:
    """Steps in which computing waits for memory and memory for computing: the worst case of a mixed step, where the
    roofline is the best."""

    name = "one after the other"

    def __init__(self, timer: RooflineTimer) -> None:
        self._timer = timer

    def step_s(self, shape: StepShape) -> float:
        return self._timer.overhead_s + sum(one.compute_s + one.memory_s for one in self._timer.phases(shape))

    def copy_s(self, num_bytes: int) -> float:
        return self._timer.copy_s(num_bytes)


class WithoutOverlap(SimulatedService):
    @property
    def timer(self) -> StepTimer:
        found = super().timer
        assert isinstance(found, RooflineTimer), "one device"
        return OneAfterTheOther(found)


def overlap(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The cheapest of each family where nothing overlaps in a step."""
    name, load = next(iter(loads(args).items()))
    limits, slo = next(iter(LIMITS.items()))
    row: dict[str, Any] = {"load": name, "limits": limits}
    for kind, fits in kinds().items():
        tried = [one for n in range(1, args.most + 1) for one in layouts(n, chunks=(0, FINE)) if fits(one)]
        best = cheapest(replace(machines(), kind=WithoutOverlap), tried, load, slo, 0.9, said)
        row[kind] = "none" if best is None else f"{best.layout.label}: {best.price:g}"
    print(row, flush=True)
    return [row]


def goodput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of four devices; groups within nodes where the network is slow."""
    out = []
    for name, load in loads(args).items():
        for limits, slo in LIMITS.items():
            row: dict[str, Any] = {"load": name, "limits": limits}
            found = goodputs(machines(), list(layouts(4, chunks=(0, FINE))), load, slo, 0.9, tolerance=0.1, said=said)
            for kind, fits in kinds().items():
                best = next(one for one in found if fits(one.layout))
                row[kind] = f"{best.layout.label}: {best.goodput:.3g}/s"
            slow = replace(machines(), link=SLOW)
            near = goodputs(slow, [EngineLayout(2, 2), EngineLayout(1, 1, nodes=2)], load, slo, 0.9, tolerance=0.1)
            row |= {f"slow network, {one.layout.label}": f"{one.goodput:.3g}/s" for one in near}
            out.append(row | {"all": [plain(one) for one in found]})
            print(row, flush=True)
    return out


def expected(load: Workload, right: float, seed: int) -> Workload:
    """Lengths are expected: of this share right, of the others those of somebody else."""
    rng, kept = random.Random(seed), list(load)
    others = [r.num_output for r in kept]
    return from_list(load.name, [
        replace(r, expected=r.num_output if rng.random() < right else rng.choice(others)) for r in kept
    ])  # fmt: skip


def mixed_lengths(requests: int, rate: float, seed: int) -> Workload:
    """One answer in five is ten times as long."""
    rng, now_s, kept = random.Random(seed), 0.0, []
    for _ in range(requests):
        now_s += rng.expovariate(rate)
        kept.append(TimedRequest(now_s, rng.randint(100, 900), 600 if rng.random() < 0.2 else rng.randint(30, 90)))
    return from_list("one answer in five is ten times as long", kept)


def lengths(args: argparse.Namespace) -> list[dict[str, Any]]:
    out = []
    for seed in range(args.seed, args.seed + 3):
        load = mixed_lengths(args.requests, 20, seed)
        for right in (1.0, 0.75):
            for router in ("random", "round-robin", "power-of-two", "length-buckets"):
                run = machines(router=router).cluster(EngineLayout(2, 4)).run(expected(load, right, seed))
                tpot, jct = (distributions(run.result)[name] for name in ("tpot", "jct"))
                out.append({
                    "seed": seed, "expected rightly": right, "router": router, "imbalance": round(imbalance(run), 3),
                    "tpot p99 s": round(tpot.percentile(99), 5),
                    "jct mean s": round(jct.mean, 3),
                })  # fmt: skip
                print(out[-1], flush=True)
    return out


def overload(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Nearly twice what the engines that decode have places for."""
    out = []
    small = machines(max_num_seqs=8)
    slo = Slo(4.0, 0.015)
    for seed in range(args.seed, args.seed + 3):
        load = poisson(16, args.requests, 2000, 200, seed)
        for reject in (None, "late", "now", "predicted"):
            cluster = small.cluster(EngineLayout(2, 2), reject=reject, slo=slo)
            run = cluster.run(load)
            refused = run.result.refused
            out.append({
                "seed": seed, "reject": reject or "nobody", "in time": round(attained(run, slo), 3),
                "refused at once": refused.get(EARLY, 0), "after their prompt": refused.get(WASTED, 0),
                "tokens in vain": run.wasted_tokens,
            })  # fmt: skip
            print(out[-1], flush=True)
    return out


def reuse(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Mooncake's own trace: prompts share beginnings, which engines in turn do not find in a memory of their own."""
    if args.traces is None:
        return []
    kept = [
        r for _, r in zip(range(args.requests), open_trace(args.traces / "mooncake_conversation.jsonl"), strict=False)
    ]
    load = from_list(
        "mooncake_conversation", [r for r in kept if r.num_prompt + r.num_output <= 65536], block_tokens=512
    )
    out = []
    for router in ("round-robin", "prefix"):
        for shared in (False, True):
            made = machines("h100-sxm", "h100-sxm", "h100-sxm", max_model_len=65536, router=router)
            cluster = replace(made.cluster(EngineLayout(3, 3)), reuse=shared)
            out.append(hits(cluster, load) | {"router": router, "memory": "in common" if shared else "of each engine"})
            print(out[-1], flush=True)
    return out


def hits(cluster: Cluster, load: Workload) -> dict[str, Any]:
    result = cluster.run(load).result
    ttft = distributions(result)["ttft"]
    share = float(result.requests.cached.sum()) / max(1, int(result.requests.num_prompt.sum()))
    return {
        "found": round(share, 4),
        "ttft p50 s": round(ttft.percentile(50), 3),
        "p99 s": round(ttft.percentile(99), 3),
    }


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "sizing": sizing, "overlap": overlap, "goodput": goodput, "lengths": lengths, "overload": overload, "reuse": reuse,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of azure2023_*.csv and mooncake_conversation.jsonl")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--most", type=int, default=5, help="devices of a cluster")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    found = {}
    for name in args.parts.split(","):
        found[name] = PARTS[name](args)
        rows = found[name]
        flat = [k for k in rows[0] if not isinstance(rows[0][k], dict | list)] if rows else []
        Console().print(table(flat, [[str(row[k]) for k in flat] for row in rows], title=name))
    asked = {"requests": args.requests, "most": args.most, "seed": args.seed, "traces": args.traces is not None}
    save(args.out, about(asked=asked, found=found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
