"""Selective Context: units that a small model expects anyway are dropped.

Source: Li et al., Compressing Context to Enhance Inference Efficiency of Large Language Models, arXiv 2310.06201,
sections 3.1 to 3.3 (first as arXiv 2304.12102). Self-information of a token is -log p of it behind all that stands
before it; the tokens of a unit are merged, and the units with the least are left out.

Two things differ. The ranking is by self-information per token: the sum, which the paper writes, favours whatever is
long, and here every token costs the same. And the share that stays is a number of tokens and exact, not a percentile of
units: the last unit to go is cut token by token.
"""

from __future__ import annotations

from penstock.compress.drop import keep_units
from penstock.compress.units import UNITS
from penstock.core.compression import ContextJob, PromptCompression
from penstock.core.protocols import TokenReader


class SelectiveContext:
    """Units: by default phrases (`compress.units`)."""

    name = "selective-context"
    reads = True
    options = frozenset(("unit",))
    units = ("token", "phrase", "sentence")

    def __init__(self, options: PromptCompression) -> None:
        self._cut = UNITS[options.unit or "phrase"]

    def keep(self, job: ContextJob, reader: TokenReader | None) -> list[int]:
        assert reader is not None
        last = job.spans[-1][1]  # what stands behind it changes nothing
        nats = reader.nats((), job.ids[:last]).tolist()
        units = [unit for span in job.spans for unit in self._cut(job.texts, span)]
        worth = [sum(nats[a:b]) / (b - a) for a, b in units]
        return keep_units(units, worth, {i: nats[i] for i in job.context()}, job.target)
