"""What is estimated of each sequence's drafts: a distribution over how often the next one is right.

An estimate weighs a few levels p. Each verification multiplies the weights by p^accepted, and by 1 - p if a draft was
wrong; then a small share goes back to the prior, what is estimated of a sequence of which nothing is known, because
text changes: so an estimate follows a change within a few steps, and under steady text it remembers some `1 / HAZARD`
of them. The chance that draft d is reached and right is the mean of p^d, so what follows accepted drafts is likelier to
be accepted: as it is in text. Source: forward filter with restarts (Adams and MacKay, arXiv 0710.3742, with one hazard
and without run lengths).

All estimates lie in two arrays, so a step costs a few calls of numpy, however many sequences it has.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import ceil, log2

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

LEVELS = np.array([0.0, 0.2, 0.4, 0.53, 0.65, 0.76, 0.86, 0.94, 0.985])
HAZARD = 1 / 96
"""Share of an estimate that each verification gives back to the prior."""
LEAST_GAIN = 0.004
"""A draft less likely to be used is never made."""
_EVEN = 0.25
"""Share of the prior that favours no level: text can always change to what nobody has seen."""
_PRIOR_STEP = 1 / 32
"""Weight of one look at a known estimate in what is estimated of unknown sequences."""
_LEAST = 1e-4
"""No level becomes less likely than that of the likeliest one: an estimate must be able to turn."""
MOST = 512
"""Drafts of a sequence that can be learned from at once."""
PRIOR = 0
"""The slot of what is estimated of a sequence of which nothing is known."""


class AcceptanceModel:
    """Acceptance by slot. `branching`: drafts form trees, of which only size and accepted depth are known.

    A tree of k drafts is then taken to be log2(1 + k) deep: what it accepts grows with the logarithm of its size
    (Sequoia, Chen et al., arXiv 2402.12374, section 3).

    Attributes:
        gains: [slots, D] chance that draft d + 1 is used, falling with d; 0 where that is too little.
    """

    def __init__(self, max_drafts: int, max_depth: int, *, branching: bool = False) -> None:
        self._max_depth = max_depth
        self._branching = branching
        deepest = min(max_drafts, max_depth)
        self._powers = LEVELS[:, None] ** np.arange(1, deepest + 1)
        self._scale: F64 | None = None
        if branching:  # draft k of a tree makes it log2(1 + k) - log2(k) deeper
            sizes = range(1, max_drafts + 1)
            self._depth_of = np.array([min(ceil(log2(1 + k)), deepest) - 1 for k in sizes])
            reached = np.array([ceil(log2(1 + k)) <= deepest for k in sizes])
            self._scale = np.array([log2(1 + k) - log2(k) for k in sizes]) * reached
        counts = np.arange(MOST + 1)[:, None]
        self._right, self._wrong = LEVELS**counts, (1.0 - LEVELS) ** counts
        self._hazard = 1.0 - (1.0 - HAZARD) ** counts
        even = np.full(len(LEVELS), 1 / len(LEVELS))
        self._mean = even
        self._weights = even[None].copy()
        self.chances = self._chances(self._weights)
        self._free: list[int] = []

    def add(self) -> int:
        """A slot for another sequence."""
        if not self._free:
            count = len(self._weights)
            self._weights = np.concatenate([self._weights, np.zeros_like(self._weights)])
            self.chances = np.concatenate([self.chances, np.zeros_like(self.chances)])
            self._free = list(range(2 * count - 1, count - 1, -1))
        slot = self._free.pop()
        self._weights[slot] = self._weights[PRIOR]
        self.chances[slot] = self.chances[PRIOR]
        return slot

    def forget(self, slot: int) -> None:
        self._free.append(slot)

    def evidence(self, num_drafts: int, num_accepted: int) -> tuple[int, int]:
        """What a verification of `num_drafts` > 0 says: (right drafts on one path, 1 if a wrong one ended it)."""
        depth = num_drafts
        if self._branching:
            depth = num_drafts.bit_length()  # the whole number above log2(1 + k)
        if depth > self._max_depth:
            depth = self._max_depth
        return (num_accepted, 1) if num_accepted < depth else (depth, 0)

    def learn(self, slots: Seq[int], num_right: Seq[int], num_wrong: Seq[int], num_times: Seq[int]) -> None:
        """Add `evidence`: sums (MOST at most) over so many verifications of each of these sequences."""
        at = np.array(slots)
        weights = self._weights[at]
        weights *= self._right[num_right]
        weights *= self._wrong[num_wrong]
        weights = np.maximum(weights, _LEAST * weights.max(1, keepdims=True))
        hazard = self._hazard[num_times]
        weights *= (1.0 - hazard) / weights.sum(1, keepdims=True)
        weights += hazard * self._weights[PRIOR]
        self._weights[at] = weights
        self.chances[at] = self._chances(weights)

    def update_prior(self, slot: int, num_times: int = 1) -> None:
        """Move the prior towards one of the estimates that are held now, as for so many verifications."""
        self._mean = self._mean + (1.0 - (1.0 - _PRIOR_STEP) ** num_times) * (self._weights[slot] - self._mean)

    def refresh_prior(self) -> None:
        """Bring the prior up to date."""
        weights = _EVEN / len(LEVELS) + (1.0 - _EVEN) * self._mean
        self._weights[PRIOR] = weights
        self.chances[PRIOR] = self._chances(weights[None])[0]

    def _chances(self, weights: F64) -> F64:
        chances = weights @ self._powers  # that depth d + 1 is reached and right
        if self._scale is not None:
            chances = np.minimum.accumulate(chances[:, self._depth_of] * self._scale, 1)
        chances[chances < LEAST_GAIN] = 0.0
        return np.asarray(chances)
