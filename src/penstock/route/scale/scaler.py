"""What a scaler is asked, and what it may know."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.base.errors import ConfigError


@dataclass(frozen=True)
class FleetView:
    """All engines of a model together, at one moment.

    Attributes:
        now_us: the moment, in microseconds of the one clock.
        ready, starting: engines that work, and that will; those that are drained are in neither.
        requests: not finished, wherever they are.
        arrivals: requests that came since the view before this one.
        start_us: how long an engine takes from the order to ready, as seen last.
        least, most: engines that there may be.
    """

    now_us: int
    ready: int
    starting: int = 0
    requests: int = 0
    arrivals: int = 0
    start_us: int = 0
    least: int = 1
    most: int = 1

    @property
    def engines(self) -> int:
        """Ready, or ordered."""
        return self.ready + self.starting


@dataclass(frozen=True)
class FleetSize:
    """So many engines should be ready or starting; `why`, for people."""

    engines: int
    why: str = ""


class Scaler:
    """Is asked at every look, also while nothing is to be done: the same views get the same answers."""

    def decide(self, view: FleetView) -> FleetSize:
        raise NotImplementedError


class Fixed(Scaler):
    """Always the most that there may be (`engines` 0), or so many."""

    def __init__(self, engines: int = 0) -> None:
        at_least("engines", engines, 0)
        self._engines = engines

    def decide(self, view: FleetView) -> FleetSize:
        return FleetSize(bounded(self._engines or view.most, view), "a fixed number")


def bounded(engines: int, view: FleetView) -> int:
    return max(view.least, min(view.most, engines))


def at_least(knob: str, value: int, least: int) -> None:
    """Raises ConfigError."""
    if value < least:
        raise ConfigError(f"autoscale: {knob} is {value}; it must be at least {least}", field="autoscale")
