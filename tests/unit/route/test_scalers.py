"""I09: how many engines there should be, by views of whole numbers."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from penstock.base.errors import ConfigError
from penstock.route.scale import SCALERS, make_scaler
from penstock.route.scale.predictive import HoltForecast
from penstock.route.scale.scaler import FleetView, Scaler

S = 1_000_000


def wanted(scaler: Scaler, requests: list[int], view: FleetView, *, arrivals: int = 0) -> list[int]:
    """A look each second; what is wanted is there at the next."""
    found = []
    for second, num in enumerate(requests):
        view = replace(view, now_us=view.now_us + S, requests=num, arrivals=arrivals, ready=view.engines, starting=0)
        size = scaler.decide(view)
        assert (size.engines == view.engines) or size.why, f"nothing is said about a change at {second}"
        view = replace(view, ready=size.engines)
        found.append(size.engines)
    return found


def test_I09_a_rise_is_answered_at_once_and_to_as_many_as_are_needed() -> None:
    scaler = make_scaler("reactive:target=4,up_s=5,down_s=10")
    assert wanted(scaler, [4, 5, 13, 13, 13, 13, 13, 13], FleetView(0, 1, most=8)) == [1, 2, 2, 2, 2, 2, 4, 4]


def test_I09_between_target_and_low_mark_nothing_moves() -> None:
    """Load that swings around a border does not make engines come and go."""
    scaler = make_scaler("reactive:target=10,low=70,down_s=3,up_s=0")
    view = FleetView(0, 3, most=8)
    assert set(wanted(scaler, [15, 29, 18, 30, 15] * 20, view)) == {3}, "14 or fewer would fit in two at 70 percent"
    assert wanted(scaler, [14, 14, 14, 14], view)[-1] == 2


def test_I09_engines_leave_one_by_one_after_a_time_without_a_break() -> None:
    scaler = make_scaler("reactive:target=4,down_s=3")
    assert wanted(scaler, [0] * 10, FleetView(0, 3, least=1, most=8)) == [3, 3, 3, 2, 2, 2, 1, 1, 1, 1]
    scaler = make_scaler("reactive:target=4,down_s=3")
    assert wanted(scaler, [0, 0, 0, 9, 0, 0, 0, 0], FleetView(0, 3, most=8))[-1] == 2, "a break begins it anew"


@pytest.mark.parametrize("name", SCALERS.names())
@pytest.mark.parametrize("seed", range(10))
def test_I09_no_scaler_goes_beyond_the_bounds_and_equal_views_get_equal_answers(name: str, seed: int) -> None:
    rng = random.Random(seed)
    least = rng.randrange(1, 4)
    most = least + rng.randrange(0, 6)
    one, other = make_scaler(name), make_scaler(name)
    view = FleetView(0, rng.randrange(1, 12), least=least, most=most, start_us=20 * S)
    for _ in range(400):
        load = max(0, round(60 * (1 + math.sin(view.now_us / S / 50))) + rng.randrange(-20, 20))
        starting = rng.randrange(0, 2) if view.ready > 1 else 0
        view = replace(
            view, now_us=view.now_us + rng.randrange(1, 4) * S, requests=load, arrivals=rng.randrange(20),
            ready=view.engines - starting, starting=starting,
        )  # fmt: skip
        size = one.decide(view)
        assert size == other.decide(view)
        assert least <= size.engines <= most
        view = replace(view, ready=size.engines, starting=0)


def test_I09_a_rise_that_goes_on_is_answered_before_it_is_there() -> None:
    """Arrivals grow by one request per second every ten seconds; what is there grows with them."""

    def first_two(name: str) -> int:
        scaler, view = make_scaler(name), FleetView(0, 1, most=4, start_us=60 * S)
        for second in range(1, 400):
            view = replace(view, now_us=second * S, requests=second // 20, arrivals=second // 10)
            if scaler.decide(view).engines > 1:
                return second
        raise AssertionError("never")

    reactive, predictive = first_two("reactive:target=10"), first_two("predictive:target=10")
    assert reactive == 220
    assert 50 <= reactive - predictive <= 70, "a start of 60 s before"


def test_I09_the_forecast_is_holts() -> None:
    """Whole numbers against the formulas in floating point."""
    rng, holt = random.Random(1), HoltForecast(30, 10, 10 * S)
    level = trend = None
    holt.see(0, 0)
    for bucket in range(60):
        seen = 40 + 2 * bucket + rng.randrange(-8, 9)
        holt.see((10 * bucket + 5) * S, seen)
        holt.see(10 * (bucket + 1) * S, 0)
        if level is None:
            level, trend = float(seen), 0.0
            continue
        assert trend is not None
        before, level = level, 0.3 * seen + 0.7 * (level + trend)
        trend = 0.1 * (level - before) + 0.9 * trend
    assert level is not None
    then, now = holt.growth(30 * S)
    assert then / now == pytest.approx((level + 3 * trend) / level, rel=1e-3)


def test_I09_before_anything_came_nothing_is_forecast() -> None:
    holt = HoltForecast(30, 10, 10 * S)
    assert holt.growth(60 * S) == (1, 1)
    for second in range(100):
        holt.see(second * S, 0)
    assert holt.growth(60 * S) == (1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nobody", "predictive"), ("reactive:target=0", "at least 1"), ("reactive:speed=3", "no knob"),
        ("reactive:low=101", "at least 0"), ("predictive:alpha=0", "from 1 to 100"), ("reactive:target=x", "not int"),
    ],
)  # fmt: skip
def test_I09_what_makes_no_sense_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_scaler(text)
    assert caught.value.field == "autoscale"
