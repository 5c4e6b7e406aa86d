"""The highest request rate at which the promised share of requests meets its limits.

Source: Zhong et al., DistServe, 2024, section 2.1: goodput is the largest rate that keeps SLO attainment (there 90 %).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.base.errors import InputError
from penstock.measure.search import NoLimitError, highest
from penstock.sim.metrics import Slo, within
from penstock.sim.result import SimResult


@dataclass(frozen=True)
class Trial:
    """One simulated rate. `factor`: how many times as fast as the workload comes by itself; rates in requests/s."""

    factor: float
    rate: float
    attainment: float


@dataclass(frozen=True)
class Goodput:
    """`best` is the fastest trial that kept the promise; None if not even the slowest one did."""

    best: Trial | None
    trials: tuple[Trial, ...]


def find_goodput(
    run: Callable[[float], SimResult],
    slo: Slo,
    *,
    attainment: float = 0.9,
    tolerance: float = 0.02,
    progress: Callable[[Trial], None] | None = None,
) -> Goodput:
    """Search the factor by doubling, then by halving intervals until they are `tolerance` of themselves wide.

    `run(factor)` simulates the workload that many times as fast, from the same seed, so attainment falls as it grows
    but for noise. Raises InputError if the limits are met at any rate: the workload ends before a queue can build up.
    """
    trials: list[Trial] = []

    def keeps(factor: float) -> bool:
        result = run(factor)
        requests = result.requests
        met = float(within(result, slo).mean()) if len(requests) else 0.0
        span_s = float(requests.arrival_s[-1] - requests.arrival_s[0]) if len(requests) > 1 else 0.0
        rate = (len(requests) - 1) / span_s if span_s > 0 else float("inf")
        trials.append(Trial(factor, rate, met))
        if progress is not None:
            progress(trials[-1])
        return met >= attainment

    try:
        best = highest(keeps, tolerance=tolerance)
    except NoLimitError:
        raise InputError(
            "the limits are met at any rate: the workload ends before a queue builds up; give more requests"
        ) from None
    kept = [t for t in trials if t.factor == best]
    return Goodput(kept[-1] if kept else None, tuple(trials))
