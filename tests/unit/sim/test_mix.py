"""I04: a mix of machines that the solver chose keeps the service level when it is simulated, and is not dearer."""

from __future__ import annotations

import random

import pytest

from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.plan.devices import find_device
from penstock.plan.simulated import device_plan
from penstock.sim.metrics import Slo
from penstock.sim.mix import SizeBucket, parted, planned, profiled, simulated
from penstock.sim.service import SimulatedService
from penstock.sim.specs import find_spec
from penstock.sim.workload import TimedRequest, Workload, from_list

SHORT, LONG = SizeBucket(300, 40), SizeBucket(4000, 200)
PRICES = {"l4": 80, "a100-80g": 200}
"""Cents an hour."""


def service(name: str) -> SimulatedService:
    spec, device = find_spec("llama-3.1-8b"), find_device(name)
    config = from_kwargs({}, model="llama-3.1-8b", max_model_len=8192)
    return SimulatedService(name, spec, *device_plan(config, spec, device), device)


def load(seed: int = 1, requests: int = 240, rate: float = 20.0) -> Workload:
    """One in four is long."""
    rng, now_s, out = random.Random(seed), 0.0, []
    for _ in range(requests):
        now_s += rng.expovariate(rate)
        long = rng.random() < 0.25
        sizes = (rng.randint(2000, 4000), rng.randint(50, 150)) if long else (rng.randint(50, 250), rng.randint(5, 40))
        out.append(TimedRequest(now_s, *sizes))
    return from_list("two sizes", out)


def test_I04_a_simulated_mix_meets_its_service_level_and_costs_no_more_than_one_type() -> None:
    services, slo, asked = {name: service(name) for name in PRICES}, Slo(0.6, 0.12), load()
    buckets, found = (SHORT, LONG), {}
    profiles = profiled(services, asked, buckets, slo, 0.9)
    for names in (("l4", "a100-80g"), ("l4",), ("a100-80g",)):
        mix = planned(profiles, {name: PRICES[name] for name in names}, asked, buckets, headroom=0.8)
        found[names] = simulated(services, mix, asked, buckets, slo)
    both = found["l4", "a100-80g"]
    assert both.attainment >= 0.9, both
    assert set(both.mix.machines) == {"l4", "a100-80g"}
    assert both.mix.cost < min(one.mix.cost for names, one in found.items() if len(names) == 1)
    assert all(one.attainment >= 0.9 for one in found.values())
    assert sum(n for _, n in both.by_type.values()) == 240


def test_a_request_that_fits_no_bucket_is_named() -> None:
    with pytest.raises(ConfigError, match="a request of 5000 and 2 tokens fits none"):
        parted(from_list("one", [TimedRequest(0.0, 5000, 2)]), (SHORT, LONG))
