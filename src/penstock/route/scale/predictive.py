"""As many engines as requests will need once an engine that is ordered now is ready.

Source: Holt, Forecasting Seasonals and Trends by Exponentially Weighted Moving Averages (1957; International Journal of
Forecasting 20, 2004): a level and a trend, each smoothed. The horizon is the time that an engine takes to start, and
Little's law makes of a rate that grows by a factor as many more requests in flight.
"""

from __future__ import annotations

from penstock.base.errors import ConfigError
from penstock.route.scale.reactive import Reactive
from penstock.route.scale.scaler import FleetSize, FleetView, at_least

_ONE = 1 << 16
"""Fractions are multiples of 1 / _ONE."""


class HoltForecast:
    """Arrivals per bucket of `bucket_us`: level and trend, in whole numbers. `alpha`, `beta`: percent."""

    def __init__(self, alpha: int, beta: int, bucket_us: int) -> None:
        self._alpha, self._beta, self._bucket_us = alpha, beta, bucket_us
        self._level: int | None = None
        self._trend = self._count = 0
        self._end_us: int | None = None

    def see(self, now_us: int, arrivals: int) -> None:
        """So many came since the last call."""
        if self._end_us is None:
            self._end_us = now_us + self._bucket_us
        while now_us >= self._end_us:
            self._take(self._count * _ONE)
            self._count, self._end_us = 0, self._end_us + self._bucket_us
        self._count += arrivals

    def _take(self, seen: int) -> None:
        if self._level is None:
            self._level = seen
            return
        level = (self._alpha * seen + (100 - self._alpha) * (self._level + self._trend)) // 100
        self._trend = (self._beta * (level - self._level) + (100 - self._beta) * self._trend) // 100
        self._level = max(0, level)

    def growth(self, ahead_us: int) -> tuple[int, int]:
        """The rate then, over the rate now, as a fraction; 1 / 1 before anything is known."""
        if not self._level:
            return 1, 1
        return max(0, self._level + self._trend * ahead_us // self._bucket_us), self._level


class Predictive(Reactive):
    """As `Reactive`, for the requests in flight that the forecast expects. It never orders fewer than those that are
    there need, nor more than `most_growth` percent of that."""

    def __init__(
        self, target: int = 8, low: int = 70, up_s: int = 5, down_s: int = 60, alpha: int = 30, beta: int = 10,
        bucket_s: int = 10, most_growth: int = 300,
    ) -> None:  # fmt: skip
        super().__init__(target, low, up_s, down_s)
        at_least("bucket_s", bucket_s, 1)
        at_least("most_growth", most_growth, 100)
        for knob, value in (("alpha", alpha), ("beta", beta)):
            if not 1 <= value <= 100:
                raise ConfigError(f"autoscale: {knob} is {value}; it must be from 1 to 100", field="autoscale")
        self._forecast, self._most_growth = HoltForecast(alpha, beta, bucket_s * 1_000_000), most_growth

    def decide(self, view: FleetView) -> FleetSize:
        self._forecast.see(view.now_us, view.arrivals)
        then, now = self._forecast.growth(view.start_us)
        expected = min(-(-view.requests * then // now), view.requests * self._most_growth // 100)
        load = max(view.requests, expected)
        what = f"{view.requests} requests"
        return self.sized(view, load, what if load == view.requests else f"{what}, {load} expected,")
