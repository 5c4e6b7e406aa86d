"""Offline work in the gaps of a bursty load, beside the same load without any.

The loads come in pairs: what online requests feel is the difference of their figures between the two of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from benchmarks.policies.case import Case, Load
from benchmarks.policies.compare import ALL_AT_ONCE
from benchmarks.policies.loads import drawn, trace

from penstock.sim.result import SimResult
from penstock.sim.workload import Workload, from_list

NEVER_DUE = 1e6
BACKLOG = drawn(prompt=192, output=64)


def beside(load: Load, *, backlog: bool) -> Load:
    """Half of the requests arrive online; the other half are there at the start as offline work, or are left out."""

    def made(rate: float, seed: int, n: int) -> Workload:
        on = [replace(r, tenant="online", blocks=()) for r in load(rate, seed, max(1, n // 2))]
        off = [
            replace(r, tenant="offline", arrival_s=0.0, offline_s=NEVER_DUE)
            for r in BACKLOG(ALL_AT_ONCE, seed + 1000, n - n // 2)
        ]
        # The highest rate is looked for with all of them, so that both of a pair have the same arrivals.
        wanted = off if backlog or rate >= ALL_AT_ONCE else []
        return from_list("online and offline", sorted(wanted + on, key=lambda r: r.arrival_s))

    return made


def figures(result: SimResult) -> Mapping[str, float]:
    rows = result.requests
    on = rows.tenant == result.tenants.index("online")
    ttft = (rows.first_token_s - rows.arrival_s)[on]
    tpot = ((rows.finish_s - rows.first_token_s) / np.maximum(1, rows.num_output - 1))[on]
    end_s = float(rows.finish_s[on].max())
    done = rows.num_output[~on & (rows.finish_s <= end_s)].sum()
    return {
        "online TTFT p50, s": float(np.quantile(ttft, 0.5)),
        "online TTFT p99, s": float(np.quantile(ttft, 0.99)),
        "online TPOT mean, s": float(tpot.mean()),
        "offline tokens/s beside them": float(done) / end_s,
        "offline sequences that gave way": float(result.stats.num_offline_preemptions),
    }


_LOADS = {
    "bursts": drawn(prompt=128, output=48, process="gamma", cv=3.0),
    "Azure": trace("azure2023_conv.csv"),
}
CASE = Case(
    name="conserve",
    title="Offline work in the gaps of online requests (ConServe)",
    goal="Offline tokens/s above 0 while the p99 of online TTFT grows by at most 10 % against no backlog.",
    variants={"as set": {}, "only in gaps": {"offline_slowdown": 0.0}},
    loads={name + end: beside(load, backlog=not end) for name, load in _LOADS.items() for end in ("", " alone")},
    figures=figures,
    share=0.2,
    requests=32,
)
