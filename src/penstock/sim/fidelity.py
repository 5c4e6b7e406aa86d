"""Is a simulation true? The same requests through the real engine and through the simulated one, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.config import EngineConfig
from penstock.measure.stolen import StolenTime
from penstock.plan.calibrated import Calibration
from penstock.plan.measured import Sample
from penstock.sim.calibrate import collect, plain
from penstock.sim.calibrated import calibration_of, config_for, run_calibrated
from penstock.sim.metrics import Distribution, distributions
from penstock.sim.real import real_engine, run_on
from penstock.sim.result import SimResult
from penstock.sim.workload import Workload

TRIES = 4
FIGURES = (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99))
Measuring = Callable[[float, int], None]


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of one policy. Units: seconds, or tokens/s.

    `measured`: the median of the rounds, which went from `low` to `high`: how far one run is from the next here.
    """

    policy: str
    figure: str
    measured: float
    simulated: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured if self.measured else float("nan")


@dataclass(frozen=True)
class Fidelity:
    """`runs`: for every policy the measured one (of several the one whose span is the median) and the simulated one.

    `stolen`: of each round in turn, the share of the processors' time that the machine's host took away. `repeated`:
    runs that were left out for that.
    """

    steps: Calibration
    runs: tuple[SimResult, ...]
    lines: tuple[ComparedFigure, ...]
    stolen: tuple[float, ...] = ()
    repeated: int = 0

    @property
    def worst(self) -> float:
        """The largest |ratio - 1| of all figures."""
        return float(np.nanmax([abs(line.ratio - 1) for line in self.lines]))


def compare_runs(policy: str, rounds: Sequence[SimResult], simulated: SimResult) -> list[ComparedFigure]:
    """TTFT and TPOT, p50 and p99, and output tokens/s. `rounds`: the same requests on the real engine, once or more."""
    measured, predicted = [_figures(result) for result in rounds], _figures(simulated)
    lines = []
    for name, value in predicted.items():
        seen = [figures[name] for figures in measured]
        lines.append(ComparedFigure(policy, name, float(np.median(seen)), value, min(seen), max(seen)))
    return lines


def _figures(result: SimResult) -> dict[str, float]:
    found = distributions(result)
    figures = {f"{name.upper()} p{p}, s": found[name].percentile(p) for name, p in FIGURES}
    return figures | {"output tokens/s": float(result.requests.num_output.sum()) / result.span_s}


def fidelity(
    config: EngineConfig,
    given: Mapping[str, Any],
    policies: Sequence[str],
    workload: Workload,
    *,
    steps: Calibration | None = None,
    rounds: int = 1,
    most_stolen: float = 1.0,
    seconds: float = 30.0,
    longest: int = 1024,
    truncate: bool = False,
    say: Callable[[str], None] = lambda line: None,
    measuring: Measuring | None = None,
) -> Fidelity:
    """Run `workload` under each policy on the engine of `config`, in turns, `rounds` times; then simulate it with the
    same settings.

    Without `steps` these are measured for `seconds` in all, before each run and after the last, so that a machine that
    is not equally fast all the time is known as it was meanwhile. A run, or a round of steps, in which a virtual
    machine's host took away more than `most_stolen` of the processors' time is repeated, a run TRIES times at most.

    `given`: the settings of `config` that somebody gave, by name. Raises as `launch.build.start`, ConfigError for
    settings that `steps` were not measured with.
    """
    fitted: list[Sample] = []
    held: list[Sample] = []
    own = config if steps is None else _named(config_for(steps, given), config)
    part_s = seconds / (rounds * len(policies) + 1)
    found, repeated = steps, 0
    stolen: list[float] = []
    measured: dict[str, list[SimResult]] = {policy: [] for policy in policies}
    for number, policy in enumerate([*policies] * rounds + [""]):
        if steps is None:
            say("measuring steps")
            with real_engine(plain(config)) as engine:
                more = collect(
                    engine, seconds=part_s, longest=longest, seed=number, progress=measuring, most_stolen=most_stolen
                )
                fitted, held = fitted + more[0], held + more[1]
                if not policy:
                    found = calibration_of(engine, plain(config), fitted, held)
        if policy:
            say(f"{policy}: the real engine, {len(measured[policy]) + 1} of {rounds}")
            placed = replace(own, scheduler=replace(own.scheduler, scheduling_policy=policy))
            for tries_left in range(TRIES - 1, -1, -1):
                with real_engine(placed) as engine:
                    watch = StolenTime()
                    result = run_on(engine, workload, label=f"{policy}, measured", truncate=truncate)
                share = watch.share()
                if share <= most_stolen or not tries_left:
                    break
                repeated += 1
            measured[policy].append(result)
            stolen.append(share)
    assert found is not None
    runs: list[SimResult] = []
    lines: list[ComparedFigure] = []
    for policy, real in measured.items():
        say(f"{policy}: simulated")
        chosen = {**given, "scheduling_policy": policy}
        simulated = run_calibrated(found, chosen, workload, label=f"{policy}, simulated", truncate=truncate)
        runs += [sorted(real, key=lambda result: result.span_s)[len(real) // 2], simulated]
        lines += compare_runs(policy, real, simulated)
    return Fidelity(found, tuple(runs), tuple(lines), tuple(stolen), repeated)


def _named(config: EngineConfig, other: EngineConfig) -> EngineConfig:
    """With the other's model, which lies where it says and not where the steps were measured."""
    return replace(config, model=replace(config.model, model=other.model.model))


def distance(measured: Distribution, simulated: Distribution) -> float:
    """The largest gap between two cumulative distributions (Kolmogorov and Smirnov's), 0 to 1."""
    values = np.union1d(measured.values, simulated.values)
    shares = [
        np.concatenate([[0], d.cumulative])[np.searchsorted(d.values, values, side="right")] / max(1, d.count)
        for d in (measured, simulated)
    ]
    return float(np.abs(shares[0] - shares[1]).max()) if len(values) else 0.0
