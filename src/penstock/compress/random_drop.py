"""The baseline: what is dropped is drawn. Any method has to be better than this at the same number of tokens."""

from __future__ import annotations

import random

from penstock.compress.drop import keep_units
from penstock.compress.units import UNITS
from penstock.core.compression import ContextJob, PromptCompression
from penstock.core.protocols import TokenReader


class RandomDrop:
    """Drops units (by default tokens) without looking at them. Same prompt, seed and target: same choice."""

    name = "random"
    reads = False
    options = frozenset(("unit", "seed"))
    units = ("token", "phrase", "sentence")

    def __init__(self, options: PromptCompression) -> None:
        self._cut = UNITS[options.unit or "token"]
        self._seed = options.seed or 0

    def keep(self, job: ContextJob, reader: TokenReader | None) -> list[int]:
        rng = random.Random(f"{self._seed} {len(job.ids)} {sum(job.ids)}")
        units = [unit for span in job.spans for unit in self._cut(job.texts, span)]
        worth = [rng.random() for _ in units]
        return keep_units(units, worth, {i: rng.random() for i in job.context()}, job.target)
