"""H30: requests that move between simulated engines: nobody is lost, and tails are shorter where loads are skewed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.sim.replicas import Replicas
from penstock.sim.result import SimResult
from penstock.sim.workload import TimedRequest, Workload, from_list
from tests.unit.sim.test_replicas import service

SETTINGS = {"num_gpu_blocks_override": 300, "max_num_seqs": 64, "kv_offload": "disk:/nowhere,400GiB"}


def skewed(seed: int = 1, num: int = 120) -> Workload:
    """Every fourth request is far longer than the others, so who goes round gives all of them to one of four."""
    rng = random.Random(seed)
    requests, now_s = [], 0.0
    for k in range(num):
        now_s += rng.expovariate(7.0)
        long = k % 4 == 0
        requests.append(TimedRequest(now_s, 600 if long else 100, 400 if long else 20))
    return from_list("skewed", requests)


def p99_ttft_s(result: SimResult) -> float:
    columns = result.requests
    return float(np.percentile(columns.first_token_s - columns.arrival_s, 99))


def test_H30_p99_to_the_first_token_is_lower_than_round_robin_on_a_skewed_load() -> None:
    load = skewed()
    found = {
        name: Replicas(service(**SETTINGS), 4, router=router, reschedule_s=every_s).run(load)
        for name, router, every_s in (
            ("round-robin", "round-robin", 0.0), ("moved", "round-robin", 0.1), ("llumnix", "virtual-usage", 0.1),
        )
    }  # fmt: skip
    for result in found.values():
        assert result.requests.num_output.sum() == sum(r.num_output for r in load)
        assert sorted(result.requests.arrival_s) == [r.arrival_s for r in load]
        assert result.failed == 0
    times = {name: p99_ttft_s(result) for name, result in found.items()}
    assert times["moved"] < 0.7 * times["round-robin"]
    assert times["llumnix"] < 0.7 * times["round-robin"]


def test_H30_where_nobody_has_to_move_nothing_changes() -> None:
    """Engines with a folder in common have texts of their own: none finds another's blocks by accident."""
    load = skewed(num=40)
    one, other = (Replicas(service(**SETTINGS), 4, router="virtual-usage", reschedule_s=s).run(load) for s in (0, 0.1))
    assert np.array_equal(one.requests.first_token_s, other.requests.first_token_s)
    assert one.hits == other.hits


def test_H30_without_a_store_nobody_can_move() -> None:
    with pytest.raises(ConfigError, match="keys and values go by a store"):
        Replicas(service(), 2, reschedule_s=1.0).run(skewed(num=4))
