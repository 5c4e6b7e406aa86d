"""A device known by measurement: what steps of one model took on one machine, as a curve that `penstock sim` runs on.

The curve is a sum of costs that are never negative, so a longer step is never predicted to be shorter: one for every
step, one for each stretch of the number of tokens (a few rows cost what reading the weights costs, many what
multiplying does), of rows, of cached tokens, of pairs, and of logits. The host's own time is part of all of them: what
is measured goes from one step's end to the next one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.errors import ConfigError
from penstock.base.hashing import digest
from penstock.core.machine import Machine
from penstock.core.model_spec import ModelSpec
from penstock.core.step_shape import StepShape
from penstock.plan.measured import Sample, nnls

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Where the cost of a token may change."""
MIN_SAMPLES = 64
_ROUNDS = 6
_FURTHEST = 3.0
"""A step that took so many times what is predicted was interrupted; its weight is that of one which took this long."""


class StepCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Units: seconds. `token_s[i]`: of each token from the `KNOTS[i]`-th on; `head_s`: of a step that has logits."""

    base_s: float
    token_s: tuple[float, ...]
    row_s: float
    context_s: float
    pair_s: float
    head_s: float
    logit_s: float


class Errors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of steps that were not fitted to. `median`, `p90`: of |predicted - measured| / measured; `total`: of the sum of
    all predictions against the sum of all measurements, with its sign."""

    num_samples: int
    median: float
    p90: float
    total: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `penstock sim calibrate` writes: everything that a simulation of this model on this machine needs.

    `spec`: the model's shape, so that nothing else of it need be there. `settings`: those of the engine that was
    measured, by name, where they are not the defaults. `kv_bytes`: of its pool. `copy_bytes_per_s`: between pool and
    tier, one way, from the device's data.
    """

    model: str
    spec: ModelSpec
    settings: dict[str, Any]
    machine: Machine
    kv_bytes: int
    curve: StepCurve
    copy_bytes_per_s: float
    num_samples: int
    errors: Errors
    version: str

    @property
    def settings_hash(self) -> str:
        return digest(msgspec.json.encode(self.settings, order="sorted")).hex()


class CalibratedTimer:
    """A StepTimer over a curve; frozen, so that schedules made with it can be replayed.

    `step_s` grows with every field of the shape. Raises ConfigError for a cost that is negative or not finite.
    """

    name = "calibrated"

    def __init__(self, curve: StepCurve, copy_bytes_per_s: float) -> None:
        costs = [curve.base_s, *curve.token_s, curve.row_s, curve.context_s, curve.pair_s, curve.head_s, curve.logit_s]
        if not all(isfinite(cost) and cost >= 0 for cost in costs):
            raise ConfigError(
                "the step times of this file are damaged: a cost is negative or not finite; calibrate anew"
            )
        if not (isfinite(copy_bytes_per_s) and copy_bytes_per_s > 0) or not 0 < len(curve.token_s) <= len(KNOTS):
            raise ConfigError("the step times of this file are damaged: a rate or a stretch is missing; calibrate anew")
        self.curve = curve
        self._copy_bytes_per_s = copy_bytes_per_s
        self._costs = curve.row_s, curve.context_s, curve.pair_s, curve.logit_s
        # Seconds at each knot, so that a step costs one look-up and not a sum over stretches.
        self._at = [curve.base_s]
        for low, high, cost in zip(KNOTS, KNOTS[1:], curve.token_s[:-1], strict=False):
            self._at.append(self._at[-1] + (high - low) * cost)

    def step_s(self, shape: StepShape) -> float:
        """Seconds from the end of the step before to the end of a step of this shape."""
        t, b, c, p, r = shape
        row, context, pair, logit = self._costs
        # KNOTS double from 1 on, so the number of bits says between which two of them t is.
        i = min((t - 1).bit_length(), len(self._at) - 1) if t > 1 else 0
        total = self._at[i] + (t - KNOTS[i]) * self.curve.token_s[i] + b * row + c * context + p * pair
        return total + self.curve.head_s + r * logit if r else total

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to move so many bytes between pool and tier, one way."""
        return num_bytes / self._copy_bytes_per_s


def fit(samples: Sequence[Sample]) -> StepCurve:
    """The curve whose relative errors, over what it predicts itself, are smallest in the mean square.

    Weighing by prediction and not by measurement keeps the sum of all predictions what the sum of all measurements is:
    queues grow by sums. Raises ConfigError for fewer than MIN_SAMPLES steps.
    """
    import numpy as np

    usable = [(shape, seconds) for shape, seconds in samples if seconds > 0 and isfinite(seconds)]
    if len(usable) < MIN_SAMPLES:
        raise ConfigError(f"{len(usable)} measured steps are too few; {MIN_SAMPLES} are needed, so measure for longer")
    most = max(shape.num_tokens for shape, _ in usable)
    knots = [knot for knot in KNOTS if knot < most]
    features = np.array([_features(shape, knots) for shape, _ in usable], np.float64)
    seconds = np.array([s for _, s in usable])
    weights, cut = 1 / seconds, seconds
    costs = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        costs = nnls(features * weights[:, None], cut * weights)
        predicted = np.maximum(features @ costs, 1e-9)
        weights, cut = 1 / predicted, np.minimum(seconds, _FURTHEST * predicted)
    base, row, context, pair, head, logit, *token = (float(cost) for cost in costs)
    return StepCurve(
        base_s=base, token_s=tuple(token), row_s=row, context_s=context, pair_s=pair, head_s=head, logit_s=logit
    )


def _features(shape: StepShape, knots: Sequence[int]) -> list[float]:
    t, b, c, p, r = shape
    ends = (*knots[1:], 1 << 60)
    return [1, b, c, p, r > 0, r, *(max(0, min(t, end) - knot) for knot, end in zip(knots, ends, strict=True))]


def errors_of(timer: CalibratedTimer, samples: Sequence[Sample]) -> Errors:
    """Raises ConfigError without samples."""
    import numpy as np

    usable = [(shape, seconds) for shape, seconds in samples if seconds > 0]
    if not usable:
        raise ConfigError("there are no measured steps to compare with; measure for longer")
    seconds = np.array([s for _, s in usable])
    predicted = np.array([timer.step_s(shape) for shape, _ in usable])
    relative = np.abs(predicted - seconds) / seconds
    return Errors(
        num_samples=len(usable), median=float(np.median(relative)), p90=float(np.quantile(relative, 0.9)),
        total=float(predicted.sum() / seconds.sum() - 1),
    )  # fmt: skip


def save(calibration: Calibration, path: str | Path) -> None:
    """As JSON; `load` gives back the same. Raises ConfigError if it cannot be written."""
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}", field="out") from None


def is_calibration(path: str) -> bool:
    """Whether a file says it holds step times and not a device's figures; False for what cannot be read."""
    if not path.endswith(".json"):
        return False
    try:
        found = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError):
        return False
    return isinstance(found, dict) and "curve" in found


def load(path: str | Path) -> Calibration:
    """Raises ConfigError if the file cannot be read or is none."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"device file {str(path)!r} cannot be read: {error.strerror}", field="device") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{str(path)!r} holds no step times: {error}; calibrate anew", field="device") from None


def check_spec(calibration: Calibration, spec: ModelSpec, path: str) -> None:
    """Raises ConfigError if it was measured on a model of another shape."""
    if spec != calibration.spec:
        raise ConfigError(
            f"device: {path} was measured on {calibration.model}, and this model has another shape; calibrate it with "
            "penstock sim calibrate, or leave --model away",
            field="device",
        )
