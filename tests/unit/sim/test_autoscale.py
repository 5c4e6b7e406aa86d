"""I09: simulated engines come and go with the load: nobody is lost, and the answers are in time for fewer of them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.plan.devices import find_device
from penstock.plan.simulated import device_plan
from penstock.sim.autoscale import ScaledReplicas, ScaledRun
from penstock.sim.metrics import Slo, within
from penstock.sim.service import SimulatedService
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import TimedRequest, Workload, from_list
from tests.command import penstock

DAY = synthetic(
    "synthetic:daily?rate=8&peak=15.6&period=120&requests=960&prompt=100&output=16&output_cv=1", seed=1
)  # fmt: skip
SLO = Slo(1.0, 0.15)


@cache
def service() -> SimulatedService:
    spec, device = find_spec("llama-3.1-8b"), find_device("l4")
    config = from_kwargs({}, model="llama-3.1-8b", max_model_len=1024, max_num_seqs=4)
    return SimulatedService("l4", spec, *device_plan(config, spec, device), device)


@cache
def run(scaler: str, least: int, most: int) -> ScaledRun:
    return ScaledReplicas(service(), scaler, least, most, start_s=8.0).run(DAY)


def attained(scaled: ScaledRun) -> float:
    return float(within(scaled.result, SLO).mean())


def test_I09_answers_are_in_time_for_fewer_replica_seconds_than_with_fixed_numbers() -> None:
    """Attainment over replica-seconds: both scalers are above the line between fixed numbers, and the one that looks
    ahead above the one that does not."""
    fixed = [run("fixed", n, n) for n in (3, 4)]
    cost, good = [f.replica_s for f in fixed], [attained(f) for f in fixed]
    assert good[0] < 0.8 < 0.95 < good[1]
    found = {name: run(f"{name}:target=5,down_s=10", 1, 6) for name in ("reactive", "predictive")}
    for scaled in found.values():
        assert cost[0] < scaled.replica_s < cost[1]
        assert attained(scaled) > np.interp(scaled.replica_s, cost, good) + 0.1
    assert attained(found["predictive"]) > attained(found["reactive"])


@pytest.mark.parametrize("scaler", ["reactive:target=5,down_s=10", "predictive:target=5,down_s=10"])
def test_I09_nobody_is_lost_and_it_all_happens_again(scaler: str) -> None:
    scaled, again = run(scaler, 1, 6), ScaledReplicas(service(), scaler, 1, 6, start_s=8.0).run(DAY)
    assert scaled.result.requests.num_output.sum() == sum(r.num_output for r in DAY)
    assert not np.isnan(scaled.result.requests.finish_s).any()
    assert (scaled.result.failed, scaled.result.refused) == (0, {})
    assert scaled.steps == again.steps
    assert scaled.replica_s == again.replica_s
    assert np.array_equal(scaled.result.requests.finish_s, again.result.requests.finish_s)
    ups, downs = ([s for s in scaled.steps if (s.wanted > s.had) == up] for up in (True, False))
    assert ups
    assert downs, "engines came and went"
    assert all(step.why for step in scaled.steps)
    assert scaled.most <= 6


def test_I09_a_fixed_number_costs_what_it_is() -> None:
    scaled = run("fixed", 3, 3)
    span_s = float(scaled.result.requests.finish_s.max())
    assert scaled.steps == ()
    assert 3 * span_s <= scaled.replica_s <= 3 * (span_s + 1), "looks are a second apart"


def bunch(at_s: float, count: int, num_output: int) -> list[TimedRequest]:
    return [TimedRequest(at_s, 100, num_output) for _ in range(count)]


def ran(load: Workload, scaler: str, least: int, most: int, start_s: float) -> ScaledRun:
    return ScaledReplicas(service(), scaler, least, most, start_s).run(load)


def test_I09_an_engine_is_given_nothing_before_it_is_ready() -> None:
    """One more is ordered at the first look; until it is there everybody goes to the first."""
    load = from_list("rush", [*bunch(0.5, 8, 200), *bunch(5.0, 4, 10), *bunch(11.5, 4, 10)])
    scaled = ran(load, "reactive:target=4,up_s=0,down_s=100", 1, 2, 10.0)
    assert [(s.at_s, s.had, s.wanted) for s in scaled.steps] == [(1.0, 1, 2)]
    first_s = scaled.result.requests.first_token_s - scaled.result.requests.arrival_s
    assert min(first_s[8:12]) > 2, "the first has no place for more than four"
    assert max(first_s[12:]) < 1, "the second is ready at 11 s"


def test_I09_an_engine_that_is_drained_ends_what_it_has_and_costs_until_then() -> None:
    load = from_list("ebb", [*bunch(0.5, 5, 40), TimedRequest(0.6, 100, 400), *bunch(20.0, 3, 4)])
    scaled = ran(load, "reactive:target=4,up_s=0,down_s=2,low=100", 1, 2, 0.0)
    assert [s.wanted for s in scaled.steps] == [2, 1]
    finish_s = scaled.result.requests.finish_s
    assert scaled.result.requests.num_output.sum() == 5 * 40 + 400 + 12
    ended_s = float(finish_s.max())
    drained_s = scaled.replica_s - np.ceil(ended_s)  # the first is there all the time, the other from 1 s on
    assert scaled.steps[1].at_s - 1 < drained_s < ended_s


def test_I09_bounds_and_ranges_that_make_no_sense_are_refused() -> None:
    for least, most in ((3, 2), (0, 2), (1, 5000)):
        with pytest.raises(ConfigError, match="smaller number first") as caught:
            ScaledReplicas(service(), "fixed", least, most).run(DAY)
        assert caught.value.field == "replicas"


def test_I09_the_command_scales_and_says_so() -> None:
    load = ["--trace", "synthetic:constant?rate=12&requests=60&prompt=50&output=8", "--device", "l4",
            "--max-model-len", "1024"]  # fmt: skip
    done = penstock("sim", *load, "--max-num-seqs", "2", "--replicas", "1..3", "--autoscale",
                    "reactive:target=2,up_s=0", "--start-s", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 -> 3 engines" in done.stdout
    assert "replica-seconds" in done.stdout
    for wrong, said in (
        (["--replicas", "1..3"], "--autoscale goes with a range"),
        (["--replicas", "3", "--autoscale", "fixed"], "--autoscale goes with a range"),
        (["--replicas", "3..1", "--autoscale", "fixed"], "smaller number first"),
        (["--replicas", "1..3", "--autoscale", "magic"], "predictive"),
    ):
        done = penstock("sim", *load, *wrong)
        assert done.returncode != 0
        assert said in done.stderr, done.stderr
