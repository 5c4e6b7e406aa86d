"""How good predictions were, over all requests that have ended and by the last of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from penstock.core.lengths import bucket_end, bucket_of

WINDOW = 512
"""Requests over which the rank correlation is taken."""


class Accuracy:
    """Counts since the start. Units: requests, tokens.

    Attributes:
        num: predictions that have been held against their outcome; `num_unknown`: requests without one.
        num_hits: outputs that ended in the predicted bucket (`core.lengths`).
        num_outgrown: outputs that were longer than the predicted bucket's end.
        error_tokens: sum of |predicted - actual|.
    """

    def __init__(self) -> None:
        self.num = self.num_unknown = self.num_hits = self.num_outgrown = self.error_tokens = 0
        self._last: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def add(self, predicted: int, actual: int) -> None:
        """`predicted` 0: nobody knew."""
        if predicted == 0:
            self.num_unknown += 1
            return
        bucket = bucket_of(predicted)
        self.num += 1
        self.num_hits += bucket == bucket_of(actual)
        self.num_outgrown += actual > bucket_end(bucket)
        self.error_tokens += abs(predicted - actual)
        self._last.append((predicted, actual))

    @property
    def correlation(self) -> float | None:
        """Spearman's, of the last WINDOW; None as long as there are fewer than three, or all are equal."""
        return rank_correlation([p for p, _ in self._last], [a for _, a in self._last])


def rank_correlation(xs: Seq[float], ys: Seq[float]) -> float | None:
    """Spearman's rho, -1 to 1, equal values sharing the mean of their ranks. None if there is none."""
    if len(xs) < 3:
        return None
    a, b = _ranks(xs), _ranks(ys)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size > 0 else None


def _ranks(values: Seq[float]) -> npt.NDArray[np.float64]:
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (ends - (counts - 1) / 2)[places]
    return ranks
