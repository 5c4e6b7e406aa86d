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

from penstock.measure.cost import PRICES
from penstock.plan.devices import find_device
from penstock.report.tables import table
from penstock.sim.disaggregated import EARLY, WASTED, Cluster, Link, imbalance
from penstock.sim.metrics import Slo, distributions
from penstock.sim.sizing import Layout, Machines, attained, cheapest, goodputs, layouts, plain
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.traces import open_trace
from penstock.sim.workload import TimedRequest, Workload, from_list

ROLES = ("prefill", "decode", "mixed")
NETWORK, NODE = Link(25e9), Link(300e9)
"""200 Gbit/s between nodes; 300 GB/s of links within one (an estimate of NVLink of an A100, one way)."""
SLOW = Link(1.25e9)
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


def sizing(args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each load the cheapest with roles and without, on one kind of device and on two."""
    kinds = {"a100": machines(), "h100 for prompts, a100 for tokens": machines("h100-sxm", "a100-80g", "a100-80g")}
    out = []
    for name, load in loads(args).items():
        for limits, slo in LIMITS.items():
            for kind, made in kinds.items():
                row: dict[str, Any] = {"load": name, "limits": limits, "devices": kind}
                for word, roles in (("mixed", False), ("roles", True)):
                    if word == "mixed" and kind != "a100":
                        continue
                    tried = [one for n in range(1, args.most + 1) for one in layouts(n, chunks=(0, 512))]
                    best = cheapest(made, [one for one in tried if one.has_roles == roles], load, slo, 0.9)
                    row[word] = None if best is None else plain(best) | {"trials": None}
                    print(name, limits, kind, word, None if best is None else best.layout.label, flush=True)
                out.append(row)
    return out


LIMITS = {
    "tight: TTFT 0.4 s, TPOT 0.015 s": Slo(0.4, 0.015), "middle: 1 s, 0.03 s": Slo(1.0, 0.03),
    "loose: 2 s, 0.1 s": Slo(2.0, 0.1),
}  # fmt: skip


def loads(args: argparse.Namespace) -> dict[str, Workload]:
    made = {"made: prompts of 512, answers of 128": poisson(30, args.requests, 512, 128, args.seed)}
    if args.traces is not None:
        made["azure2023_conv x 5"] = first(args.traces / "azure2023_conv.csv", args.requests, 5)
        made["azure2023_code x 5"] = first(args.traces / "azure2023_code.csv", args.requests, 5)
    return made


def goodput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of four devices."""
    out = []
    for name, load in loads(args).items():
        for limits, slo in LIMITS.items():
            tried = list(layouts(4, (1, 2), chunks=(0, 256, 512)))
            found = goodputs(machines(), tried, load, slo, 0.9, said=said)
            near = goodputs(replace(machines(), link=SLOW), [Layout(2, 2), Layout(1, 1, nodes=2)], load, slo, 0.9)
            best = {
                "mixed": plain(next(one for one in found if not one.layout.has_roles)),
                "roles": plain(next(one for one in found if one.layout.has_roles)),
                "slow network": [plain(one) for one in near], "all": [plain(one) for one in found],
            }  # fmt: skip
            out.append({"load": name, "limits": limits, **best})
            ratio = best["roles"]["goodput"] / max(1e-9, best["mixed"]["goodput"])
            print(name, limits, best["mixed"]["layout"], best["roles"]["layout"], f"{ratio:.2f}", flush=True)
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
                run = machines(router=router).cluster(Layout(2, 4)).run(expected(load, right, seed))
                tpot, jct = (distributions(run.result)[name] for name in ("tpot", "jct"))
                out.append({
                    "seed": seed, "expected rightly": right, "router": router, "imbalance": round(imbalance(run), 3),
                    "tpot p99 s": round(tpot.percentile(99), 5),
                    "jct mean s": round(jct.mean, 3),
                })  # fmt: skip
                print(out[-1], flush=True)
    return out


def overload(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Twice what the engines that decode have places for."""
    out = []
    small = machines(max_num_seqs=16)
    slo = Slo(4.0, 0.03)
    for seed in range(args.seed, args.seed + 3):
        load = poisson(16, args.requests, 3000, 300, seed)
        for reject in (None, "late", "now", "predicted"):
            cluster = small.cluster(Layout(2, 2), reject=reject, slo=slo)
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
    for router in ("round-robin", "least-tokens", "prefix"):
        for shared in (False, True):
            made = machines("h100-sxm", "h100-sxm", "h100-sxm", max_model_len=65536, router=router)
            cluster = replace(made.cluster(Layout(3, 3)), reuse=shared)
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
    "sizing": sizing, "goodput": goodput, "lengths": lengths, "overload": overload, "reuse": reuse,
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
