"""When requests are sent. Times are fixed before the first one: what the server does never moves them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError

RAMPS = ("linear", "exponential")


@dataclass(frozen=True)
class Ramp:
    """The rate goes from `start_rps` at the first request to `end_rps` at the last."""

    strategy: str
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in RAMPS:
            raise ConfigError(f"ramp_up_strategy must be one of {', '.join(RAMPS)}", field="ramp_up_strategy")
        if not (0 < self.start_rps < float("inf") and 0 < self.end_rps < float("inf")):
            raise ConfigError("a ramp needs two rates above 0", field="ramp_up_start_rps")


def arrival_times(
    num: int, rate: float, *, burstiness: float = 1.0, seed: int = 0, ramp: Ramp | None = None
) -> npt.NDArray[np.float64]:
    """Seconds from the start at which each of `num` requests is due. Raises ConfigError.

    Independent gaps, gamma distributed: mean 1/rate, coefficient of variation 1/sqrt(burstiness). 1 is Poisson, less
    comes in clusters, more is more even. An infinite rate sends all at once.
    """
    if not rate > 0:
        raise ConfigError(f"request_rate must be above 0, not {rate}", field="request_rate")
    if not 0 < burstiness < float("inf"):
        raise ConfigError(f"burstiness must be above 0, not {burstiness}", field="burstiness")
    if ramp is None and rate == float("inf"):
        return np.zeros(num)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, num)
    return np.cumsum(gaps / _rates(num, rate, ramp))


def _rates(num: int, rate: float, ramp: Ramp | None) -> npt.NDArray[np.float64]:
    if ramp is None:
        return np.full(num, rate)
    part = np.arange(num) / max(1, num - 1)
    if ramp.strategy == "linear":
        return ramp.start_rps + (ramp.end_rps - ramp.start_rps) * part
    return np.asarray(ramp.start_rps * (ramp.end_rps / ramp.start_rps) ** part)
