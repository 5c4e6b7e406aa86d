"""H2O: half of the budget for recent tokens, half for heavy hitters, those that have drawn the most attention so far.

Source: Zhang et al., H2O: Heavy-Hitter Oracle, arXiv 2306.14048, algorithm 1. A token's score is the sum
of the attention that it got from every token behind it, prompt and output alike; each head keeps its own.

The paper evicts one token with every new one; here the same choice is made every `interval` tokens, for all of them at
once. Query heads that share keys share their scores, as a sum. The sinks, which nearly always are heavy hitters, stay
whatever their score. Sums favour old tokens, which had more to look at them; so they do in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from penstock.core.selection import KVLine, Selecting, Watches
from penstock.select.bench import SelectionBench
from penstock.select.slots import F32, I32, TokenSelector, best_of_each, number

_MASS = "mass"


class HeavyHitters(TokenSelector):
    """stats: `mass`, attention received so far."""

    name = "h2o"
    watches: Watches = "all"

    def watch(self, line: KVLine, weights: F32, first: int) -> None:
        """Token by token, in order, so that the sums do not depend on how a text was cut into steps."""
        one_by_one = np.concatenate([number(line, _MASS)[None], weights.sum(axis=1)])
        line.stats[_MASS] = np.add.reduce(one_by_one, axis=0)

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        o = self.options
        recent = max(o.recent, at.budget - o.sinks - round(o.heavy * at.budget))
        return best_of_each(at, lines, o, lambda line: number(line, _MASS), recent)


def make(bench: SelectionBench) -> HeavyHitters:
    return HeavyHitters(bench)
