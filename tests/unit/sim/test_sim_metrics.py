"""Metrics against values worked out by hand, timelines against plain sums."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.sim.metrics import Distribution
from penstock.sim.timeline import Timeline


def test_percentiles_are_nearest_rank() -> None:
    d = Distribution.of(np.array([3.0, 1.0, 2.0, 4.0, np.nan]))
    assert d.count == 4
    assert d.mean == 2.5
    assert [d.percentile(p) for p in (0, 25, 26, 50, 75, 99, 100)] == [1, 1, 2, 2, 3, 4, 4]


def test_counted_values_are_the_values_written_out() -> None:
    rng = np.random.default_rng(0)
    values, counts = rng.random(50).round(2), rng.integers(1, 9, 50)
    short, long = Distribution.of(values, counts), Distribution.of(np.repeat(values, counts))
    assert short.count == long.count
    assert short.mean == pytest.approx(long.mean)
    for p in (1, 50, 90, 99, 100):
        assert short.percentile(p) == long.percentile(p)
        assert short.percentile(p) == np.percentile(np.repeat(values, counts), p, method="inverted_cdf")


def test_nothing_has_no_percentile() -> None:
    d = Distribution.of(np.array([np.nan]))
    assert d.count == 0
    assert np.isnan(d.percentile(50))
    assert np.isnan(d.mean)
    assert d.curve() == ([], [])


def test_curves_end_at_the_largest_value() -> None:
    d = Distribution.of(np.arange(10_000.0))
    xs, ys = d.curve(100)
    assert len(xs) <= 101
    assert (xs[-1], ys[-1]) == (9999.0, 1.0)
    assert xs == sorted(xs)
    assert ys == sorted(ys)
    for x, y in zip(xs, ys, strict=True):
        assert (np.arange(10_000) <= x).mean() == pytest.approx(y)


def test_timeline_keeps_time_and_counts_whatever_its_width() -> None:
    rng = np.random.default_rng(1)
    line = Timeline(2, 1, num_buckets=16, width_s=0.125)
    now, area, total = 0.0, np.zeros(2), 0.0
    for _ in range(400):
        length, values, amount = rng.exponential(0.3), rng.random(2), rng.integers(0, 5)
        line.level(now, now + length, values.tolist())
        now += length
        line.count(now, [amount])
        area += values * length
        total += amount
    series = line.series()
    assert series.levels.shape == (len(series.counts), 2)
    assert 8 <= len(series.levels) <= 16
    assert series.width_s * len(series.levels) >= now
    assert line.mean_levels() == pytest.approx((area / now).tolist())
    assert series.counts.sum() == pytest.approx(total)
    covered = np.minimum(series.width_s, now - series.width_s * np.arange(len(series.levels)))
    assert (series.levels * covered[:, None]).sum(0) == pytest.approx(area.tolist())


def test_an_interval_is_shared_among_its_buckets() -> None:
    line = Timeline(1, 1, num_buckets=8, width_s=1.0)
    line.level(0.5, 2.5, [10.0])
    line.level(2.5, 3.0, [0.0])
    assert line.series().levels[:, 0].tolist() == [10.0, 10.0, 5.0, 0.0]
    assert line.mean_levels() == [pytest.approx(8.0)]
