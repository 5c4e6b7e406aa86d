"""Quality of experience: its formula against sums by hand and against plain integration, and the client's pacer."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest

from penstock.base.errors import InputError
from penstock.core.qoe import Delivery, Expected, TokenPacer, quality

READER = Expected(ttft_s=1.0, tds=5.0)
GAP_S = 0.2


def on_time(n: int, late_s: float = 0.0, slower: float = 1.0) -> list[float]:
    return [1.0 + late_s + slower * GAP_S * j for j in range(n)]


def shown(times_s: list[float], tds: float) -> list[float]:
    pacer = TokenPacer(tds)
    return [pacer.push(t) for t in times_s]


def area(times_s: list[float], end_s: float) -> float:
    """Below the number of tokens shown over time: each is a strip from its time on."""
    return sum(max(0.0, end_s - t) for t in times_s)


def by_hand(times_s: list[float], reader: Expected) -> float:
    """The paper's ratio, by strips: both timelines to the end of the later one."""
    n = len(times_s)
    expected = [reader.ttft_s + j / reader.tds for j in range(n)]
    actual = shown(times_s, reader.tds)
    end_s = max(actual[-1], expected[-1]) + 1 / reader.tds
    return min(1.0, area(actual, end_s) / area(expected, end_s))


@pytest.mark.parametrize("n", [1, 2, 30])
def test_K07_perfect_is_1_and_nothing_beyond_it(n: int) -> None:
    assert quality(on_time(n), READER) == pytest.approx(1.0)
    assert quality([0.01 * j for j in range(n)], READER) == 1.0, "faster than anybody reads is as good as perfect"
    assert quality([1.0] * n, READER) == pytest.approx(1.0), "all at once: the pacer shows them one by one"
    assert quality([], READER) == 0.0


@pytest.mark.parametrize("n", [1, 5, 100])
@pytest.mark.parametrize("late_s", [0.1, 2.0, 60.0])
def test_K07_a_late_start_costs_what_the_formula_says(n: int, late_s: float) -> None:
    assert quality(on_time(n, late_s), READER) == pytest.approx(1 / (1 + 2 * late_s * 5.0 / (n + 1)))
    assert quality(on_time(n, late_s), READER) > quality(on_time(n, 2 * late_s), READER)


def test_K07_a_slow_stream_costs_the_more_the_slower_it_is() -> None:
    found = [quality(on_time(50, slower=slower), READER) for slower in (1.0, 1.25, 2.0, 4.0)]
    assert found == sorted(found, reverse=True)
    # At half the speed the reader has had half of it, all along: 49 gaps of 0.4 s against 49 of 0.2 s and a wait.
    end_s = 49 * 0.4 + GAP_S
    assert found[2] == pytest.approx((50 * end_s - 0.4 * 49 * 25) / (50 * end_s - 0.2 * 49 * 25))
    assert found[3] < 0.6 < found[2] < 0.8


def test_K07_a_stall_costs_only_what_was_not_ahead() -> None:
    ahead = [0.5] * 20 + [1.0 + 20 * GAP_S + GAP_S * j for j in range(20)]
    assert quality(ahead, READER) == pytest.approx(1.0), "there was enough to read meanwhile"
    early, late = on_time(40), on_time(40)
    for j in range(5, 40):
        early[j] += 3.0
    for j in range(30, 40):
        late[j] += 3.0
    assert quality(early, READER) < quality(late, READER) < 1.0


def test_J29_the_pacer_shows_in_order_no_faster_than_reading_and_nothing_before_it_came() -> None:
    rng = random.Random(1)
    times = sorted(rng.uniform(0, 10) for _ in range(60))
    at = shown(times, 4.0)
    assert all(b - a >= 0.25 - 1e-12 for a, b in pairwise(at))
    assert all(s >= t for s, t in zip(at, times, strict=True))
    pacer = TokenPacer(4.0)
    assert [pacer.push(t) for t in (1.0, 1.0, 1.05, 9.0)] == [1.0, 1.25, 1.5, 9.0]
    assert pacer.ahead_s(9.0) == 0.25
    assert pacer.ahead_s(9.5) == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_K07_J29_closed_forms_are_the_sums_over_the_pacers_curve(seed: int) -> None:
    rng = random.Random(seed)
    reader = Expected(rng.uniform(0, 3), rng.uniform(1, 9))
    asked_s, now_s, times = 1e6, 0.0, []
    delivery = Delivery(asked_s, reader)
    for _ in range(30):
        now_s += rng.choice([0.0, 0.02, 0.5, 3.0])
        num = rng.choice([1, 1, 1, 4])
        times += [now_s] * num
        delivery.take(num, asked_s + now_s)
        at = shown(times, reader.tds)
        assert delivery.quality == pytest.approx(by_hand(times, reader), rel=1e-6)
        assert delivery.ahead_s(asked_s + now_s) == pytest.approx(at[-1] + 1 / reader.tds - now_s, abs=1e-6)
        for until_s in (now_s, now_s + 0.7, now_s + 40.0):
            expected = [reader.ttft_s + j / reader.tds for j in range(1000)]
            assert delivery.area(asked_s + until_s) == pytest.approx(area(at, until_s), rel=1e-6, abs=1e-4)
            assert delivery.expected_area(asked_s + until_s) == pytest.approx(
                area(expected, until_s), rel=1e-6, abs=1e-4
            )
    fast, until_s = 100.0, now_s + 20.0
    more = shown([*times, *(now_s + j / fast for j in range(1, 3000))], reader.tds)[len(times) :]
    found = delivery.more_area(asked_s + now_s, asked_s + until_s, fast)
    assert found == pytest.approx(area(more, until_s), rel=1e-6), "the engine is faster than the reader"


def test_more_area_of_a_slow_engine_is_its_own_pace() -> None:
    delivery = Delivery(0.0, READER)
    assert delivery.more_area(10.0, 14.9, 1.0) == pytest.approx(3.9 + 2.9 + 1.9 + 0.9)
    assert delivery.more_area(10.0, 10.5, 1.0) == 0.0


@pytest.mark.parametrize(
    ("reader", "field"),
    [
        (Expected(-1.0, 5.0), "expected_ttft_s"), (Expected(inf, 5.0), "expected_ttft_s"),
        (Expected(1.0, 0.0), "expected_tds"), (Expected(1.0, inf), "expected_tds"),
        (Expected(float("nan"), 1.0), "expected_ttft_s"), (Expected(1.0, float("nan")), "expected_tds"),
    ],
)  # fmt: skip
def test_what_no_reader_can_mean_is_refused(reader: Expected, field: str) -> None:
    with pytest.raises(InputError, match=field) as caught:
        reader.check()
    assert caught.value.param == field
