"""`random`: tokens by chance, head by head: what every selector has to be better than.

It keeps the same sinks and the same recent tokens as the selectors that look at attention, so that what differs between
them is the scores alone; `{"sinks": 0, "recent": 1}` makes it chance pure. Every token draws one number per head, from
(seed, layer, head, position), and keeps it: a token that stays once is not gambled for again, so over many selections
no token has fewer chances than another of its age.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from penstock.core.selection import KVLine, Selecting
from penstock.select.bench import SelectionBench
from penstock.select.slots import F32, I32, TokenSelector, best_of_each


def draws(seed: int, line: KVLine) -> F32:
    """[n] in [0, 1), of the tokens of a line. A token's number does not depend on how many there are."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, line.layer, line.head))))
    count = int(line.positions[-1]) + 1 if len(line) else 0
    return rng.random(count, np.float32)[line.positions]


class Chance(TokenSelector):
    """See the module."""

    name = "random"

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        return best_of_each(at, lines, self.options, lambda line: draws(self.options.seed, line))


def make(bench: SelectionBench) -> Chance:
    return Chance(bench)
