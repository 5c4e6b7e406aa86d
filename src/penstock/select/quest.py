"""Quest: nothing is forgotten; every token reads the pages that matter to it.

Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774. A page
keeps the least and the largest component of its keys, which bound every product of a query with one of them; pages
with the largest bounds are read, the first layers read everything.

The memory stays, so there is no choice to be made here: what is read is a matter of attention
(`core.selection.PageReads`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from penstock.config.selection import SelectionConfig
from penstock.core.selection import Drops, KVLine, PageReads, Selecting, Watches
from penstock.select.bench import SelectionBench

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class Quest:
    """See the module and `core.selection.KVSelector`."""

    name = "quest"
    drops: Drops = "nothing"
    watches: Watches = "nothing"
    per_head = False
    cache_positions = False

    def watch(self, line: KVLine, weights: F32, first: int) -> None:
        """It has nothing to learn."""

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """All of every line."""
        return [np.arange(len(line), dtype=np.int32) for line in lines]


def page_reads(config: SelectionConfig) -> PageReads:
    """What the model's attention is built with (`model.emitter.Reading.pages`)."""
    budget, options = config.budget, config.options
    return PageReads(budget.tokens, budget.share, options.recent, options.dense_layers)


def make(bench: SelectionBench) -> Quest:
    return Quest()
