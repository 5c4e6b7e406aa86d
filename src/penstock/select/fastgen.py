"""FastGen: each head gets the cheapest policy that recovers enough of its attention.

Source: Ge et al., Model Tells You What to Discard, arXiv 2310.01801, section 3: at the end of the prompt the attention
of every head is profiled, and of the policies special tokens; and punctuation; and frequent tokens; and local ones; and
everything, the first that keeps `threshold` of it is the head's in decoding.

So the size of the cache follows from `threshold`. A budget below 100 % is a bound on top: if the policies want more
than budget x lines, the largest lines are cut alike, down to the tokens with the most attention. A budget of 100 %
bounds nothing, and identity is `threshold` 1.

Deviations: the profile is that of the last `observe` tokens, whose attention is closest to what will be asked, not of
the whole prompt; sinks and `recent` tokens are part of every policy; frequent tokens are those with the most attention
from the last `observe` tokens, chosen anew at each selection. Query heads that share keys share a policy, by the mean
of what it recovers. A model without a tokenizer has neither special tokens nor punctuation.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from penstock.core.selection import KVLine, Selecting, Watches
from penstock.select.bench import SelectionBench
from penstock.select.slots import F32, I32, Mask, TokenSelector, allot, always, fill, slots

POLICIES = ("special", "punctuation", "frequent", "local", "full")
"""Each contains those before it."""
FULL = len(POLICIES) - 1
_POLICY = "policy"


class Offer(NamedTuple):
    """What a policy would keep [n], and how much of the observed attention it recovers."""

    kept: Mask
    recovered: float


class FastGen(TokenSelector):
    """stats: `policy`, 1 + the index of the head's policy, at every token that was there when it was chosen."""

    name = "fastgen"
    watches: Watches = "recent"

    def __init__(self, bench: SelectionBench) -> None:
        super().__init__(bench)
        self._kinds = (_Kind(bench.is_special), _Kind(bench.is_punctuation))

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        wanted: list[Mask] = []
        points: list[F32] = []
        for line in lines:
            seen: F32 = line.recent().mean(axis=1)
            offers = self.offers(line, at, seen)
            wanted.append(offers[self._policy(line, at, offers)].kept)
            points.append(seen.mean(axis=0))
        sizes = np.array([mask.sum() for mask in wanted], np.int64)
        total = at.budget * len(lines)
        if at.budget >= at.num_tokens or sizes.sum() <= total:
            return [slots(mask) for mask in wanted]
        sure = [always(line, at, self.options) for line in lines]
        least = np.array([mask.sum() for mask in sure], np.int64)
        counts = least + allot(total - int(least.sum()), np.ones(len(lines)), sizes - least)
        return [
            slots(fill(mask, p, int(count), want))
            for mask, p, count, want in zip(sure, points, counts, wanted, strict=True)
        ]

    def offers(self, line: KVLine, at: Selecting, seen: F32) -> list[Offer]:
        """Every policy for a line whose last tokens attend as `seen` [w, n] says."""
        o, ids = self.options, at.tokens[line.positions]
        own = np.arange(at.num_tokens - len(seen), at.num_tokens)[:, None]
        ages = own - line.positions[None]
        nothing = np.zeros(len(line), np.bool_)
        special, punctuation = (kind(ids) for kind in self._kinds)
        frequent = fill(nothing, seen.sum(axis=0), round(o.frequent * at.num_tokens))
        local = max(o.recent, round(o.local * at.num_tokens))
        parts = [(special, o.recent), (punctuation, o.recent), (frequent, o.recent), (nothing, local)]
        out = []
        mask = line.positions < o.sinks
        for more, near in parts:
            mask = mask | more
            recovered = float((seen * (mask | (ages < near))).sum() / len(seen))
            out.append(Offer(mask | (line.positions >= at.num_tokens - near), recovered))
        return [*out, Offer(~nothing, 1.0)]

    def _policy(self, line: KVLine, at: Selecting, offers: list[Offer]) -> int:
        """The head's; chosen while the prompt is read, and then kept."""
        known = line.stats.get(_POLICY)
        if at.num_tokens > at.prompt_len and known is not None and known.max(initial=0) > 0:
            return int(known.max()) - 1
        t = self.options.threshold
        chosen = next((i for i, offer in enumerate(offers[:FULL]) if t < 1 and offer.recovered >= t), FULL)
        line.stats[_POLICY] = np.full(len(line), chosen + 1, np.float32)
        return chosen


class _Kind:
    """A question about token ids, asked once each."""

    def __init__(self, asked: Callable[[int], bool]) -> None:
        self._asked = asked
        self._known: dict[int, bool] = {}

    def __call__(self, ids: I32) -> Mask:
        known = self._known
        for i in np.unique(ids).tolist():
            if i not in known:
                known[i] = bool(self._asked(i))
        return np.array([known[i] for i in ids.tolist()], np.bool_)


def make(bench: SelectionBench) -> FastGen:
    return FastGen(bench)
