"""How far an approximation is from what it approximates: both read the same tokens, and all they expected is compared.

Perplexity asks how well the text was expected, so errors can cancel in it; divergence asks how much of the expectation
changed. Definitions, over the counted tokens of the windows (`eval.perplexity`): KL is the sum over the vocabulary of
p (ln p - ln q), p the reference, in nats; the top token agrees if both put the same token first (lowest id of equals).
Source: KL of logits as a measure of quantisation: Dutta et al., "Accuracy is not all you need", arXiv 2407.09141.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.eval.perplexity import F64, Interval, Passage, Score, Window, log_probs, resampled, spread, token_nats
from penstock.eval.scorer import Scorer

_ROWS = 64


@dataclass(frozen=True)
class Comparison:
    """Per counted token: `kl` in nats, `agrees`. `score` is the candidate's own, `reference` the other's."""

    score: Score
    reference: Score
    kl: F64
    agrees: F64

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def p99_kl(self) -> float:
        return float(np.percentile(self.kl, 99))

    @property
    def max_kl(self) -> float:
        return float(self.kl.max())

    @property
    def agreement(self) -> float:
        return float(self.agrees.mean())

    def kl_interval(self) -> Interval | None:
        """95 % of the mean, over windows; None for fewer than two."""
        lengths = [w.num_counted for w in self.score.passage.windows]
        if len(lengths) < 2:
            return None
        ends = np.cumsum(lengths)[:-1]
        sums = np.array([part.sum() for part in np.split(self.kl, ends)])
        kl, tokens = resampled(sums, np.array(lengths, np.float64))
        return spread(kl / tokens)


class Remembered:
    """A scorer that keeps the logits of windows it has read, up to a number of bytes: the reference is asked often."""

    def __init__(self, scorer: Scorer, max_bytes: int = 1 << 30) -> None:
        self.vocab_size, self.max_len = scorer.vocab_size, scorer.max_len
        self._scorer = scorer
        self._left = max_bytes
        self._kept: dict[tuple[int, ...], F32] = {}

    def logits(self, token_ids: Sequence[int]) -> F32:
        ids = tuple(token_ids)
        if ids in self._kept:
            return self._kept[ids]
        logits = self._scorer.logits(ids)
        if logits.nbytes <= self._left:
            self._kept[ids] = logits
            self._left -= logits.nbytes
        return logits


def compare(
    reference: Scorer, candidate: Scorer, passage: Passage, advance: Callable[[], None] = lambda: None
) -> Comparison:
    """Both read all windows; `advance` is called after each. Raises EngineError."""
    nats, their_nats, kl, agrees = [], [], [], []
    for window in passage.windows:
        theirs, own = reference.logits(window.token_ids), candidate.logits(window.token_ids)
        nats.append(token_nats(own, window).sum())
        their_nats.append(token_nats(theirs, window).sum())
        kl.append(divergence(theirs, own, window))
        counted = slice(window.first - 1, len(window.token_ids) - 1)
        agrees.append(theirs[counted].argmax(axis=1) == own[counted].argmax(axis=1))
        advance()
    return Comparison(
        Score(np.array(nats), passage),
        Score(np.array(their_nats), passage),
        np.concatenate(kl),
        np.concatenate(agrees).astype(np.float64),
    )


def divergence(reference: F32, candidate: F32, window: Window) -> F64:
    """KL of each counted token, in nats: logits [T, V] twice -> [counted]."""
    out = np.empty(window.num_counted)
    for lo in range(0, window.num_counted, _ROWS):
        rows = slice(window.first - 1 + lo, min(window.first - 1 + lo + _ROWS, len(window.token_ids) - 1))
        p, q = log_probs(reference[rows]), log_probs(candidate[rows])
        # Of what p rules out entirely (a logit of minus infinity) nothing is left, whatever q says.
        weight = np.exp(p)
        terms = weight * np.subtract(p, q, out=np.zeros_like(p), where=weight > 0)
        out[lo : lo + len(terms)] = terms.sum(axis=1)
    if not np.isfinite(out).all():
        raise EngineError("the model gave logits whose divergence is not finite")
    return np.maximum(out, 0.0)  # rounding may leave -1e-17
