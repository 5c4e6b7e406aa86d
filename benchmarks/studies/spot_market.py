"""Availability and price of engines on spot machines over zones that fail together (row I02, SkyServe).

    python -m benchmarks.studies.spot_market [--seeds 6] [--out FILE.json]

Two days in steps of a minute, nine zones in three regions (`sim.spot_market.market`); six engines are needed, a machine
on demand costs three times a spot machine. Costs are relative to machines on demand alone.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import save, show
from rich.console import Console

from penstock.sim.spot_market import SpotHedge, market, on_demand_only, rent, spot_only

NEEDED = 6


def measure(seeds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        course = market(seed)
        policies = {"on demand": on_demand_only, "spot alone": spot_only(), "SpotHedge": SpotHedge()}
        bills = {name: rent(policy, course, needed=NEEDED) for name, policy in policies.items()}
        for name, bill in bills.items():
            cost = bill.cost / bills["on demand"].cost
            found.setdefault(name, []).append({"available": bill.available, "cost": cost, "taken": bill.taken})
    means = {name: {key: sum(one[key] for one in each) / seeds for key in each[0]} for name, each in found.items()}
    return {"seeds": seeds, "needed": NEEDED, "means": means, "by_seed": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = measure(args.seeds)
    rows = [
        [name, f"{one['available']:.1%}", f"{one['cost']:.2f}", f"{one['taken']:.0f}"]
        for name, one in found["means"].items()
    ]
    show(Console(), "engines on spot machines", ("", "enough engines", "cost", "taken away"), rows)
    save(args.out, found)


if __name__ == "__main__":
    main()
