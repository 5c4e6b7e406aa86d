"""Which engines for prompts, for tokens and for both: the cheapest that keep a service level, or most requests/s.

Every layout is simulated (`sim.disaggregated`). Clusters of mixed engines alone are what layouts with roles are
compared with; these may cut prompts into chunks of several sizes, since small ones are what disaggregation competes
with. `nodes` is placement: with all engines in one group keys and values go by the link between nodes; in groups of a
node each they stay on its faster link, but each node has to have engines of both kinds.

Sources: Splitwise, arXiv 2311.18677, section 5 (pools sized to meet a service level at least cost); DistServe, arXiv
2401.09670, section 4 (goodput searched by simulation over parallelism of each phase; placement by bandwidth).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.model_spec import ModelSpec
from penstock.core.replica_roles import DECODE, MIXED, PREFILL
from penstock.plan.devices import Device
from penstock.plan.simulated import device_plan
from penstock.sim.disaggregated import STORE, Cluster, ClusterRun, EngineLink, EnginePool
from penstock.sim.goodput import Goodput, Trial, find_goodput
from penstock.sim.metrics import Slo, within
from penstock.sim.search import parallel
from penstock.sim.service import SimulatedService
from penstock.sim.workload import Workload

MAX_LAYOUTS = 256


@dataclass(frozen=True, order=True)
class EngineLayout:
    """Engines of each role, devices of one engine of it, and groups of all that (`Cluster.nodes`). `chunk`: tokens of a
    step of mixed engines; 0: the default."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    prefill_degree: int = 1
    decode_degree: int = 1
    mixed_degree: int = 1
    nodes: int = 1
    chunk: int = 0

    @property
    def has_roles(self) -> bool:
        return self.prefill > 0

    @property
    def num_devices(self) -> int:
        of_roles = self.prefill * self.prefill_degree + self.decode * self.decode_degree
        return self.nodes * (of_roles + self.mixed * self.mixed_degree)

    @property
    def label(self) -> str:
        """`2 x (prefill=1 of 2, decode=2, mixed=1)`."""
        parts = []
        for role in (PREFILL, DECODE, MIXED):
            size, degree = getattr(self, role), getattr(self, f"{role}_degree")
            parts += [f"{role}={size}" + (f" of {degree}" if degree > 1 else "")] if size else []
        text = ", ".join(parts) + (f", steps of {self.chunk}" if self.chunk else "")
        return text if self.nodes == 1 else f"{self.nodes} x ({text})"


