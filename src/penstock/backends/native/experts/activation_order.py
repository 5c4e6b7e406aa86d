"""Who is used least by what runs lately, and late in the model, leaves: MoE-Infinity's cache (catalogue row C74).

Worth is (an expert's share of its layer's uses + a little) * (1 - layer / layers): the first layers are needed
soonest when a step begins, and nothing runs before them that would hide their reads. Shares are of what was used
lately, where the paper counts from the beginning of the one sequence that it serves.

Source: Xue et al., MoE-Infinity, arXiv 2401.14361, section 6.2 (algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_KEEPS = 0.98
"""Of a count, after each later use of the layer: about fifty steps count."""
_LITTLE = 1e-3


class ActivationOrder:
    """See `ExpertOrder`."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._bounds = layers
        self._counts = np.zeros(layers[-1])
        num = len(layers) - 1
        each = [1 - n / num for n in range(num) for _ in range(layers[n], layers[n + 1])]
        self._early = np.array(each)
        self.worth = self._early * _LITTLE

    def came(self, expert: int) -> None:
        """Its share says what it is worth."""

    def used(self, layer: int, experts: npt.NDArray[np.int64]) -> None:
        own = slice(self._bounds[layer], self._bounds[layer + 1])
        self._counts[own] *= _KEEPS
        self._counts[experts] += 1
        self.worth[own] = (self._counts[own] / self._counts[own].sum() + _LITTLE) * self._early[own]
