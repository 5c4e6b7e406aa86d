"""What is believed of a sequence's guesses: a distribution over how often the next one is right.

A belief weighs a few levels p. Each verification multiplies the weights by p^accepted, and by 1 - p if a guess was
wrong, and then a small share goes back to what is believed of strangers, because text changes: so a belief follows a
change within a few steps, and under steady text it remembers some `1 / HAZARD` of them. The chance that guess d is
reached and right is the mean of p^d, so what follows accepted guesses is likelier to be accepted: as it is in text.
Source: forward filter with restarts (Adams and MacKay, arXiv 0710.3742, with one hazard and without run lengths).

Weights are rounded to half a bit, so there are few beliefs. Each knows its successors: to learn from a step
costs one look-up.
"""

from __future__ import annotations

from math import ceil, log2
from operator import mul

LEVELS = (0.0, 0.2, 0.4, 0.53, 0.65, 0.76, 0.86, 0.94, 0.985)
HAZARD = 1 / 96
"""Share of a belief that each verification gives back to the strangers' belief."""
LEAST_GAIN = 0.004
"""A guess less likely to be used is never made."""
_STEPS_PER_BIT = 2
_FLOOR = -11 * _STEPS_PER_BIT
_MAX_BELIEFS = 4096
_EVEN = 0.25
"""Share of the strangers' belief that favours no level: text can always change to what nobody has seen."""
_RENEWED = 0.2
"""The strangers' belief is renewed when it has moved by so much (sum of absolute differences)."""


class Belief:
    """Attributes:
    gains: chance that guess d + 1 is used, falling with d; ends where that is too little.
    falling: the same with the opposite sign, for bisection.
    chance: the first of them.
    """

    __slots__ = ("after", "chance", "falling", "gains", "number", "weights")

    def __init__(self, number: int, weights: tuple[float, ...], gains: list[float]) -> None:
        self.number = number
        self.weights = weights
        self.gains = gains
        self.falling = [-gain for gain in gains]
        self.chance = gains[0] if gains else 0.0
        self.after: dict[int, Belief] = {}


class Beliefs:
    """All beliefs there are. `branching`: guesses form trees, of which only size and accepted depth are known.

    A tree of k guesses is then taken to be log2(1 + k) deep: what it accepts grows with the logarithm of its size
    (Sequoia, Chen et al., arXiv 2402.12374, section 3).
    """

    def __init__(self, max_guesses: int, max_depth: int, *, branching: bool = False) -> None:
        self._max_guesses = max_guesses
        self._branching = branching
        self._max_depth = max_depth
        deepest = min(max_guesses, max_depth)
        self._powers = [tuple([p**d for p in LEVELS]) for d in range(1, deepest + 1)]
        self._known: dict[tuple[int, ...], Belief] = {}
        self._num_made = 0
        even = 1.0 / len(LEVELS)
        self._seen = [even] * len(LEVELS)
        self.stranger = self._rounded(self._seen)

    def learn(self, belief: Belief, num_guesses: int, num_accepted: int) -> Belief:
        """The belief after `num_guesses` > 0 of which `num_accepted` were used."""
        key = num_guesses << 8 | num_accepted
        found = belief.after.get(key)
        if found is None:
            found = belief.after[key] = self._learn(belief, num_guesses, num_accepted)
        return found

    def see(self, belief: Belief) -> None:
        """One of the beliefs that are held now: strangers are taken to be like those who are known."""
        self._seen = [was + (now - was) / 32 for was, now in zip(self._seen, belief.weights, strict=True)]

    def renew(self) -> None:
        """Bring the strangers' belief up to date, if it is far off; what follows from it is then found anew."""
        even = _EVEN / len(LEVELS)
        weights = [even + (1 - _EVEN) * weight for weight in self._seen]
        moved = sum([abs(a - b) for a, b in zip(weights, self.stranger.weights, strict=True)])
        if moved > _RENEWED:
            self._clear()
            self.stranger = self._rounded(weights)

    def _clear(self) -> None:
        for old in self._known.values():
            old.after.clear()
        self._known.clear()

    def _learn(self, belief: Belief, num_guesses: int, num_accepted: int) -> Belief:
        depth = min(ceil(log2(1 + num_guesses)) if self._branching else num_guesses, self._max_depth)
        accepted = min(num_accepted, depth)
        wrong = accepted < depth
        weights = [w * p**accepted * (1.0 - p if wrong else 1.0) for w, p in zip(belief.weights, LEVELS, strict=True)]
        total = sum(weights)
        if total <= 0.0:
            return self.stranger
        strange = self.stranger.weights
        return self._rounded([(1 - HAZARD) * w / total + HAZARD * s for w, s in zip(weights, strange, strict=True)])

    def _rounded(self, weights: list[float]) -> Belief:
        top = max(weights)
        key = tuple([max(_FLOOR, round(_STEPS_PER_BIT * log2(w / top))) if w > 0.0 else _FLOOR for w in weights])
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_BELIEFS:
                self._clear()
            raw = [2.0 ** (step / _STEPS_PER_BIT) for step in key]
            total = sum(raw)
            normal = tuple([w / total for w in raw])
            self._num_made += 1
            found = self._known[key] = Belief(self._num_made, normal, self._gains(normal))
        return found

    def _gains(self, weights: tuple[float, ...]) -> list[float]:
        chances: list[float] = []  # that depth d + 1 is reached and right
        for powers in self._powers:
            chance = sum(map(mul, weights, powers))
            if chance < LEAST_GAIN:
                break
            chances.append(chance)
        if not self._branching:
            return chances
        gains = []
        for k in range(1, self._max_guesses + 1):
            depth = ceil(log2(1 + k))
            if depth > len(chances):
                break
            gains.append(chances[depth - 1] * (log2(1 + k) - log2(k)))
        return gains
