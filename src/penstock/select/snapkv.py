"""SnapKV: the tokens at the prompt's end vote on what of the prompt matters.

Source: Li et al., SnapKV, arXiv 2404.14469, section 4. What an observation window at the end of a prompt attends to is
what the answer will attend to; votes are smoothed over neighbours, so that a fact is kept with its surroundings.

The window is `observe` tokens, its votes their mean attention over the query heads that share the keys, smoothed by the
mean over `pool` neighbours. What is no longer there gets and passes on no votes. The paper selects once, behind the
prompt; here the last tokens vote again at every later selection, so that output is cut, too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from penstock.config.selection import SelectionOptions
from penstock.core.selection import KVLine, Selecting, Watches
from penstock.select.bench import SelectionBench
from penstock.select.slots import F32, I32, TokenSelector, best_of_each


def votes(line: KVLine, at: Selecting, options: SelectionOptions) -> F32:
    """[n]: the mean attention of the last tokens, smoothed before the `recent` ones, as it is among them."""
    seen: F32 = line.recent().mean(axis=(0, 1))
    prefix = int(np.searchsorted(line.positions, at.num_tokens - options.recent))
    return np.concatenate([smoothed(seen[:prefix], options.pool), seen[prefix:]])


def smoothed(x: F32, width: int) -> F32:
    """[n] -> [n]: means over `width` neighbours, itself in the middle; beyond the ends are zeros."""
    if not len(x):
        return x
    around = np.pad(x, (width // 2, width - 1 - width // 2))
    return np.convolve(around, np.full(width, 1 / width, np.float32), "valid").astype(np.float32)


class SnapKV(TokenSelector):
    """See the module."""

    name = "snapkv"
    watches: Watches = "recent"

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        return best_of_each(at, lines, self.options, lambda line: votes(line, at, self.options))


def make(bench: SelectionBench) -> SnapKV:
    return SnapKV(bench)
