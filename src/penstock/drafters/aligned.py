"""What the model will draw, drafted from what the draft model would draw with the same random number.

A draw takes the token at u in the running sum of the probabilities, in ascending id order (`runner.sampler`). The sums
of two models drift apart along the ids, so the model's token lies near u in the draft's sums rather than at u. How far
off it lies is learnt, and the draft is the token with the most mass around u, weighed by that distance (Laplace). Of a
draft model that is always right the distance is 0, and the draft is what it draws itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.rng import uniform
from penstock.core.sampling import TokenRules
from penstock.runner.truncate import Ids, truncate

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

MAX_ALIGNED_VOCAB = 1 << 15
"""With more tokens, the sums would cost more than the drafts that they mend are worth."""
_LEAST_RATE = 0.02
_ROUNDING = 1e-12


class Draw(NamedTuple):
    """One draw of the draft model: `sums` [K] up to and including each of `ids` (None: all), as shares of the whole."""

    ids: Ids | None
    sums: F64
    u: float


class Alignment:
    """`distance`: how far from u the model's token lies in the draft's sums, on average; a share of the whole."""

    def __init__(self) -> None:
        self.distance = 0.0
        self._count = 0

    def choose(self, row: F32, rules: TokenRules, sample_index: int, position: int) -> tuple[int, Draw]:
        """The likeliest choice of the model at `position`. Shapes: row [V], its largest number finite."""
        ids, weights = truncate(row, rules)
        exact = np.cumsum(weights)
        total, u = int(exact[-1]), uniform(rules.seed, sample_index, position)
        sums = exact / total
        if self.distance > 0:
            z = (np.concatenate([[0.0], sums]) - u) / self.distance
            tails = 0.5 * np.exp(-np.abs(z))
            slot = int(np.diff(np.where(z < 0, tails, 1 - tails)).argmax())
        else:
            slot = int(np.searchsorted(exact, int(u * 2**53) * total >> 53, side="right"))
        return (slot if ids is None else int(ids[slot])), Draw(ids, sums, u)

    def learn(self, draw: Draw, token_id: int) -> None:
        """The model has chosen `token_id` there. Mutates: self."""
        slot = token_id if draw.ids is None else int(np.searchsorted(draw.ids, token_id))
        known = draw.ids is None or (slot < len(draw.ids) and draw.ids[slot] == token_id)
        low = float(draw.sums[slot - 1]) if slot else 0.0
        high = float(draw.sums[slot]) if known else low
        self._count += 1
        gap = max(low - draw.u, draw.u - high)
        gap = gap if gap > _ROUNDING else 0.0
        self.distance += max(1 / self._count, _LEAST_RATE) * (gap - self.distance)
