"""What is measured, against values worked out by hand and processes of known truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.measure.cost import PRICES, Price, cost, find_price
from penstock.measure.energy import (
    POWERS,
    ModelMeter,
    Power,
    RaplMeter,
    energy,
    find_carbon,
    find_meter,
    find_power,
    modelled_j,
)
from penstock.measure.latency import decomposition, slowdown_classes
from penstock.measure.search import NoLimitError, backlog_growth, highest
from penstock.measure.steady import buckets, mser, rates, steady_window

# -- the steady part ---------------------------------------------------------------------------------------------


def run_with_ends(seed: int) -> np.ndarray:
    """200 buckets: 40 in which a system warms up, 120 at 100 +- 5, 40 in which it runs empty."""
    rng = np.random.default_rng(seed)
    body = 100 + rng.normal(0, 5, 120)
    return np.concatenate([np.linspace(0, 95, 40), body, np.linspace(95, 0, 40)])


@pytest.mark.parametrize("seed", range(5))
def test_K04_the_steady_window_leaves_out_warm_up_and_drain(seed: int) -> None:
    tokens = run_with_ends(seed)
    window = steady_window(tokens, 0.5, last_first_s=80.0)
    assert window is not None
    assert window.settled
    assert 15.0 <= window.start_s <= 25.0  # it warms up until 20 s
    assert window.end_s == 80.0
    inside = tokens[round(window.start_s / 0.5) : 160].sum() / window.span_s
    assert inside == pytest.approx(200, rel=0.02)
    assert tokens.sum() / 100 < 170  # what the whole run would have said


def test_K04_a_run_that_only_grows_is_told_as_never_settled() -> None:
    window = steady_window(np.arange(200.0), 1.0, last_first_s=200.0)
    assert window is not None
    assert not window.settled
    assert mser(np.ones(10)) == (0, True)  # too few to tell
    assert steady_window(np.ones(10), 1.0, last_first_s=0.5) is None


def test_K04_rates_of_the_window_are_of_what_came_in_it() -> None:
    window = steady_window(np.full(10, 7.0), 1.0, last_first_s=8.0, warmup_s=2.0)
    assert window is not None
    assert (window.start_s, window.end_s) == (2.0, 8.0)
    first, finish = np.array([1.0, 2.0, 5.0, 7.9]), np.array([2.5, 8.0, 7.0, np.nan])
    found = rates(window, 42.0, first, np.array([100.0, 10.0, 20.0, 30.0]), finish)
    assert found["input_tokens_per_s"] == 60 / 6
    assert found["output_tokens_per_s"] == 7.0
    assert found["total_tokens_per_s"] == 17.0
    assert found["requests_per_s"] == 2 / 6
    assert found["settled"]
    assert not rates(window, 42.0, first, np.ones(4), np.full(4, 9.0))["settled"]
    assert rates(None, 0.0, first, first, finish)["output_tokens_per_s"] is None


def test_buckets_keep_what_comes() -> None:
    times, amounts = np.array([0.0, 0.4, 9.99, 10.0]), np.array([1.0, 2.0, 3.0, 4.0])
    tokens, width_s = buckets(times, amounts, 10.0, num=20)
    assert (tokens[0], tokens[-1], tokens.sum(), width_s) == (3.0, 7.0, 10.0, 0.5)


# -- latency -----------------------------------------------------------------------------------------------------


def test_K03_the_residual_is_nothing_for_equal_speeds_and_something_where_long_answers_are_slower() -> None:
    num, ttft = np.array([5, 11, 101]), np.array([0.1, 0.2, 0.3])
    found = decomposition(ttft, ttft + 0.02 * (num - 1), num)
    assert found["residual"] == pytest.approx(0, abs=1e-12)
    mean = float((ttft + 0.02 * (num - 1)).mean())
    assert found["residual_all_tokens"] == pytest.approx(-0.02 / mean)
    slow = decomposition(ttft, ttft + np.array([0.02, 0.02, 0.06]) * (num - 1), num)
    assert slow["tpot_s"] == pytest.approx(0.1 / 3)
    jct = [0.1 + 0.08, 0.2 + 0.2, 0.3 + 6.0]
    predicted = 0.2 + 0.1 / 3 * (4 + 10 + 100) / 3
    assert slow["residual"] == pytest.approx((sum(jct) / 3 - predicted) / (sum(jct) / 3))
    assert slow["residual"] > 0.3
    assert decomposition(np.array([np.nan]), np.array([np.nan]), np.array([3]))["residual"] is None


def test_K06_slowdown_is_told_by_class_of_size() -> None:
    size = np.arange(1, 101)
    alone = size / 10.0
    slow = np.where(size <= 25, 4.0, 1.5)
    classes = slowdown_classes(size, alone * slow, alone)
    assert [(c["from_tokens"], c["to_tokens"], c["requests"]) for c in classes] == [
        (1, 25, 25), (26, 50, 25), (51, 75, 25), (76, 100, 25)
    ]  # fmt: skip
    assert [c["mean"] for c in classes] == pytest.approx([4.0, 1.5, 1.5, 1.5])
    assert classes[3]["mean_jct_s"] == pytest.approx(8.8 * 1.5)
    odd = np.where(size == 100, 9.0, 1.0)
    assert [c["p99"] for c in slowdown_classes(size, alone * odd, alone)] == pytest.approx([1, 1, 1, 9.0])
    (one,) = slowdown_classes(np.full(9, 7), np.ones(9), np.full(9, 0.5))
    assert (one["from_tokens"], one["requests"], one["mean"]) == (7, 9, 2.0)
    assert slowdown_classes(size, np.full(100, np.nan), alone) == []


# -- searching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.01, 0.9, 1.0, 7.3, 300.0])
@pytest.mark.parametrize("start", [0.5, 4.0])
def test_K04_the_highest_rate_is_found(limit: float, start: float) -> None:
    found = highest(lambda rate: rate <= limit, start=start, tolerance=0.05)
    assert found is not None
    assert found <= limit < found * 1.05 * 1.0001
    assert highest(lambda rate: False) is None
    with pytest.raises(NoLimitError):
        highest(lambda rate: True)


@pytest.mark.parametrize("load", [0.5, 0.8, 1.25, 2.0])
def test_K04_a_queue_that_grows_is_told_from_one_at_rest(load: float) -> None:
    """One server, Poisson arrivals: in an overload 1 - 1/load of what arrives stays behind."""
    rng = np.random.default_rng(2)
    arrival = np.cumsum(rng.exponential(1 / load, 1500))
    finish, free = [], 0.0
    for at in arrival:
        free = max(free, at) + 1.0
        finish.append(free)
    growth = backlog_growth(arrival, np.array(finish))
    assert growth == pytest.approx(max(0.0, 1 - 1 / load), abs=0.06)
    assert backlog_growth(arrival[:7], arrival[:7]) == 0.0


# -- money -------------------------------------------------------------------------------------------------------


def test_K09_prices_of_input_and_output_follow_the_time_of_the_phases() -> None:
    price = Price(per_hour=3.6, source="test")
    found = cost(price, 1000.0, (100.0, 300.0), 2_000_000, 500_000)
    assert found["cost"] == pytest.approx(1.0)
    assert found["input_share"] == 0.25
    assert found["per_million_input"] == pytest.approx(0.125)
    assert found["per_million_output"] == pytest.approx(1.5)
    assert found["per_million_tokens"] == pytest.approx(0.4)
    assert found["output_tokens_per_unit"] == pytest.approx(500_000)
    parts = found["per_million_input"] * 2 + found["per_million_output"] * 0.5
    assert parts == pytest.approx(found["cost"])
    alike = cost(price, 1000.0, None, 300_000, 100_000)
    assert alike["per_million_input"] == pytest.approx(alike["per_million_output"])
    assert alike["split_by"] == "tokens"
    assert cost(price, 10.0, (1.0, 1.0), 0, 0)["per_million_output"] is None


def test_K09_prices_are_declared_with_their_source_in_the_table_or_in_a_file(tmp_path: Path) -> None:
    assert all(price.source for price in PRICES.values())
    assert find_price("0.35").per_hour == 0.35
    assert find_price("l4") is PRICES["l4"]
    path = tmp_path / "mine.toml"
    path.write_text('[a]\nper_hour = 2.5\ncurrency = "EUR"\nsource = "the bill"\n')
    assert find_price(str(path)) == Price(per_hour=2.5, currency="EUR", source="the bill")
    path.write_text(path.read_text() + '[b]\nper_hour = 1\nsource = "x"\n')
    assert find_price(f"{path}#b").per_hour == 1.0
    for given, said in (
        (str(path), "with one of a, b"), (f"{path}#c", "with one of a, b"), ("h1000", "none of"), ("-1", "above 0"),
        ("nan", "above 0"), (str(tmp_path / "no.toml"), "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            find_price(given)
    for text in ("", "[a]\nper_hour = 1\n", "a = 1\n", '[a]\nper_hour = "x"\nsource = "y"\n', "[a\n",
                 '[a]\nper_hour = 1\nsource = "y"\nmore = 2\n'):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ConfigError, match="machine_price: "):
            find_price(str(path))


# -- energy ------------------------------------------------------------------------------------------------------


def powercap(root: Path, zones: dict[str, tuple[str, int, int]]) -> Path:
    """A tree such as the kernel's: folder -> (name, microjoules, range)."""
    for folder, (name, uj, range_uj) in zones.items():
        at = root / folder
        at.mkdir(parents=True, exist_ok=True)
        (at / "name").write_text(name + "\n")
        (at / "energy_uj").write_text(f"{uj}\n")
        (at / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return root


def test_K10_rapl_is_the_sum_of_packages_and_memory_and_survives_a_wrap(tmp_path: Path) -> None:
    zones = {
        "intel-rapl:0": ("package-0", 900, 1000), "intel-rapl:0:0": ("core", 7, 1000),
        "intel-rapl:0:1": ("dram", 10, 1000), "intel-rapl:1": ("psys", 5, 1000), "intel-rapl:2": ("package-1", 0, 1000),
    }  # fmt: skip
    meter = RaplMeter.find(powercap(tmp_path, zones))
    assert meter is not None
    assert meter.joules(1.0, 1.0) == 0.0
    powercap(tmp_path, {"intel-rapl:0": ("package-0", 950, 1000), "intel-rapl:0:0": ("core", 999, 1000)})
    assert meter.joules(1.0, 1.0) == pytest.approx(50e-6)
    powercap(tmp_path, {"intel-rapl:0": ("package-0", 20, 1000), "intel-rapl:0:1": ("dram", 15, 1000)})
    assert meter.joules(1.0, 1.0) == pytest.approx((50 + 70 + 5) * 1e-6)
    assert meter.source == "rapl"


def test_K10_without_readable_counters_a_model_says_that_it_is_one(tmp_path: Path) -> None:
    assert RaplMeter.find(tmp_path / "nothing") is None
    meter = find_meter(None, tmp_path / "nothing")
    assert meter.source == "model"
    assert "estimate" in meter.about
    assert find_meter("30:130", tmp_path).joules(10.0, 4.0) == pytest.approx(30 * 10 + 100 * 4)
    assert modelled_j(Power(1.0, 2.0, ""), 5.0, 9.0) == 10.0  # busy for longer than there was
    zones = {"intel-rapl:0": ("package-0", 900, 1000)}
    assert find_meter(None, powercap(tmp_path / "a", zones)).source == "rapl"
    assert find_meter("l4", tmp_path / "a").source == "model"  # who gives watts means them
    with pytest.raises(ConfigError, match="rapl cannot be read here"):
        find_meter("rapl", tmp_path / "nothing")
    for wrong in ("30", "x:y", "5:1", "-1:3", "1:inf", "nothing"):
        with pytest.raises(ConfigError, match="IDLE:LOAD"):
            find_power(wrong)
    assert all(power.source and power.idle_w < power.load_w for power in POWERS.values())
    assert ModelMeter(Power(1, 2, "w")).about == "1 W idle, 2 W at work (w)"


def test_K10_carbon_is_energy_times_the_intensity_of_the_grid() -> None:
    found = energy(3.6e6, "model", "", 900, 100, find_carbon("250"))
    assert found["grams_co2"] == pytest.approx(250)
    assert found["grams_co2_per_output_token"] == pytest.approx(2.5)
    assert found["joules_per_output_token"] == pytest.approx(36_000)
    assert found["joules_per_token"] == pytest.approx(3_600)
    assert find_carbon("world")[0] == 480
    assert energy(1.0, "rapl", "", 0, 0, (0.0, ""))["joules_per_token"] is None
    with pytest.raises(ConfigError, match="grams per kWh"):
        find_carbon("green")
