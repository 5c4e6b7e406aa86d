"""The most recent tokens and nothing else: what every selector has to be better than.

Known as window attention (Beltagy et al., Longformer, arXiv 2004.05150, section 3.1). Sinks are not kept, whatever the
options say: with them it would be `streaming`, but for the positions, which stay what they were.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from penstock.core.selection import KVLine, Selecting
from penstock.select.bench import SelectionBench
from penstock.select.slots import I32, TokenSelector


class Window(TokenSelector):
    """See the module."""

    name = "window"
    per_head = False

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        return [np.arange(max(0, len(line) - at.budget), len(line), dtype=np.int32) for line in lines]


def make(bench: SelectionBench) -> Window:
    return Window(bench)
