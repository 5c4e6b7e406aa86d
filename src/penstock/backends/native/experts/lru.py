"""Who was used longest ago leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class LeastRecent:
    """See `ExpertOrder`."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.worth = np.zeros(layers[-1])
        self._now = 0

    def came(self, expert: int) -> None:
        """Nobody has used it yet: what was expected in vain leaves first."""

    def used(self, layer: int, experts: npt.NDArray[np.int64]) -> None:
        self._now += 1
        self.worth[experts] = self._now
