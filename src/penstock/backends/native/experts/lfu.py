"""Who was used in the fewest steps leaves; of equals the one that was used longest ago."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MOST_STEPS = 2**40
"""Of a run: steps beside the counts, so that a float64 holds both."""


class LeastFrequent:
    """See `ExpertOrder`. Counts go on while an expert is away."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.worth = np.zeros(layers[-1])
        self._counts = np.zeros(layers[-1])
        self._now = 0

    def came(self, expert: int) -> None:
        """Nobody has used it yet."""

    def used(self, layer: int, experts: npt.NDArray[np.int64]) -> None:
        self._now += 1
        self._counts[experts] += 1
        self.worth[experts] = self._counts[experts] + self._now / _MOST_STEPS
