"""Scissorhands: drops the tokens that the recent past has most often given less than average attention.

Source: Liu et al., Scissorhands, arXiv 2305.17118, section 4: importance persists, so a token that the
tokens of a history window have not looked at will not be looked at later. Within the window it is counted how often a
token's attention was below 1/t, t tokens being there; those with the highest counts go, the recent ones stay.

The paper's window moves by the token, which takes every one of its rows. Here it moves by a quarter: counts are kept
for the quarter that is running and the three before, so that they tell of the last 3/4 to 4/4 of `history` tokens.
Quarters begin at multiples of their length, whatever the steps were. The paper drops half of the budget at a time; here
every `interval` tokens down to the budget. Query heads that share keys are averaged before they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from penstock.core.selection import KVLine, Selecting, Watches
from penstock.select.bench import SelectionBench
from penstock.select.slots import F32, I32, TokenSelector, best_of_each, number

PARTS = 4
_NAMES = tuple(f"below.{i}" for i in range(PARTS))


class Scissorhands(TokenSelector):
    """stats: `below.0` ... `below.3`, how many tokens of each quarter of the window looked at it less than average."""

    name = "scissorhands"
    watches: Watches = "all"

    def __init__(self, bench: SelectionBench) -> None:
        super().__init__(bench)
        self.length = -(-self.options.history // PARTS)
        """Tokens of a quarter."""

    def watch(self, line: KVLine, weights: F32, first: int) -> None:
        """See `KVSelector.watch`. A quarter's counts begin anew with its first token."""
        end = first + len(weights)
        own = np.arange(first, end)[:, None]
        there = line.positions[None] <= own
        below = (weights.mean(axis=1) < 1.0 / there.sum(axis=1, keepdims=True)) & there
        for name in _NAMES:
            number(line, name)
        while first < end:
            part = first // self.length
            until = min(end, (part + 1) * self.length)
            rows = below[len(below) - (end - first) : len(below) - (end - until)]
            name = _NAMES[part % PARTS]
            counts: F32 = rows.sum(axis=0, dtype=np.float32)
            line.stats[name] = line.stats[name] + counts if first % self.length else counts
            first = until

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        return best_of_each(at, lines, self.options, _importance)


def _importance(line: KVLine) -> F32:
    counts: F32 = np.stack([number(line, name) for name in _NAMES]).sum(axis=0)
    return -counts


def make(bench: SelectionBench) -> Scissorhands:
    return Scissorhands(bench)
