"""Ada-KV: the heads of a layer compete for the layer's budget.

Source: Feng et al., Ada-KV, arXiv 2407.11550, algorithm 1: the best scores of all heads of a layer together, instead of
as many of each, lose the least attention. Scores are SnapKV's votes.

Every head keeps sinks, recent tokens and, by its own best votes, at least `floor` of the budget; what is left of the
layer's budget goes to the best votes that remain, of any head. Equal shares are one of the choices that this rule picks
the best of, so in every layer the votes kept are never less than SnapKV's. The paper mixes equal shares and the free
choice in the ratio of its safeguard (alpha = 0.2) instead, which keeps as many or fewer votes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import groupby

import numpy as np

from penstock.core.selection import KVLine, Selecting, Watches
from penstock.select.bench import SelectionBench
from penstock.select.slots import F32, I32, TokenSelector, always, fill, slots
from penstock.select.snapkv import votes


class AdaKV(TokenSelector):
    """See the module."""

    name = "adakv"
    watches: Watches = "recent"

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        out: list[I32] = []
        for _, group in groupby(lines, key=lambda line: line.layer):
            out += self._layer(at, list(group))
        return out

    def _layer(self, at: Selecting, heads: list[KVLine]) -> list[I32]:
        total = at.budget * len(heads)
        if sum(map(len, heads)) <= total:
            return [np.arange(len(line), dtype=np.int32) for line in heads]
        floor = int(self.options.floor * at.budget)
        points: list[F32] = [votes(line, at, self.options) for line in heads]
        sure = [fill(always(line, at, self.options), p, floor) for line, p in zip(heads, points, strict=True)]
        # As one long line; of equal votes those of the last head come first, its newest before all.
        kept = fill(np.concatenate(sure), np.concatenate(points), total)
        ends = np.cumsum([len(line) for line in heads])[:-1]
        return [slots(mask) for mask in np.split(kept, ends)]


def make(bench: SelectionBench) -> AdaKV:
    return AdaKV(bench)
