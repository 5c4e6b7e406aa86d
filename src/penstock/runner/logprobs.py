"""Log-probabilities of single tokens out of one row of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.batch import TokenLogprobs
from penstock.ops.draw_weights import LOG2_E, UNIT, weigh
from penstock.runner.truncate import best_ids

F32 = npt.NDArray[np.float32]


def log_sum(peak: float, total: int) -> float:
    """log(sum(exp(logits))) of a row whose largest logit is `peak` and whose `ops.draw_weights` sum is `total`."""
    return peak + math.log(total / UNIT)


class RowLogprobs:
    """log_softmax of one row, in float64, evaluated only where asked. No error is larger than V * 2^-43.

    Shapes: row [V], at least one finite, no NaN, no +inf. Units: nats. The row is read at construction and by `entry`;
    it must not change between them. `ids`: the tokens to tell of, instead of the likeliest.
    """

    def __init__(self, row: F32, num_top: int = 0, ids: Sequence[int] = ()) -> None:
        self._row = row
        self._log_sum = log_sum(float(row.max()), int(weigh(row, LOG2_E).sum()))
        self._top_ids: list[int] = best_ids(row, num_top).tolist() if num_top > 0 else list(ids)
        self._top_logprobs = [self.logprob(token) for token in self._top_ids]

    def logprob(self, token: int) -> float:
        return float(self._row[token]) - self._log_sum

    def entry(self, token: int) -> TokenLogprobs:
        """Rank 1 is the likeliest; of equally likely tokens the lowest id ranks first, as in `top_ids`."""
        value = self._row[token]
        above = int(np.count_nonzero(self._row > value)) + int(np.count_nonzero(self._row[:token] == value))
        return TokenLogprobs(token, self.logprob(token), above + 1, self._top_ids, self._top_logprobs)

    def best(self) -> list[tuple[int, float]]:
        """The `num_top` likeliest (token, logprob), best first, without those of probability zero."""
        return [pair for pair in zip(self._top_ids, self._top_logprobs, strict=True) if pair[1] > -np.inf]
