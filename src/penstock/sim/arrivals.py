"""When requests come, if no trace says so. Every process is seeded: equal seeds give equal times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from penstock.base.errors import ConfigError, InputError
from penstock.base.registry import Registry

ARRIVALS: Registry[type[ArrivalProcess], None] = Registry("arrival process")
ARRIVALS.add("poisson", "penstock.sim.arrivals:Poisson")
ARRIVALS.add("gamma", "penstock.sim.arrivals:Gamma")
ARRIVALS.add("constant", "penstock.sim.arrivals:Constant")
ARRIVALS.add("bursts", "penstock.sim.arrivals:Bursts")
ARRIVALS.add("daily", "penstock.sim.arrivals:Daily")

_CHUNK = 1024  # draws per call of numpy


class ArrivalProcess(Protocol):
    """`rate`: requests per second on average over all time."""

    fields: tuple[str, ...]

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Endless arrival times in seconds, never decreasing, from about 1/rate on."""
        ...


class Constant:
    """One request every 1/rate seconds."""

    fields = ("rate",)

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        number = 0
        while True:
            number += 1
            yield number / self.rate


class Gamma:
    """Independent gaps, gamma distributed with mean 1/rate and coefficient of variation `cv`: 1 is Poisson, more comes
    in clusters. Source: the arrival model of AlpaServe, arXiv 2302.11665.
    """

    fields: tuple[str, ...] = ("rate", "cv")

    def __init__(self, rate: float, cv: float) -> None:
        self.rate = rate
        self.cv = cv

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        shape = 1.0 / self.cv**2
        now_s = 0.0
        while True:
            for gap_s in rng.gamma(shape, 1.0 / (self.rate * shape), _CHUNK).tolist():
                now_s += gap_s
                yield now_s


class Poisson(Gamma):
    """Independent exponential gaps of mean 1/rate."""

    fields = ("rate",)

    def __init__(self, rate: float) -> None:
        super().__init__(rate, 1.0)


class Bursts:
    """On-off: `on` seconds of Poisson arrivals, then `off` seconds of silence, and again; `rate` is the mean over
    both.
    """

    fields = ("rate", "on", "off")

    def __init__(self, rate: float, on: float, off: float) -> None:
        self.rate = rate
        self.on = on
        self.off = off

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        busy = Poisson(self.rate * (self.on + self.off) / self.on)
        for busy_s in busy.times(rng):  # a clock that runs only while it is on
            yield busy_s + self.off * math.floor(busy_s / self.on)


class Daily:
    """Poisson arrivals whose rate rises and falls as days do: lowest at the start, `peak` after half a `period`
    (seconds), `rate` on average. Raises InputError unless the peak is from once to twice the average.
    """

    fields = ("rate", "peak", "period")

    def __init__(self, rate: float, peak: float, period: float) -> None:
        if not rate <= peak <= 2 * rate:
            raise InputError(
                f"arrivals daily: peak must be from {rate:g} to {2 * rate:g} (once to twice the rate), not {peak:g}",
                param="arrivals",
            )
        self.rate, self.peak, self.period = rate, peak, period

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        # Lewis and Shedler's thinning: candidates at the peak's rate, each kept as often as the rate is of that.
        swing = self.peak - self.rate
        for now_s in Poisson(self.peak).times(rng):
            if rng.random() * self.peak < self.rate - swing * math.cos(2 * math.pi * now_s / self.period):
                yield now_s


def fit_gamma(times_s: Iterable[float]) -> tuple[float, float]:
    """(rate, cv) of the Gamma process that has the mean and the variation of the gaps between these times (moments).

    Raises InputError for fewer than three times, or if all are the same.
    """
    gaps = np.diff(np.fromiter(times_s, np.float64))
    if len(gaps) < 2 or gaps.mean() <= 0:
        raise InputError("arrivals: three different times at least are needed to fit a process", param="arrivals")
    return float(1 / gaps.mean()), float(gaps.std() / gaps.mean())


def make(name: str, given: Mapping[str, float]) -> ArrivalProcess:
    """The process called `name`. Raises InputError for unknown names, and for missing, unknown or senseless numbers."""
    try:
        kind = ARRIVALS.get(name)
    except ConfigError as error:
        raise InputError(str(error), param="arrivals") from None
    for field in kind.fields:
        if field not in given:
            raise InputError(f"arrivals {name} needs {field}, for example {name}:{_example(kind)}", param="arrivals")
        if not 1e-9 <= given[field] <= 1e9:
            raise InputError(
                f"arrivals {name}: {field} must be positive and finite, not {given[field]:g}", param="arrivals"
            )
    unknown = [field for field in given if field not in kind.fields]
    if unknown:
        raise InputError(f"arrivals {name} knows no {unknown[0]}; it takes {', '.join(kind.fields)}", param="arrivals")
    process: ArrivalProcess = kind(**given)
    return process


def _example(kind: type[ArrivalProcess]) -> str:
    return ",".join(f"{field}=2" for field in kind.fields)


def numbers(pairs: Iterator[tuple[str, str]], what: str) -> dict[str, float]:
    """name -> number. Raises InputError for what is none, and for repeated names."""
    out: dict[str, float] = {}
    for name, text in pairs:
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{what}: {name} must be a number, not {text!r}", param=what) from None
        if name in out or not math.isfinite(value):
            raise InputError(f"{what}: {name} must be given once, as a finite number", param=what)
        out[name] = value
    return out


def parse(text: str) -> ArrivalProcess:
    """`poisson:rate=2`, `gamma:rate=2,cv=3`, `constant:rate=1`, `bursts:rate=2,on=5,off=20`. Raises InputError."""
    name, _, rest = text.partition(":")
    pairs = (part.partition("=") for part in rest.split(",") if part)
    return make(name, numbers(((key.strip(), value) for key, _, value in pairs), "arrivals"))


def seeded(process: ArrivalProcess, seed: int) -> Callable[[], Iterator[float]]:
    """A source of the same times, as often as it is called."""
    return lambda: process.times(np.random.default_rng([seed, 0xA]))
