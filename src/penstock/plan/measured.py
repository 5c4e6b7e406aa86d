"""A cost table fitted to steps that were really run: six costs that are never negative, and how wrong they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.base.errors import ConfigError
from penstock.core.step_shape import StepShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

Sample = tuple[StepShape, float]
"""(shape of a step, its duration in seconds)."""

MIN_SAMPLES = 12
"""Twice as many steps as there are costs to find."""


class StepLaw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time as a sum of non-negative costs, and the evidence for it. Units: seconds, bytes/s.

    `base_s` is paid by every step, the others per unit of the StepShape's fields. `median_error` is the median over the
    fitted samples of |predicted - measured| / measured.
    """

    base_s: float
    token_s: float
    row_s: float
    context_s: float
    pair_s: float
    logit_s: float
    copy_bytes_per_s: float
    num_samples: int
    median_error: float

    @property
    def costs(self) -> tuple[float, float, float, float, float, float]:
        return self.base_s, self.token_s, self.row_s, self.context_s, self.pair_s, self.logit_s


class MeasuredTimer:
    """A StepTimer by measurement; frozen, so that schedules made with it can be replayed.

    Raises ConfigError if a cost is negative or not finite: then a longer step could be predicted to be shorter.
    """

    name = "measured"

    def __init__(self, law: StepLaw) -> None:
        for field in StepLaw.__struct_fields__:
            value = getattr(law, field)
            if not (isfinite(value) and value >= 0) or (field == "copy_bytes_per_s" and value == 0):
                raise ConfigError(f"the cost table gives {field} as {value}; it must be finite and not negative")
        self.law = law
        self._costs = law.costs

    @classmethod
    def from_samples(cls, samples: Iterable[Sample], *, copy_bytes_per_s: float) -> MeasuredTimer:
        """Fit to recorded steps; steps of no duration (a clock too coarse) are left out.

        Relative errors are made small, so short steps count as much as long ones, and a step that was interrupted for
        long weighs no more than one that was predicted as 0. `copy_bytes_per_s`: between device and host memory, one
        way. Raises ConfigError for fewer than MIN_SAMPLES steps.
        """
        import numpy as np

        usable = [(shape, duration_s) for shape, duration_s in samples if duration_s > 0 and isfinite(duration_s)]
        if len(usable) < MIN_SAMPLES:
            raise ConfigError(f"{len(usable)} measured steps are too few for a cost table; {MIN_SAMPLES} are needed")
        features = np.array([(1, *shape) for shape, _ in usable], np.float64)
        durations = np.array([duration_s for _, duration_s in usable])
        costs = nnls(features / durations[:, None], np.ones(len(usable)))
        errors = np.abs(features @ costs - durations) / durations
        names = ("base_s", "token_s", "row_s", "context_s", "pair_s", "logit_s")
        law = StepLaw(
            **{name: float(cost) for name, cost in zip(names, costs, strict=True)},
            copy_bytes_per_s=copy_bytes_per_s,
            num_samples=len(usable),
            median_error=float(np.median(errors)),
        )
        return cls(law)

    @classmethod
    def load(cls, path: str | Path) -> MeasuredTimer:
        """A saved cost table. Raises ConfigError if the file cannot be read or is not one."""
        try:
            return cls(msgspec.json.decode(Path(path).read_bytes(), type=StepLaw))
        except OSError as error:
            raise ConfigError(f"cost table {str(path)!r} cannot be read: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{str(path)!r} is not a cost table: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the cost table as JSON; `load` gives back exactly this timer."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self.law)) + b"\n")

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        base, token, row, context, pair, logit = self._costs
        t, b, c, p, r = shape
        return base + t * token + b * row + c * context + p * pair + r * logit

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to move so many bytes between device and host memory, one way."""
        return num_bytes / self.law.copy_bytes_per_s

    def median_error(self, samples: Sequence[Sample]) -> float:
        """Median over `samples` of |predicted - measured| / measured: how well it does on steps not fitted to.

        Raises ConfigError if there is no sample with a duration.
        """
        errors = sorted(abs(self.step_s(shape) - s) / s for shape, s in samples if s > 0)
        if not errors:
            raise ConfigError("no measured steps to compare with")
        middle = len(errors) // 2
        return errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2


def nnls(a: Floats, b: Floats) -> Floats:
    """The x >= 0 with the smallest |a x - b|. Shapes: a [N, K], b [N] -> [K].

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23, the active-set method. Columns are
    scaled to one length first: counts of pairs are a million times those of rows.
    """
    import numpy as np

    lengths = np.linalg.norm(a, axis=0)
    lengths[lengths == 0] = 1.0
    a = a / lengths
    num_columns = a.shape[1]
    x = np.zeros(num_columns)
    free = np.zeros(num_columns, bool)
    tolerance = 1e-10 * max(1.0, float(np.linalg.norm(b)))
    # The method ends by itself; the bound only keeps rounding from turning it in a circle.
    for _ in range(10 * num_columns):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while free.any():
            trial = np.zeros(num_columns)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            # Go towards the trial until the first cost reaches zero, and fix that one there.
            down = free & (trial <= 0)
            step = float(np.min(x[down] / np.maximum(x[down] - trial[down], 1e-300), initial=1.0))
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
    out: Floats = x / lengths
    return out
