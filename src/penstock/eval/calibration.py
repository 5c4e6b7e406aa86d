"""Whether probabilities mean what they say: of the answers that a model is 80 % sure of, are 80 % right?

An example's score of kind "calibration" is how sure the chosen answer was, from 0 to 1, with a minus if it was wrong.
Expected calibration error (ECE): answers are put into bins by how sure they were; the mean over all answers of how far
a bin's mean certainty is from its share of right ones. Source: Guo et al., On Calibration of Modern Neural Networks,
arXiv 1706.04599. It is biased upward for few examples: even a calibrated model has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.eval.intervals import Interval, bootstrap

NUM_BINS = 10
F64 = npt.NDArray[np.float64]


class Bin(NamedTuple):
    """Answers whose certainty is above `low` and at most `high` (the first: from `low` on): how many, how sure they
    were on average, and how many of them were right."""

    low: float
    high: float
    n: int
    sure: float
    right: float


def reliability(scores: Sequence[float]) -> list[Bin]:
    """The bins that hold anything."""
    sure, right, place = _parts(scores)
    out = []
    for b in range(NUM_BINS):
        own = place == b
        if own.any():
            ends = (b / NUM_BINS, (b + 1) / NUM_BINS)
            out.append(Bin(*ends, int(own.sum()), float(sure[own].mean()), float(right[own].mean())))
    return out


def columns(scores: Sequence[float]) -> list[list[float]]:
    """By bin and example what it adds to its bin's gap: the error is the sum of the absolute values of their means."""
    sure, right, place = _parts(scores)
    return [np.where(place == b, sure - right, 0.0).tolist() for b in range(NUM_BINS)]


def error_of(*means: Any) -> Any:
    """From the means of `columns`, of one sample or of many (arrays)."""
    return sum(abs(mean) for mean in means)


def calibration_error(scores: Sequence[float]) -> tuple[float, Interval | None]:
    """The error, and its interval of 95 % by bootstrap."""
    found = columns(scores)
    return float(error_of(*(sum(column) / len(column) for column in found))), bootstrap(error_of, *found)


def _parts(scores: Sequence[float]) -> tuple[F64, F64, npt.NDArray[np.intp]]:
    signed = np.asarray(scores, np.float64)
    sure = np.abs(signed)
    return sure, (signed > 0).astype(np.float64), np.clip(np.ceil(sure * NUM_BINS).astype(np.intp) - 1, 0, NUM_BINS - 1)
