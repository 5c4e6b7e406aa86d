"""How a draft model's logits become drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.rng import uniform
from penstock.core.draft import ROOT, UNKNOWN, DraftJob, Outcome
from penstock.drafters.aligned import MAX_ALIGNED_VOCAB, Alignment, Draw
from penstock.runner.sampler import SICK, DraftNode, Sampler
from penstock.runner.truncate import truncate

F32 = npt.NDArray[np.float32]

DRAFT_DRAW = 64
"""Philox draw id of a tree's draft 0, where drafts are drawn for themselves: none of those that verifying uses. The
i-th of several drafters begins i * DRAFT_DRAW later, so that no two draw with the same number."""
DRAWING_VERIFIERS = frozenset({"speculative-sampling", "multi-step", "spectr"})
"""They want drafts that were drawn from a distribution, and the distribution."""


class Candidate(NamedTuple):
    """One draft behind `parent`: what the draft model thinks of it, and what it was drawn from, if it was drawn.

    `worth`: what it is ranked by where there is no room for all, if that is not its probability: under sampling the
    choice may be an unlikely token, and is still the best draft.
    """

    token_id: int
    parent: int
    prob: float
    drawn_from: F32 | None = None
    worth: float | None = None


class Sprout:
    """The tree of one job while it grows. `front`: the drafts (ROOT: the newest known token) to be grown next."""

    def __init__(self, job: DraftJob, num_nodes: int, max_depth: int) -> None:
        self.job, self.num_nodes, self.max_depth = job, num_nodes, max_depth
        self.candidates: list[Candidate] = []
        self.front: list[int] = [ROOT]
        self.depth = 0
        """Of the front."""
        self.num_run = 0
        """Drafts, in their order, that the draft model has run."""
        self.draws: dict[int, Draw] = {}
        """What was drawn with the position's own number behind a node, for `Chooser.learn`."""

    @property
    def token_ids(self) -> list[int]:
        return [candidate.token_id for candidate in self.candidates]

    @property
    def parents(self) -> list[int]:
        return [candidate.parent for candidate in self.candidates]

    @property
    def is_chain(self) -> bool:
        return all(candidate.parent == i - 1 for i, candidate in enumerate(self.candidates))

    @property
    def room(self) -> int:
        return self.num_nodes - len(self.candidates)

    def path(self, node: int) -> list[int]:
        """The tokens from behind the root to a node."""
        out: list[int] = []
        while node != ROOT:
            out.append(self.candidates[node].token_id)
            node = self.candidates[node].parent
        return out[::-1]

    def worth(self, node: int) -> float:
        """Of the whole path to a node."""
        out = 1.0
        while node != ROOT:
            candidate = self.candidates[node]
            out *= candidate.prob if candidate.worth is None else candidate.worth
            node = candidate.parent
        return out

    def add(self, candidates: Sequence[Candidate]) -> None:
        """The next level, below the front. Mutates: self; the front is what can grow further."""
        first = len(self.candidates)
        self.candidates += candidates[: self.room]
        self.depth += 1
        grows = self.room > 0 and self.depth < self.max_depth
        self.front = list(range(first, len(self.candidates))) if grows else []

    def replace(self, every: Sequence[Candidate], kept: Sequence[int], front: Sequence[int]) -> None:
        """The tree is now `every` draft of `kept` (ascending, parents among them); `front` of them can grow further.

        Mutates: self. What the draft model has run counts as far as nothing before it was given up.
        """
        place = {ROOT: ROOT, **{node: i for i, node in enumerate(kept)}}
        self.num_run = next((i for i, node in enumerate(kept) if node != i), min(len(kept), self.num_run))
        self.num_run = min(self.num_run, len(self.candidates))
        self.candidates = [every[i]._replace(parent=place[every[i].parent]) for i in kept]
        self.draws = {place[node]: draw for node, draw in self.draws.items() if node in place}
        self.depth += 1
        self.front = [place[i] for i in front] if self.depth < self.max_depth else []


