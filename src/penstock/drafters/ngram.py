"""Prompt lookup: the sequence's last few tokens have come before; guess what followed them then.

Source: Saxena, Prompt Lookup Decoding (2023), https://github.com/apoorvumang/prompt-lookup-decoding; vLLM's `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome, chain
from penstock.drafters.bench import DraftBench


class NgramDrafter:
    """Looks for the longest suffix of `most` ... `least` tokens that occurs earlier, and guesses on from the latest
    place where it does."""

    name = "ngram"
    wants_hidden = False

    def __init__(self, *, least: int = 1, most: int = 3) -> None:
        assert 1 <= least <= most, f"n-grams of {least} to {most} tokens"
        self._least, self._most = least, most

    def track(self, output: SchedulerOutput) -> None:
        """It keeps nothing."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._look_up(job) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """It learns nothing."""

    def _look_up(self, job: DraftJob) -> DraftTree:
        tokens, count = job.tokens, min(job.num_nodes, job.max_depth)
        for n in range(min(self._most, len(tokens) - 1), self._least - 1, -1):
            suffix = tokens[-n:]
            # Ends of earlier occurrences: the last token first, then the ones before it.
            ends = np.flatnonzero(tokens[n - 1 : -1] == suffix[-1]) + n
            for back in range(2, n + 1):
                ends = ends[tokens[ends - back] == suffix[-back]]
            if ends.size:
                follow = tokens[ends[-1] : ends[-1] + count]
                return chain(follow.tolist())
        return NO_DRAFT


def make(bench: DraftBench) -> NgramDrafter:
    return NgramDrafter(least=bench.config.prompt_lookup_min, most=bench.config.prompt_lookup_max)
