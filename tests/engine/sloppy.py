"""A drafter for tests: it knows the mock model, and is wrong as often as it is told to be."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import ROOT, DraftJob, DraftTree, Outcome
from tests.engine.fake_model import VOCAB, hash_step, history_hash, logits_of


class SloppyDrafter:
    """Trees of random shape; `share` of the drafts are the mock's likeliest token, the others are made up.

    Now and then it proposes nothing, or what breaks every rule of a proposal: the rank has to cope with it.
    """

    name = "sloppy"
    wants_hidden = False

    def __init__(self, seed: int, *, share: float = 0.7, trees: bool = True) -> None:
        self._rng = random.Random(seed)
        self._share = share
        self._trees = trees
        self.num_accepted = 0

    def track(self, output: SchedulerOutput) -> None:
        """It keeps nothing."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._propose(job) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self.num_accepted += len(outcome.path)

    def _propose(self, job: DraftJob) -> DraftTree:
        rng = self._rng
        hashes = [history_hash(job.tokens.tolist())]
        tokens: list[int] = []
        parents: list[int] = []
        for i in range(rng.randint(0, job.num_nodes)):
            parent = rng.randint(max(ROOT, i - 4), i - 1) if self._trees else i - 1
            above = hashes[parent + 1]
            token = int(logits_of(above).argmax()) if rng.random() < self._share else rng.randrange(VOCAB)
            tokens.append(token)
            parents.append(parent)
            hashes.append(hash_step(above, token))
        if rng.random() < 0.1:
            tokens += [VOCAB + 5, 3, 3]
            parents += [ROOT, len(tokens) + 3, ROOT]
        return DraftTree(tokens, parents)