class Chooser:
    """Final logits and choices at the fronts of many trees, in one go.

    A draft is what the sampler would choose if the draft model were the model: greedily, or with the very draw that
    belongs to the position (`aligned`). Both models then look at the same random number, and agree far more often than
    two draws of their own would. With `own_draws` drafts are drawn with numbers of their own, and their distribution
    is kept.
    """

    def __init__(self, sampler: Sampler, vocab_size: int, *, own_draws: bool = False, number: int = 0) -> None:
        """`number`: which of several drafters of the same sequences this is."""
        self._sampler, self._vocab_size, self._own_draws = sampler, vocab_size, own_draws
        self._first_draw = DRAFT_DRAW * (1 + number)
        self._aligns = vocab_size <= MAX_ALIGNED_VOCAB
        self.alignment = Alignment()

    def draws(self, job: DraftJob) -> bool:
        """Whether this job's drafts are drawn for themselves."""
        return self._own_draws and not job.rules.greedy

    def final(self, sprouts: Sequence[Sprout], logits: Sequence[F32]) -> F32:
        """[R, V]: the rows of all fronts, one after the other, as processors leave them.

        Shapes: logits[i] [fronts of sprouts[i], V or what the draft model has], not written to.
        """
        out = np.full((sum(map(len, logits)), self._vocab_size), -np.inf, np.float32)
        r = 0
        for sprout, rows in zip(sprouts, logits, strict=True):
            width = min(self._vocab_size, rows.shape[1])
            out[r : r + len(rows), :width] = rows[:, :width]
            chain, seq_id = self._sampler.chain, sprout.job.seq_id
            if chain.follows(seq_id):
                for node in sprout.front:
                    path = sprout.path(node)
                    chain.advance(seq_id, path)
                    chain.apply(out[r : r + 1], [seq_id])
                    chain.rollback(seq_id, len(path))
                    r += 1
            else:
                r += len(rows)
        return out

    def tokens(self, sprouts: Sequence[Sprout], final: F32) -> list[int]:
        """The choice at every row; SICK where there is none."""
        nodes: list[DraftNode] = []
        drafted: dict[int, int] = {}
        r = 0
        for sprout in sprouts:
            job, position = sprout.job, len(sprout.job.tokens) + sprout.depth
            for node in sprout.front:
                if self._aligns and not job.rules.greedy and np.isfinite(final[r].max()):
                    drafted[r], sprout.draws[node] = self.alignment.choose(
                        final[r], job.rules, job.sample_index, position
                    )
                else:
                    nodes.append(DraftNode(r, job.rules, job.sample_index, position))
                r += 1
        rest = iter(self._sampler.sample(final, (), nodes).choices)
        return [drafted[i] if i in drafted else next(rest) for i in range(r)]

    def learn(self, sprout: Sprout, outcome: Outcome) -> None:
        """What the model has chosen behind the nodes that it has reached in a sprout's own tree. Mutates: self."""
        above, token = ROOT, outcome.choices[0]
        while token != UNKNOWN:
            if above in sprout.draws:
                self.alignment.learn(sprout.draws[above], token)
            here = next((i for i in outcome.path if outcome.tree.parents[i] == above), None)
            if here is None or here >= len(sprout.candidates) or sprout.candidates[here][:2] != (token, above):
                return
            above, token = here, outcome.choices[here + 1]

    def drawn(self, sprout: Sprout, parent: int, row: F32, first: int, count: int) -> list[Candidate]:
        """`count` independent draws behind `parent`, to become drafts first, first + 1, ...; [] where there are none.

        Siblings may be equal. Shapes: row [V].
        """
        if not np.isfinite(row.max()):
            return []
        job = sprout.job
        ids, weights = truncate(row, job.rules)
        sums = np.cumsum(weights)
        total = int(sums[-1])
        dist = np.zeros(len(row), np.float32)
        dist[slice(None) if ids is None else ids] = weights / total
        position = len(job.tokens) + sprout.depth
        out = []
        for i in range(count):
            bits = int(uniform(job.rules.seed, job.sample_index, position, self._first_draw + first + i) * 2**53)
            slot = int(np.searchsorted(sums, bits * total >> 53, side="right"))
            token = slot if ids is None else int(ids[slot])
            out.append(Candidate(token, parent, float(dist[token]), dist))
        return out


def softmax(rows: F32, temperatures: Sequence[float]) -> F32:
    """[R, V] -> [R, V]; a row without a finite logit becomes zeros."""
    heat = np.asarray(temperatures, np.float32)[:, None]
    peaks = rows.max(axis=1, keepdims=True)
    fit = np.isfinite(peaks)
    with np.errstate(all="ignore"):
        out: F32 = np.exp((rows - peaks) / heat)
        out /= out.sum(axis=1, keepdims=True)
    out[~fit[:, 0]] = 0.0
    return out


__all__ = ["DRAFT_DRAW", "DRAWING_VERIFIERS", "SICK", "Candidate", "Chooser", "Sprout", "softmax"]
