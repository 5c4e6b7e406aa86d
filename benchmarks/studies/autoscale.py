"""SLO attainment over replica-seconds: engines that come and go with the load, against fixed numbers (row I09).

    python -m benchmarks.studies.autoscale [--trace azure2023_conv.csv] [--every 4] [--start-s 20] [--out FILE.json]
        [--images FOLDER] [--read FILE.json]

On the virtual clock, so the same everywhere: Llama-3.1-8B on an L4 as the simulator has it, 8 sequences at once. Two
loads: a *day* of 20 minutes whose rate goes from almost nothing to 19.6 requests/s and back (log-normal lengths), and,
where `--trace` names one, a *trace*, of which every `--every`-th request is taken. Each is served by fixed numbers of
engines and by each scaler for several targets, from one engine to twelve. An engine takes `--start-s` from its order
to ready, and costs from its order to its end. *Attained* is the share of requests with a first token within 2 s and
tokens no more than 0.15 s apart on average.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import save, show
from benchmarks.speculation.breakeven import drawing
from rich.console import Console

from penstock.config import from_kwargs
from penstock.plan.devices import find_device
from penstock.plan.simulated import device_plan
from penstock.report.chart import Chart, Line
from penstock.report.numbers import percent
from penstock.sim.autoscale import ScaledReplicas
from penstock.sim.metrics import Slo, within
from penstock.sim.service import SimulatedService
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.traces import TraceOptions, open_trace
from penstock.sim.workload import Workload

DAY = "synthetic:daily?rate=10&peak=19.6&period=1200&requests=12000&prompt=200&output=40&prompt_cv=1&output_cv=1"
SLO = Slo(ttft_s=2.0, tpot_s=0.15)
FIXED = {"day": (3, 4, 5, 6), "trace": (1, 2, 3)}
TARGETS = (8, 10, 12)
MOST = 12
NAMES = ("fixed", "reactive", "predictive")


def service() -> SimulatedService:
    spec, device = find_spec("llama-3.1-8b"), find_device("l4")
    config = from_kwargs({}, model="llama-3.1-8b", max_model_len=8192, max_num_seqs=8)
    return SimulatedService("l4", spec, *device_plan(config, spec, device), device)


def thinned(path: str, every: int) -> Workload:
    whole = open_trace(path, TraceOptions())
    return replace(
        whole, name=f"{Path(path).stem}, one of {every}", num_requests=None,
        source=lambda: itertools.islice(whole.source(), 0, None, every),
    )  # fmt: skip


def runs(load: str) -> list[tuple[str, str, int, int]]:
    """(name, scaler, least, most)"""
    fixed = [("fixed", "fixed", n, n) for n in FIXED[load]]
    return fixed + [(name, f"{name}:target={target}", 1, MOST) for name in NAMES[1:] for target in TARGETS]


def measure(name: str, load: Workload, start_s: float) -> list[dict[str, Any]]:
    found, each = [], service()
    for kind, scaler, least, most in runs(name):
        scaled = ScaledReplicas(each, scaler, least, most, start_s).run(load, truncate=True)
        offered = len(scaled.result.requests) + sum(scaled.result.refused.values())
        found.append({
            "name": kind, "scaler": scaler if least < most else f"fixed, {least}", "replica_s": scaled.replica_s,
            "attained": int(within(scaled.result, SLO).sum()) / offered, "most": scaled.most,
            "times": len(scaled.steps), "requests": offered,
        })  # fmt: skip
        print(f"{load.name}: {found[-1]}", flush=True)
    return found


def chart(title: str, rows: list[dict[str, Any]]) -> Chart:
    lines = []
    for style, name in enumerate(NAMES):
        own = sorted((row["replica_s"], row["attained"]) for row in rows if row["name"] == name)
        dots = [(x, y, name if k == len(own) // 2 else "") for k, (x, y) in enumerate(own)]
        lines.append(Line(name, [x for x, _ in own], [y for _, y in own], style, dots))
    return Chart(title, "{:,.0f}".format, percent, y_max=1.0, lines=lines, note="attained, over replica-seconds")


def draw(found: dict[str, Any], folder: Path) -> None:
    for name, one in found["loads"].items():
        (folder / f"autoscale-{name}.svg").write_text(drawing(chart(one["load"], one["runs"])), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a file of requests with times")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--limit", type=int, default=1000, help="requests of the trace (default: 1000)")
    parser.add_argument("--loads", default="day,trace", help="which, with commas")
    parser.add_argument("--start-s", type=float, default=20.0)
    parser.add_argument("--out")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="write a curve for each load")
    parser.add_argument("--read", type=Path, metavar="FILE.json", help="draw what an earlier run has found")
    args = parser.parse_args()
    if args.read is not None:
        draw(json.loads(args.read.read_text("utf-8")), args.images)
        return
    loads = {"day": synthetic(DAY, seed=1)}
    if args.trace:
        loads["trace"] = thinned(args.trace, args.every).limited(args.limit)
    loads = {name: load for name, load in loads.items() if name in args.loads.split(",")}
    found = {name: measure(name, load, args.start_s) for name, load in loads.items()}
    for name, rows in found.items():
        cells = [
            [row["scaler"], f"{row['replica_s']:,.0f}", f"{row['attained']:.2%}", str(row["most"]), str(row["times"])]
            for row in rows
        ]
        show(Console(), loads[name].name, ("scaler", "replica-seconds", "attained", "most", "times scaled"), cells)
    about = {"start_s": args.start_s, "ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
    told = {name: {"load": loads[name].description, "runs": rows} for name, rows in found.items()}
    save(args.out, about | {"loads": told})
    if args.images is not None:
        draw({"loads": told}, args.images)


if __name__ == "__main__":
    main()
