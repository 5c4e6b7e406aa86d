"""Prompt lookup: the sequence's last few tokens have come before; draft what followed them then.

Source: Saxena, Prompt Lookup Decoding (2023), https://github.com/apoorvumang/prompt-lookup-decoding; vLLM's `ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome, chain
from penstock.drafters.bench import DraftBench
from penstock.drafters.matches import ends_of


class NgramDrafter:
    """Looks for the longest suffix of `most` ... `least` tokens that occurs earlier, and drafts on from the latest
    place where it does. Where that place is so near that the drafts reach the end, they go on from its beginning:
    text that has repeated itself goes on repeating."""

    name = "ngram"
    wants_hidden = False

    def __init__(self, *, least: int = 1, most: int = 3) -> None:
        assert 1 <= least <= most, f"n-grams of {least} to {most} tokens"
        self._least, self._most = least, most

    def track(self, output: SchedulerOutput) -> None:
        """It keeps nothing: one scan of the row is short, see `drafters.matches`."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._look_up(job) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """It learns nothing."""

    def _look_up(self, job: DraftJob) -> DraftTree:
        tokens, count = job.tokens, min(job.num_nodes, job.max_depth)
        ends, _ = ends_of(tokens, tokens, self._least, self._most)
        if not ends.size:
            return NO_DRAFT
        follow = tokens[ends[-1] : ends[-1] + count]
        return chain((follow if len(follow) == count else np.resize(follow, count)).tolist())


def make(bench: DraftBench) -> NgramDrafter:
    return NgramDrafter(least=bench.config.prompt_lookup_min, most=bench.config.prompt_lookup_max)
