"""PyramidKV: SnapKV's votes, with budgets that fall from layer to layer.

Source: Cai et al., PyramidKV, arXiv 2406.02069: low layers attend widely, high ones to few tokens, so budgets fall
arithmetically from the lowest layer to the highest.

The lowest layer gets `slope` times the mean, the highest 2 - slope times. As in the paper, sinks and recent tokens are
every layer's and stand outside the pyramid. All lines together keep exactly budget x lines, or everything if that is
less: what a layer has no use for goes to the others. The paper's bound for the highest layer (the mean over beta = 20)
is a slope of 1.95; here it may be nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from penstock.core.selection import KVLine, Selecting, Watches
from penstock.select.bench import SelectionBench
from penstock.select.slots import I32, TokenSelector, allot, always, fill, slots
from penstock.select.snapkv import votes


def falling(layers: Seq[int], slope: float) -> npt.NDArray[np.float64]:
    """The weight of each line by its layer: from `slope` down to 2 - slope, 1 in the mean over layers."""
    ranks = {layer: i for i, layer in enumerate(sorted(set(layers)))}
    steps = max(1, len(ranks) - 1)
    alone = len(ranks) == 1
    return np.array([1.0 if alone else slope - 2 * (slope - 1) * ranks[layer] / steps for layer in layers])


class PyramidKV(TokenSelector):
    """See the module."""

    name = "pyramidkv"
    watches: Watches = "recent"

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        kept = [always(line, at, self.options) for line in lines]
        least = np.array([mask.sum() for mask in kept], np.int64)
        lengths = np.array([len(line) for line in lines], np.int64)
        weights = falling([line.layer for line in lines], self.options.slope)
        counts = least + allot(at.budget * len(lines) - int(least.sum()), weights, lengths - least)
        return [
            np.arange(len(line), dtype=np.int32)
            if count == len(line)
            else slots(fill(mask, votes(line, at, self.options), int(count)))
            for line, mask, count in zip(lines, kept, counts, strict=True)
        ]


def make(bench: SelectionBench) -> PyramidKV:
    return PyramidKV(bench)
