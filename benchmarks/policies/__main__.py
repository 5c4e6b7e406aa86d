"""Policies against their baselines, on the virtual clock and on the real engine.

    python -m benchmarks.policies CASE|all [--engine MODEL] [--rounds 3] [--out policies.json]

Simulated figures rest on step times that `penstock sim calibrate` has measured (`--table`). With `--engine` the same
loads run through that model as well, variants in turns, beside what the simulation says of just these runs; every
request must have the same tokens under all variants. Ratios are to the first variant.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.policies.case import Case
from benchmarks.policies.compare import Found, highest_rate, measured, simulated, workload_facts
from rich.console import Console

from penstock import __version__
from penstock.base.errors import PenstockError
from penstock.plan.calibrated import Calibration, load
from penstock.report.tables import table as make_table

HERE = Path(__file__).resolve().parent
STEPS = HERE / "steps.json"
SAYS_SOMETHING = 3
"""Rounds from which on an interval is shown."""
NOT_CASES = ("__main__", "case", "compare", "loads", "predicted")


def cases() -> dict[str, Case]:
    """Of every file in this folder that has a CASE, or several as CASES."""
    found: dict[str, Case] = {}
    for path in sorted(HERE.glob("*.py")):
        if path.stem not in NOT_CASES:
            module = importlib.import_module(f"benchmarks.policies.{path.stem}")
            for case in getattr(module, "CASES", None) or [module.CASE]:
                found[case.name] = case
    return found


def main() -> int:
    known = cases()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=[*known, "all"])
    parser.add_argument("--table", type=Path, default=STEPS, metavar="FILE", help="step times (default: steps.json)")
    parser.add_argument("--loads", metavar="NAMES", help="only these, by name, with commas")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--rounds", type=int, default=1, metavar="R", help="with seeds S, S+1, ... (default: 1)")
    parser.add_argument("--requests", type=int, metavar="N", help="on the real engine (default: what the case says)")
    parser.add_argument("--sim-requests", type=int, metavar="N", help="simulated (default: 8 times as many)")
    parser.add_argument("--share", type=float, metavar="X", help="of the highest rate (default: what the case says)")
    parser.add_argument("--engine", metavar="MODEL", help="also run on this model")
    parser.add_argument("--out", type=Path, metavar="JSON")
    args = parser.parse_args()
    console = Console()
    if min(args.rounds, args.requests or 1, args.sim_requests or 1) < 1 or args.seed < 0:
        console.print("rounds and requests must be at least 1, and the seed not negative", style="red")
        return 2
    try:
        steps = load(args.table)
        report = {name: compare(known[name], steps, args, console) for name in known if args.case in (name, "all")}
    except PenstockError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1
    if args.out is not None:
        about = {"version": __version__, "table": steps.model, "engine": args.engine, "load": os.getloadavg()}
        args.out.write_text(json.dumps(about | {"cases": report}, indent=1) + "\n", "utf-8")
        print(f"wrote {args.out}", file=sys.stderr)
    return 0


def compare(case: Case, steps: Calibration, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """One case: prints a table for each load and returns everything as plain data."""
    console.print(f"[bold]{case.title}[/bold]\n{case.goal}")
    out: dict[str, Any] = {"goal": case.goal, "loads": {}}
    real_n = args.requests or case.requests
    sim_n = args.sim_requests or 8 * real_n
    seeds = range(args.seed, args.seed + args.rounds)
    wanted = case.loads if args.loads is None else args.loads.split(",")
    for name in wanted:
        drawn = case.loads[name]
        rate = (args.share or case.share) * highest_rate(case, drawn, steps, args.seed, sim_n)
        shown: dict[str, Found] = {"simulated": simulated(case, name, steps, rate=rate, seeds=seeds, n=sim_n)}
        if args.engine is not None:
            shown["predicted"] = simulated(case, name, steps, rate=rate, seeds=seeds, n=real_n)
            with console.status("starting") as status:
                shown["measured"] = measured(
                    case, name, args.engine, steps, rate=rate, seeds=seeds, n=real_n, say=status.update
                )
        show(case, name, shown, console)
        facts = workload_facts(drawn(rate, args.seed, real_n))
        out["loads"][name] = {"facts": facts} | {kind: asdict(found) for kind, found in shown.items()}
    return out


def show(case: Case, name: str, shown: dict[str, Found], console: Console) -> None:
    first = next(iter(shown.values()))
    sizes = ", ".join(f"{kind}: {found.num_requests} requests" for kind, found in shown.items())
    title = f"{name}, {first.rate:.3g} requests/s ({sizes})"
    made = make_table(("figure", "variant", *shown), title=title, left=2, box=True)
    baseline = next(iter(case.variants))
    for figure in first.figures[baseline]:
        for variant in case.variants:
            cells = (_cell(found, variant, figure, baseline) for found in shown.values())
            made.add_row(figure if variant == baseline else "", variant, *cells)
        made.add_section()
    console.print(made)


def _cell(found: Found, variant: str, figure: str, baseline: str) -> str:
    text = f"{found.mean(variant, figure):.4g}"
    if variant == baseline or (ratio := found.ratio(variant, figure, baseline)) is None:
        return text
    value, interval = ratio
    known = interval if len(found.figures[variant][figure]) >= SAYS_SOMETHING else None
    return f"{text} x{value:.3f}" + ("" if known is None else f" ({known[0]:.3f} to {known[1]:.3f})")


if __name__ == "__main__":
    sys.exit(main())
