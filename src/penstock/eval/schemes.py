"""Schemes of quantisation side by side: bytes, perplexity, divergence, on one text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import EngineError
from penstock.core.matrix_format import Scheme
from penstock.eval.compare import Comparison, Remembered, compare
from penstock.eval.perplexity import Interval, Passage
from penstock.eval.scorer import LoadedModel, ProgramScorer, WeightSizes, make_scorer, weight_sizes


@dataclass(frozen=True)
class Measured:
    """One scheme. `found` is None, and `error` says why, if it gave no numbers. `tokens_per_s`: reading, in windows."""

    scheme: Scheme
    sizes: WeightSizes
    tokens_per_s: float
    found: Comparison | None
    error: str = ""


def measure(
    model: LoadedModel,
    reference: ProgramScorer,
    schemes: Sequence[Scheme],
    passage: Passage,
    advance: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Every scheme against the reference, in order; `advance` is called for every window of every scheme.

    Beside the reference, one scheme is in memory at a time.
    """
    remembered = Remembered(reference)
    return [_one(model, reference, remembered, scheme, passage, advance) for scheme in schemes]


def _one(
    model: LoadedModel,
    reference: ProgramScorer,
    remembered: Remembered,
    scheme: Scheme,
    passage: Passage,
    advance: Callable[[], None],
) -> Measured:
    candidate = make_scorer(model, scheme) if scheme.weight_bits else reference
    sizes = weight_sizes(model, scheme)
    try:
        # What is not quantised is the reference itself: it is read once, and its distance from itself is zero.
        found = compare(remembered, candidate if scheme.weight_bits else remembered, passage, advance)
    except EngineError as error:
        return Measured(scheme, sizes, math.nan, None, str(error))
    return Measured(scheme, sizes, candidate.num_tokens / candidate.seconds, found)


def as_json(m: Measured) -> dict[str, Any]:
    """Plain numbers; intervals as [low, high] of 95 %, or null for fewer than two windows."""
    out: dict[str, Any] = {
        "scheme": m.scheme.name,
        "matrix_bytes": m.sizes.matrix_bytes,
        "total_bytes": m.sizes.total_bytes,
        "bits_per_weight": m.sizes.bits_per_weight,
    }
    if m.found is None:
        return out | {"error": m.error}
    score, reference = m.found.score, m.found.reference
    return out | {
        "perplexity": score.perplexity,
        "perplexity_interval": _listed(score.interval()),
        "bits_per_byte": score.bits_per_byte,
        "perplexity_difference": score.perplexity - reference.perplexity,
        "perplexity_difference_interval": _listed(score.difference(reference)),
        "kl_mean": m.found.mean_kl,
        "kl_mean_interval": _listed(m.found.kl_interval()),
        "kl_p99": m.found.p99_kl,
        "kl_max": m.found.max_kl,
        "top1_agreement": m.found.agreement,
        "tokens_per_s": m.tokens_per_s,
    }


def _listed(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)
