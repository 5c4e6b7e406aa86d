"""Runs of a case: on the virtual clock with measured step times, and on the real engine, variants in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.policies.case import Case, Load

from penstock.base.errors import EngineError
from penstock.measure.intervals import ratio_interval
from penstock.plan.calibrated import Calibration
from penstock.sim.calibrated import run_calibrated
from penstock.sim.real import run_real
from penstock.sim.result import SimResult
from penstock.sim.workload import Workload

Say = Callable[[str], None]
ALL_AT_ONCE = 1e6
"""Requests per second when the highest rate of finished ones is looked for."""


@dataclass
class Found:
    """Figures of one load: `figures[variant][name]`, one value for each round."""

    load: str
    rate: float
    num_requests: int
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, variant: str, figures: Mapping[str, float]) -> None:
        own = self.figures.setdefault(variant, {})
        for name, value in figures.items():
            own.setdefault(name, []).append(float(value))

    def mean(self, variant: str, name: str) -> float:
        values = self.figures[variant][name]
        return math.fsum(values) / len(values)

    def ratio(self, variant: str, name: str, baseline: str) -> tuple[float, tuple[float, float] | None] | None:
        """Of the variant to the baseline, round by round, and its interval of 95 %; None where one is 0 or none."""
        own, base = self.figures[variant][name], self.figures[baseline][name]
        if not all(math.isfinite(v) and v > 0 for v in (*own, *base)):
            return None
        gain, interval = ratio_interval(own, base)
        return 1 + gain, None if interval is None else (1 + interval[0], 1 + interval[1])


def highest_rate(case: Case, load: Load, table: Calibration, seed: int, n: int) -> float:
    """Finished requests per second of the baseline when all of them are there at the start."""
    baseline = next(iter(case.variants.values()))
    everything = load(ALL_AT_ONCE, seed, n)
    at_once = replace(everything, source=lambda: (replace(r, arrival_s=0.0) for r in everything.source()))
    result = run_calibrated(table, {**case.settings, **baseline}, at_once)
    return len(result.requests) / result.span_s


def simulated(
    case: Case, name: str, table: Calibration, *, rate: float, seeds: Sequence[int], n: int
) -> Found:  # fmt: skip
    found = Found(name, rate, n)
    for seed in seeds:
        for variant, settings in case.variants.items():
            given = {**case.settings, **settings}
            found.add(
                variant, case.figures(run_calibrated(table, given, case.loads[name](rate, seed, n), label=variant))
            )
    return found


def measured(
    case: Case, name: str, model: str, table: Calibration, *, rate: float, seeds: Sequence[int], n: int, say: Say
) -> Found:  # fmt: skip
    """On the real engine, which has the table's settings too. Each round turns the order of the variants.

    Raises EngineError if a request's tokens are not the same under all variants.
    """
    found, base = Found(name, rate, n), list(case.variants)
    for number, seed in enumerate(seeds):
        order = base[number % len(base) :] + base[: number % len(base)]
        runs: dict[str, SimResult] = {}
        for variant in order:
            say(f"{name}: round {number + 1} of {len(seeds)}, {variant}")
            settings = engine_settings(table, case, case.variants[variant])
            runs[variant] = run_real(model, settings, case.loads[name](rate, seed, n), label=variant)
        same_tokens(runs, base[0])
        for variant in base:
            found.add(variant, case.figures(runs[variant]))
    return found


def engine_settings(table: Calibration, case: Case, variant: Mapping[str, Any]) -> dict[str, Any]:
    """What `LLM` is given, so that it is the engine that is simulated."""
    settings = {**table.settings, **case.settings, **variant}
    if settings.get("kv_cache_memory_bytes") is None:
        settings["kv_cache_memory_bytes"] = table.kv_bytes
    return settings


def same_tokens(runs: Mapping[str, SimResult], baseline: str) -> None:
    """Raises EngineError naming the variant and the request whose tokens depend on the policy."""
    for variant, result in runs.items():
        pairs = zip(result.tokens, runs[baseline].tokens, strict=True)
        for row, (own, other) in enumerate(pairs):
            if own != other:
                raise EngineError(f"request {row} has other tokens under {variant} than under {baseline}")


def workload_facts(workload: Workload) -> dict[str, float]:
    """What a load is, for those who read the figures."""
    requests = list(workload)
    return {
        "requests": len(requests),
        "prompt_tokens": sum(r.num_prompt for r in requests),
        "output_tokens": sum(r.num_output for r in requests),
        "span_s": requests[-1].arrival_s if requests else 0.0,
    }
