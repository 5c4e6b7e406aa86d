"""Engines on machines that may be taken away, spread over zones, with others that stay when those are short.

Source: SkyServe (SpotHedge), Mao et al., EuroSys 2025, arXiv 2411.01438, section 3: spot engines go to zones that have
not taken any away lately, more of them run than are needed, and machines on demand stand in for those that are missing.

Time goes in steps (a minute, say). Whole numbers, and one seeded market.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Market = Sequence[Sequence[int]]
"""[step][zone]: spot machines that the zone has for us."""
Policy = Callable[["SpotFleet"], None]
"""Orders and gives back machines, once a step."""


def market(
    seed: int, *, regions: int = 3, zones: int = 3, steps: int = 2880, most: int = 8,
    shortage: float = 0.004, region_share: float = 0.5, lasts: float = 120.0,
) -> Market:  # fmt: skip
    """Capacity of `regions * zones` zones. Shortages begin with a chance of `shortage` for each zone and step, and a
    share of them take the whole region: so zones of a region fail together. They last `lasts` steps on average."""
    rng, num = random.Random(seed), regions * zones
    until, found = [0] * num, []
    level = [rng.randrange(most // 2, most + 1) for _ in range(num)]
    for step in range(steps):
        for zone in range(num):
            if rng.random() < shortage:
                end = step + 1 + int(rng.expovariate(1 / lasts))
                together = rng.random() < region_share
                for one in range(num):
                    if one == zone or (together and one // zones == zone // zones):
                        until[one] = max(until[one], end)
        found.append([0 if step < until[z] else level[z] for z in range(num)])
    return found


@dataclass
class Rented:
    """`zone` None: on demand, and never taken away. It works from `ready` on."""

    zone: int | None
    ready: int


@dataclass
class SpotFleet:
    """What a policy sees and does. `needed`: engines that have to work. `start`: steps from an order to ready."""

    needed: int
    start: int
    num_zones: int
    step: int = 0
    machines: list[Rented] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    """Zones that took a machine away in this step, or had none for an order."""
    capacity: Sequence[int] = ()

    def ready(self, *, spot: bool) -> int:
        return sum((m.zone is not None) == spot and m.ready <= self.step for m in self.machines)

    def count(self, *, spot: bool, zone: int | None = None) -> int:
        return sum((m.zone is not None) == spot and zone in (None, m.zone) for m in self.machines)

    def order(self, zone: int | None) -> bool:
        """A machine of a zone, or on demand; False if the zone has none."""
        if zone is not None and self.count(spot=True, zone=zone) >= self.capacity[zone]:
            self.taken.append(zone)
            return False
        self.machines.append(Rented(zone, self.step + self.start))
        return True

    def give_back(self, *, spot: bool, num: int) -> None:
        """The last ones first."""
        for machine in [m for m in reversed(self.machines) if (m.zone is not None) == spot][:num]:
            self.machines.remove(machine)

    def advance(self, capacity: Sequence[int]) -> None:
        """The zones take what they no longer have."""
        self.capacity, self.taken = capacity, []
        for zone, most in enumerate(capacity):
            over = self.count(spot=True, zone=zone) - most
            for machine in [m for m in self.machines if m.zone == zone][: max(0, over)]:
                self.machines.remove(machine)
                self.taken.append(zone)


def on_demand_only(fleet: SpotFleet) -> None:
    while fleet.count(spot=False) < fleet.needed:
        fleet.order(None)


def spot_only(extra: int = 2) -> Policy:
    """As many and `extra`, spread evenly over all zones, whatever happened there."""

    def act(fleet: SpotFleet) -> None:
        for zone in sorted(range(fleet.num_zones), key=lambda z: fleet.count(spot=True, zone=z)):
            if fleet.count(spot=True) < fleet.needed + extra and zone not in fleet.taken:
                fleet.order(zone)

    return act


class SpotHedge:
    """`extra` more spot engines than are needed, in zones that took none away lately; while spot engines that work are
    short of that, as many on demand stand in, at most those that are needed."""

    def __init__(self, extra: int = 2) -> None:
        self._extra = extra
        self._shunned: list[int] = []

    def __call__(self, fleet: SpotFleet) -> None:
        self._shun(fleet)
        tried = set(fleet.taken)
        while fleet.count(spot=True) < fleet.needed + self._extra:
            free = [z for z in range(fleet.num_zones) if z not in self._shunned and z not in tried]
            if not free:
                break
            zone = min(free, key=lambda z: (fleet.count(spot=True, zone=z), z))
            if not fleet.order(zone):
                tried.add(zone)
        self._shun(fleet)
        wanted = min(fleet.needed, max(0, fleet.needed + self._extra - fleet.ready(spot=True)))
        have = fleet.count(spot=False)
        for _ in range(wanted - have):
            fleet.order(None)
        fleet.give_back(spot=False, num=have - wanted)

    def _shun(self, fleet: SpotFleet) -> None:
        """The paper's list of zones that pre-empt; with fewer than two others left, all are tried again."""
        self._shunned += [z for z in dict.fromkeys(fleet.taken) if z not in self._shunned]
        if fleet.num_zones - len(self._shunned) < 2:
            self._shunned = []


@dataclass(frozen=True)
class SpotBill:
    """`available`: share of the steps in which enough engines worked. `cost`: machine steps at their prices.
    `taken`: machines that were taken away, or not there when ordered."""

    available: float
    cost: float
    taken: int


def rent(policy: Policy, course: Market, *, needed: int, start: int = 3, on_demand_price: float = 3.0) -> SpotBill:
    """A policy on a market; a spot machine costs 1 for a step. The start of all does not count as missing."""
    fleet = SpotFleet(needed, start, len(course[0]))
    enough = taken = 0
    cost = 0.0
    for step, capacity in enumerate(course):
        fleet.step = step
        fleet.advance(capacity)
        policy(fleet)
        taken += len(fleet.taken)
        enough += step < start or fleet.ready(spot=True) + fleet.ready(spot=False) >= needed
        cost += fleet.count(spot=True) + on_demand_price * fleet.count(spot=False)
    return SpotBill(enough / len(course), cost, taken)
