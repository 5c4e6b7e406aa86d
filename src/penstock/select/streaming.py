"""StreamingLLM: the first tokens (attention sinks) and the most recent ones; positions count within the cache.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453, section 3.2. A softmax
has to put its weight somewhere, and trained models put it on the first tokens: a window without them falls apart.
Tokens take the positions at which they stand in the cache, so no distance is longer than the cache.

What is dropped follows from positions alone, so whoever keeps the tables does it, block by block, and no score is
looked at. There whole blocks go, so up to a block more stays at either edge than here, where the paper's rule is
written down slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from penstock.core.selection import Drops, KVLine, Selecting
from penstock.select.bench import SelectionBench
from penstock.select.slots import I32, TokenSelector


def gap(num_tokens: int, budget: int, sinks: int) -> range:
    """Positions that are forgotten: behind the sinks, before the most recent; empty while everything fits.

    At least the newest token stays beside the sinks.
    """
    sinks = min(sinks, budget - 1)
    return range(sinks, max(sinks, num_tokens - (budget - sinks)))


class Streaming(TokenSelector):
    """See the module."""

    name = "streaming"
    drops: Drops = "blocks"
    per_head = False
    cache_positions = True

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """The rule by slots, for what keeps single tokens. See `KVSelector.select`."""
        lost = gap(at.num_tokens, at.budget, self.options.sinks)
        return [
            np.flatnonzero((line.positions < lost.start) | (line.positions >= lost.stop)).astype(np.int32)
            for line in lines
        ]


def make(bench: SelectionBench) -> Streaming:
    return Streaming(bench)
