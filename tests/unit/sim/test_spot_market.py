"""I02: engines on spot machines over zones, with machines on demand where those are short."""

from __future__ import annotations

from statistics import mean

import pytest

from penstock.sim.spot_market import (
    SpotBill,
    SpotFleet,
    SpotHedge,
    market,
    on_demand_only,
    rent,
    spot_only,
)

NEEDED = 6
SEEDS = range(3)


def bills(seed: int) -> dict[str, SpotBill]:
    course = market(seed)
    each = {"on demand": on_demand_only, "spot": spot_only(), "hedge": SpotHedge()}
    return {name: rent(policy, course, needed=NEEDED) for name, policy in each.items()}


def test_I02_available_as_on_demand_and_far_cheaper_where_zones_fail_together() -> None:
    found = [bills(seed) for seed in SEEDS]
    for one in found:
        assert one["on demand"].available == 1.0
        assert one["hedge"].available >= one["spot"].available
        assert one["hedge"].cost < one["on demand"].cost
    hedge, spot, demand = ([one[name] for one in found] for name in ("hedge", "spot", "on demand"))
    assert 1 - mean(b.available for b in hedge) < 0.25 * (1 - mean(b.available for b in spot))
    assert mean(b.cost for b in hedge) < 0.6 * mean(b.cost for b in demand)


def test_I02_zones_of_a_region_fail_together() -> None:
    course = market(1, regions=2, zones=2, steps=20_000)
    down = [[capacity[z] == 0 for capacity in course] for z in range(4)]

    def both(a: int, b: int) -> float:
        return mean(x and y for x, y in zip(down[a], down[b], strict=True)) / (mean(down[a]) * mean(down[b]))

    assert min(both(0, 1), both(2, 3)) > 1.5 * max(both(0, 2), both(1, 3))


def test_I02_in_a_calm_market_nothing_is_on_demand_but_at_the_start() -> None:
    bill = rent(SpotHedge(extra=1), [[9] * 4] * 100, needed=4, start=3)
    assert bill == SpotBill(1.0, 100 * 5 + 3 * 3 * 4, 0)


def test_I02_without_spot_machines_it_is_on_demand() -> None:
    nothing = [[0] * 4] * 50
    assert rent(SpotHedge(), nothing, needed=4).cost == rent(on_demand_only, nothing, needed=4).cost
    assert rent(SpotHedge(), nothing, needed=4).available == 1.0
    assert rent(spot_only(), nothing, needed=4).available == pytest.approx(3 / 50)


def test_I02_a_zone_that_took_machines_is_left_alone_until_few_others_are_left() -> None:
    hedge, fleet = SpotHedge(extra=0), SpotFleet(needed=3, start=0, num_zones=4)
    fleet.advance([9, 9, 9, 9])
    hedge(fleet)
    assert sorted(m.zone for m in fleet.machines if m.zone is not None) == [0, 1, 2]
    for gone, then in (([0, 9, 9, 9], [1, 2, 3]), ([9, 0, 9, 9], [2, 2, 3])):
        fleet.step += 1
        fleet.advance(gone)
        hedge(fleet)
        assert sorted(m.zone for m in fleet.machines if m.zone is not None) == then
    fleet.step += 1
    fleet.advance([9, 9, 0, 9])  # one is left: all are tried again
    hedge(fleet)
    assert 0 in [m.zone for m in fleet.machines]


def test_I02_on_demand_machines_leave_when_spot_ones_work_again() -> None:
    hedge, fleet = SpotHedge(extra=0), SpotFleet(needed=2, start=2, num_zones=2)
    seen = []
    for step, capacity in enumerate([[0, 0], [0, 0], [2, 2], [2, 2], [2, 2], [2, 2]]):
        fleet.step = step
        fleet.advance(capacity)
        hedge(fleet)
        seen.append((fleet.count(spot=True), fleet.count(spot=False)))
    assert seen == [(0, 2), (0, 2), (2, 2), (2, 2), (2, 0), (2, 0)]
