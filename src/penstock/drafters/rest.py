"""Retrieval: how texts of a datastore go on where they contain what was said last.

Source: He et al., REST, arXiv 2311.08252, section 3: the longest end of the text that the datastore contains, found by
a suffix array; what follows it there becomes a tree, pruned to the most frequent paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome
from penstock.drafters.bench import DraftBench
from penstock.drafters.datastore import ORDERED, Datastore, fingerprint, read
from penstock.drafters.trie import likeliest

SHORTEST = 2
"""Tokens that must be found: what follows a single one is anybody's draft."""
PLACES = 32
"""Occurrences that are counted, evenly spread over all."""


class RestDrafter:
    name = "rest"
    wants_hidden = False

    def __init__(self, store: Datastore) -> None:
        self._store = store

    def track(self, output: SchedulerOutput) -> None:
        """It keeps nothing."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._retrieve(job) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """It learns nothing."""

    def _retrieve(self, job: DraftJob) -> DraftTree:
        (low, high), length = self._longest(job.tokens[-ORDERED:].tolist())
        if low == high:
            return NO_DRAFT
        step = max(1, (high - low) // PLACES)
        count = min(job.num_nodes, job.max_depth)
        follows = [self._store.follow(place, length, count) for place in range(low, high, step)[:PLACES]]
        return likeliest(follows, job.num_nodes, job.max_depth, chain_only=job.chain_only)

    def _longest(self, tail: list[int]) -> tuple[tuple[int, int], int]:
        """The places of the longest end of `tail` that the datastore has, and its length.

        If n tokens are there, so are the last n - 1: bisection, with the short ends first because most text is new.
        """
        found, length = (0, 0), SHORTEST - 1
        beyond, step = len(tail) + 1, 1
        while length + 1 < beyond:
            middle = (
                min(length + step, (length + beyond) // 2) if beyond <= len(tail) else min(length + step, len(tail))
            )
            there = self._store.find(tail[-middle:])
            if there[0] < there[1]:
                found, length, step = there, middle, 2 * step
            else:
                beyond = middle
        return found, length


def make(bench: DraftBench) -> RestDrafter:
    path = bench.config.datastore
    if not path:
        raise ConfigError(
            "speculative_config: rest needs a datastore; make one with `penstock datastore build`, then name its file "
            "as datastore",
            field="speculative_config",
        )
    mark = None if bench.encode is None else fingerprint(bench.encode)
    return RestDrafter(read(Path(path), bench.vocab_size, mark))