def layouts(
    devices: int, degrees: Sequence[int] = (1,), *, chunks: Sequence[int] = (0,), nodes: Sequence[int] = (1,),
    pool_of_both: bool = False,
) -> Iterator[EngineLayout]:  # fmt: skip
    """All that use exactly so many devices: mixed engines alone, and those with roles; with `pool_of_both`, also those
    with mixed engines beside them."""
    for degree in degrees:
        if devices % degree == 0:
            yield from (EngineLayout(mixed=devices // degree, mixed_degree=degree, chunk=chunk) for chunk in chunks)
    for groups in (n for n in nodes if devices % n == 0):
        yield from _with_roles(devices // groups, degrees, groups, pool_of_both)


def _with_roles(devices: int, degrees: Sequence[int], nodes: int, pool_of_both: bool) -> Iterator[EngineLayout]:
    for p in degrees:
        for d in degrees:
            for prefill in range(1, devices // p + 1):
                left = devices - p * prefill
                for decode in range(1, left // d + 1):
                    mixed = left - d * decode
                    if mixed == 0 or pool_of_both:
                        yield EngineLayout(prefill, decode, mixed, p, d, 1, nodes)


@dataclass
class Machines:
    """What clusters are made of. `devices`, `prices`: by role, one device per hour. `links`: between nodes, and within
    one; `settings`: of all engines."""

    spec: ModelSpec
    model: str
    devices: Mapping[str, Device]
    prices: Mapping[str, float]
    link: EngineLink = field(default_factory=EngineLink)
    node_link: EngineLink | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    router: str = "least-tokens"
    kind: type[SimulatedService] = SimulatedService
    """What engines are made of; another one may take other times for its steps."""
    _services: dict[tuple[str, str, int, int, bool], SimulatedService] = field(default_factory=dict)

    def cluster(self, layout: EngineLayout, *, reject: str | None = None, slo: Slo | None = None) -> Cluster:
        """Raises ConfigError, CapacityError."""
        pools = []
        for role in (PREFILL, DECODE, MIXED):
            size, degree = getattr(layout, role), getattr(layout, f"{role}_degree")
            if size:
                chunk = layout.chunk if role == MIXED else 0
                service = self._service(role, degree, chunk, layout.has_roles)
                pools.append(EnginePool(role, service, size, degree * self.prices.get(role, 0.0)))
        link = self.link if layout.nodes == 1 or self.node_link is None else self.node_link
        return Cluster(tuple(pools), self.router, link, reject=reject, slo=slo, nodes=layout.nodes)

    def _service(self, role: str, degree: int, chunk: int, has_store: bool) -> SimulatedService:
        device = self.devices[role]
        key = role, device.name, degree, chunk, has_store
        if key not in self._services:
            given = dict(self.settings) | {"model": self.model}
            given |= {"max_num_batched_tokens": chunk} if chunk else {}
            given |= {"kv_offload": STORE} if has_store else {}
            if has_store and role != PREFILL:  # a server has what was handed over in memory before it goes on
                given |= {"kv_load_policy": "wait"}
            config, plan = device_plan(from_kwargs({}, **given), self.spec, parallel(device, degree))
            name = device.name if degree == 1 else f"{degree} x {device.name}"
            self._services[key] = self.kind(name, self.spec, config, plan, device, degree=degree)
        return self._services[key]

    def price(self, layout: EngineLayout) -> float:
        """Of all devices, per hour."""
        prices, of = self.prices, (PREFILL, DECODE, MIXED)
        each = (getattr(layout, r) * getattr(layout, f"{r}_degree") * prices.get(r, 0.0) for r in of)
        return float(layout.nodes * sum(each))


@dataclass(frozen=True)
class Sized:
    """A layout that was simulated. `goodput`: where rates were searched for."""

    layout: EngineLayout
    price: float
    attainment: float
    run: ClusterRun | None = None
    goodput: float | None = None
    trials: tuple[Trial, ...] = ()


def attained(run: ClusterRun, slo: Slo) -> float:
    """Of all requests, refused ones among them, the share that had its times."""
    result = run.result
    return float(within(result, slo).sum()) / max(1, len(result.requests) + sum(result.refused.values()))


def checked(found: Iterable[EngineLayout]) -> list[EngineLayout]:
    """Raises ConfigError for more than anybody waits for, or none."""
    kept = list(dict.fromkeys(found))
    if not 1 <= len(kept) <= MAX_LAYOUTS:
        raise ConfigError(
            f"devices: {len(kept)} layouts, and 1 to {MAX_LAYOUTS} can be tried; give fewer devices or degrees",
            field="devices",
        )
    return kept


def cheapest(
    machines: Machines, tried: Iterable[EngineLayout], workload: Workload, slo: Slo, share: float,
    said: Callable[[Sized], None] | None = None,
) -> Sized | None:  # fmt: skip
    """The first in order of price that attains `share`; of those that cost the same the one that attains most. None if
    none does."""
    best: Sized | None = None
    for layout in sorted(tried, key=lambda one: (machines.price(one), one)):
        price = machines.price(layout)
        if best is not None and price > best.price:
            break
        run = machines.cluster(layout).run(workload)
        found = Sized(layout, price, attained(run, slo), run)
        if said is not None:
            said(found)
        if found.attainment >= share and (best is None or found.attainment > best.attainment):
            best = found
    return best


def goodputs(
    machines: Machines, tried: Iterable[EngineLayout], workload: Workload, slo: Slo, share: float, *,
    tolerance: float = 0.05, said: Callable[[Sized], None] | None = None,
) -> list[Sized]:  # fmt: skip
    """Of each layout the highest rate at which `share` of the requests have their times, the highest first."""
    out = []
    for layout in tried:
        cluster = machines.cluster(layout)

        def run(factor: float, cluster: Cluster = cluster) -> Any:
            return cluster.run(workload.scaled(factor)).result

        found: Goodput = find_goodput(run, slo, attainment=share, tolerance=tolerance)
        best = found.best
        sized = Sized(
            layout, machines.price(layout), 0.0 if best is None else best.attainment,
            goodput=0.0 if best is None else best.rate, trials=found.trials,
        )  # fmt: skip
        out.append(sized)
        if said is not None:
            said(sized)
    return sorted(out, key=lambda one: (-(one.goodput or 0.0), one.layout))


def plain(sized: Sized) -> dict[str, Any]:
    """Fit for JSON."""
    trials = [{"rate": t.rate, "attainment": t.attainment} for t in sized.trials]
    return {
        "layout": sized.layout.label, "devices": sized.layout.num_devices, "per_hour": sized.price,
        "attainment": sized.attainment, "goodput": sized.goodput, "trials": trials,
    }  # fmt: skip


def with_settings(machines: Machines, **more: Any) -> Machines:
    """The same machines, whose engines have these settings besides."""
    return replace(machines, settings=dict(machines.settings) | more, _services={})
