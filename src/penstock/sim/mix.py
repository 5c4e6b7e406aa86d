"""A mix of machines that was chosen by loads (`plan.gpu_mix`), simulated: does it keep the service level?

What a type of machine serves of a bucket at most is found by simulating it with requests of that size alone. The mix
then serves the whole workload: each bucket's requests go to types in the shares that the solver gave them, and within a
type to whoever has fewest tokens.

Source: Melange, Griggs et al., arXiv 2404.14527, sections 5.2 and 5.4 (profiles of throughput within the service level;
buckets shared out among machines).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.replica_roles import MIXED
from penstock.plan.gpu_mix import MachineMix, MixBucket, cheapest_mix, sliced
from penstock.sim.disaggregated import Cluster, EnginePool
from penstock.sim.goodput import find_goodput
from penstock.sim.metrics import Slo
from penstock.sim.result import SimResult
from penstock.sim.service import SimulatedService
from penstock.sim.sizing import attained
from penstock.sim.workload import TimedRequest, Workload, from_list

HOUR_S = 3600


@dataclass(frozen=True)
class SizeBucket:
    """Requests of up to so many tokens of prompt and answer; a request is of the first bucket that it fits."""

    prompt: int
    output: int

    def holds(self, request: TimedRequest) -> bool:
        return request.num_prompt <= self.prompt and request.num_output <= self.output


@dataclass(frozen=True)
class SimulatedMix:
    """`attainment`: of all requests of the workload; `by_type`: of those that each type had, and how many they were."""

    mix: MachineMix
    attainment: float
    by_type: dict[str, tuple[float, int]]


def parted(workload: Workload, buckets: Sequence[SizeBucket]) -> list[list[TimedRequest]]:
    """Requests by bucket. Raises ConfigError for one that fits none."""
    out: list[list[TimedRequest]] = [[] for _ in buckets]
    for request in workload:
        fits = (number for number, bucket in enumerate(buckets) if bucket.holds(request))
        number = next(fits, None)
        if number is None:
            raise ConfigError(
                f"buckets: a request of {request.num_prompt} and {request.num_output} tokens fits none; add a larger",
                field="buckets",
            )
        out[number].append(request)
    return out


def most_per_hour(service: SimulatedService, requests: Sequence[TimedRequest], slo: Slo, share: float) -> int:
    """Requests of one bucket that one machine serves within the limits; 0: it cannot serve them in time at all."""
    if len(requests) < 2:
        return 0
    load = from_list("bucket", requests)

    def run(factor: float) -> SimResult:
        return service.run(load.scaled(factor))

    best = find_goodput(run, slo, attainment=share, tolerance=0.1).best
    return 0 if best is None else int(best.rate * HOUR_S)


def profiled(
    services: Mapping[str, SimulatedService], workload: Workload, buckets: Sequence[SizeBucket], slo: Slo, share: float
) -> list[dict[str, int]]:
    """Of each bucket, requests per hour that a machine of each type serves within the limits."""
    parts = parted(workload, buckets)
    return [{name: most_per_hour(one, part, slo, share) for name, one in services.items()} for part in parts]


def planned(
    profiles: Sequence[Mapping[str, int]], prices: Mapping[str, int], workload: Workload, buckets: Sequence[SizeBucket],
    *, slices: int = 4, headroom: float = 1.0,
) -> MachineMix:  # fmt: skip
    """The cheapest mix of types that have a price, by what each serves. `headroom`: of a machine's rate, what may be
    used.

    Raises CapacityError for a bucket that no type serves in time."""
    parts = parted(workload, buckets)
    span_s = max(r.arrival_s for part in parts for r in part) or 1.0
    loads: list[MixBucket] = []
    for part, most in zip(parts, profiles, strict=True):
        usable = {name: int(headroom * rate) for name, rate in most.items() if name in prices}
        loads.append(sliced(max(1, round(len(part) * HOUR_S / span_s)), usable, slices))
    return cheapest_mix(loads, prices)


def simulated(
    services: Mapping[str, SimulatedService],
    mix: MachineMix,
    workload: Workload,
    buckets: Sequence[SizeBucket],
    slo: Slo,
) -> SimulatedMix:
    """The workload on the machines of the mix."""
    shares: dict[str, list[TimedRequest]] = {name: [] for name in mix.machines}
    for part, given in zip(parted(workload, buckets), mix.given, strict=True):
        turn = _in_turn(given)
        for request in part:
            shares[turn()].append(request)
    by_type, good = {}, 0.0
    for name, part in shares.items():
        if not part:
            continue
        load = from_list(name, sorted(part, key=lambda r: r.arrival_s), block_tokens=workload.block_tokens)
        run = Cluster((EnginePool(MIXED, services[name], mix.machines[name]),)).run(load)
        by_type[name] = attained(run, slo), len(part)
        good += by_type[name][0] * len(part)
    return SimulatedMix(mix, good / max(1, sum(n for _, n in by_type.values())), by_type)


def _in_turn(given: Mapping[str, int]) -> Callable[[], str]:
    """Types by their slices, as evenly as can be: whoever is furthest behind its share is next."""
    names, had = sorted(given), dict.fromkeys(given, 0)
    total = sum(given.values())

    def turn() -> str:
        count = sum(had.values()) + 1
        chosen = max(names, key=lambda name: given[name] * count / total - had[name])
        had[chosen] += 1
        return chosen

    return turn


def plain(found: SimulatedMix) -> dict[str, Any]:
    """Fit for JSON."""
    return {
        "machines": found.mix.machines, "cost": found.mix.cost, "attainment": round(found.attainment, 4),
        "by_type": {name: {"attainment": round(a, 4), "requests": n} for name, (a, n) in found.by_type.items()},
        "given": [dict(given) for given in found.mix.given],
    }  # fmt: skip
