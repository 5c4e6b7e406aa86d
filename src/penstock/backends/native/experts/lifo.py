"""Who came last leaves first: expert buffering (catalogue row C71).

Layers run in one order, over and over. Who has just run is who is needed again last: to keep those that have been there
longest lets a part of the model stay, where order of use would put out each layer's experts just before their turn.

Source: Huang et al., "Towards MoE Deployment", arXiv 2303.06182, section 6 (evict by last in, first out; never who is
active in the batch).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class LastInFirstOut:
    """See `ExpertOrder`."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.worth = np.zeros(layers[-1])
        self._now = 0

    def came(self, expert: int) -> None:
        self._now -= 1
        self.worth[expert] = self._now

    def used(self, layer: int, experts: npt.NDArray[np.int64]) -> None:
        """Use changes nothing."""
