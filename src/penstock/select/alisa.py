"""ALISA: half of the budget for new tokens, half (`heavy`) for those with the most attention; what is not chosen waits.

Source: Zhao et al., ALISA, arXiv 2403.17312, section 4 (sparse window attention: locally static and globally dynamic
tokens) and section 5 (where tokens wait that are not chosen). A token's score is the sum of the attention that the last
`observe` tokens pay to it, over the query heads that share its keys. Nothing is lost by not being chosen: `kv.aside`
keeps all tokens, on the device, in host memory, or as ids that are computed again, and the next selection chooses among
all of them.

The paper chooses before every token, by the attention of sparse steps, in which what was not chosen has none. Here a
choice stands for `interval` tokens, and everything is scored. The sinks count, and stay.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.core.selection import KVLine, Selecting, Watches
from penstock.select.bench import SelectionBench
from penstock.select.slots import F32, I32, TokenSelector, best_of_each


class Alisa(TokenSelector):
    """See the module."""

    name = "alisa"
    watches: Watches = "recent"
    aside = True

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """See `KVSelector.select`."""
        o = self.options
        recent = max(o.recent, at.budget - o.sinks - round(o.heavy * at.budget))
        return best_of_each(at, lines, o, _mass, recent)


def _mass(line: KVLine) -> F32:
    seen: F32 = line.recent().sum(axis=(0, 1))
    return seen


def make(bench: SelectionBench) -> Alisa:
    return Alisa(bench)
