"""Several drafters draft, and one tree of all their drafts is verified.

Source: Miao et al., SpecInfer, arXiv 2305.09781, section 3 (merge-based trees; section 4.3 for how they are verified).
The paper fixes the number of drafts of each drafter; here those are kept of which the most is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, ROOT, DraftJob, DraftTree, Outcome
from penstock.core.protocols import Drafter
from penstock.drafters import DRAFTERS
from penstock.drafters.bench import DraftBench
from penstock.drafters.choose import DRAWING_VERIFIERS, F32
from penstock.drafters.draft_model import make_model_drafter

_BUCKETS = 8
_PRIOR = 4.0
_MEMORY = 512.0
_UNKNOWN = 0.5
"""What a draft of a drafter that gives no probability is worth before anything was seen of it."""

Source = tuple[int, int]
"""A drafter's number, and how sure it was: which of its rates a draft counts for."""


class Rates:
    """How often each drafter's drafts were right, by how likely it thought they were, if what leads there was.

    Counts fade (half of them after 512), so that the rates follow the text.
    """

    def __init__(self) -> None:
        self._counts: dict[Source, tuple[float, float]] = {}

    def source(self, drafter: int, prob: float | None) -> Source:
        return drafter, _BUCKETS if prob is None else min(int(prob * _BUCKETS), _BUCKETS - 1)

    def rate(self, source: Source, prob: float | None) -> float:
        hits, tries = self._counts.get(source, (0.0, 0.0))
        return (hits + _PRIOR * (_UNKNOWN if prob is None else prob)) / (tries + _PRIOR)

    def count(self, source: Source, right: bool) -> None:
        hits, tries = self._counts.get(source, (0.0, 0.0))
        share = 0.5 if tries >= _MEMORY else 1.0
        self._counts[source] = (hits * share + right, tries * share + 1)


class Merged(NamedTuple):
    """A tree, the sources of each draft, and how likely each is to be accepted."""

    tree: DraftTree
    sources: list[list[Source]]
    scores: list[float]


class SpecInferDrafter:
    """Asks every drafter for all the drafts there is room for, and keeps the likeliest of them all.

    What a draft is worth is learnt from what was accepted. Where the verifier wants draws from known distributions,
    choosing among them would change the distribution: each drafter has a fixed share of the room then, and its drafts
    stand side by side.
    """

    name = "specinfer"

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int, *, own_draws: bool = False) -> None:
        self.drafters = tuple(drafters)
        self.wants_hidden = any(drafter.wants_hidden for drafter in drafters)
        self.rates = Rates()
        self._vocab_size, self._own_draws = vocab_size, own_draws
        self._merged: dict[int, Merged] = {}

    def track(self, output: SchedulerOutput) -> None:
        for drafter in self.drafters:
            drafter.track(output)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        self._merged.clear()
        asked = [[self._share(job, d) for job in jobs] for d in range(len(self.drafters))]
        proposals = [drafter.propose(work) for drafter, work in zip(self.drafters, asked, strict=True)]
        out: list[DraftTree] = []
        for job, *trees in zip(jobs, *proposals, strict=True):
            if self._draws(job):
                out.append(side_by_side(trees, self._vocab_size))
                continue
            merged = merge(trees, self.rates)
            merged = _kept(merged, best_path(merged) if job.chain_only else best_nodes(merged, job.num_nodes))
            self._merged[job.seq_id] = merged
            out.append(merged.tree)
        return out

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            merged = self._merged.pop(outcome.seq_id, None)
            if merged is None or merged.tree is not outcome.tree:
                continue
            reached = {ROOT, *outcome.path}
            for i, parent in enumerate(outcome.tree.parents):
                if parent in reached:
                    for source in merged.sources[i]:
                        self.rates.count(source, i in reached)
        for drafter in self.drafters:
            drafter.observe(outcomes)

    def _draws(self, job: DraftJob) -> bool:
        return self._own_draws and not job.rules.greedy

    def _share(self, job: DraftJob, drafter: int) -> DraftJob:
        if not self._draws(job):
            return job
        if job.chain_only:
            return job if drafter == 0 else job._replace(num_nodes=0)
        each, rest = divmod(job.num_nodes, len(self.drafters))
        return job._replace(num_nodes=each + (drafter < rest))


def merge(trees: Sequence[DraftTree], rates: Rates) -> Merged:
    """One tree of all: equal drafts behind equal drafts are one. Earlier trees come first."""
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[list[Source]] = []
    scores: list[float] = []
    own: list[float] = []
    place: dict[tuple[int, int], int] = {}
    for d, tree in enumerate(trees):
        here = {ROOT: ROOT}
        known = len(tree.probs) == len(tree.token_ids)
        for i, (token, above) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            prob = float(tree.probs[i]) if known else None
            source = rates.source(d, prob)
            parent, worth = here[above], rates.rate(source, prob)
            node = place.setdefault((parent, token), len(tokens))
            here[i] = node
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                sources.append([source])
                own.append(worth)
                scores.append(0.0)
            else:
                sources[node].append(source)
                own[node] = max(own[node], worth)
    for i, parent in enumerate(parents):
        scores[i] = own[i] * (1.0 if parent == ROOT else scores[parent])
    return Merged(DraftTree(tokens, parents, own), sources, scores)


def best_nodes(merged: Merged, num_nodes: int) -> list[int]:
    """The `num_nodes` likeliest drafts, in their order. No draft is likelier than the one it follows, so with a draft
    all that leads to it is among them."""
    scores = merged.scores
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:num_nodes])


def best_path(merged: Merged) -> list[int]:
    """The path of which most drafts are expected to be accepted."""
    sums: list[float] = []
    for score, parent in zip(merged.scores, merged.tree.parents, strict=True):
        sums.append(score + (0.0 if parent == ROOT else sums[parent]))
    path: list[int] = []
    node = max(range(len(sums)), key=lambda i: (sums[i], -i), default=ROOT)
    while node != ROOT:
        path.append(node)
        node = merged.tree.parents[node]
    return path[::-1]


def _kept(merged: Merged, kept: Sequence[int]) -> Merged:
    place = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
    tree = merged.tree
    left = DraftTree(
        [tree.token_ids[i] for i in kept], [place[tree.parents[i]] for i in kept], [tree.probs[i] for i in kept]
    )
    return Merged(left, [merged.sources[i] for i in kept], [merged.scores[i] for i in kept])


def side_by_side(trees: Sequence[DraftTree], vocab_size: int) -> DraftTree:
    """All trees below one root, equal drafts apart; a draft that was chosen counts as drawn from itself alone."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    dists: list[F32] = []
    for tree in trees:
        first = len(tokens)
        tokens += tree.token_ids
        parents += [ROOT if parent == ROOT else first + parent for parent in tree.parents]
        probs += tree.probs if len(tree.probs) == len(tree.token_ids) else [1.0] * len(tree.token_ids)
        dists.append(_certain(tree.token_ids, vocab_size) if tree.drawn_from is None else tree.drawn_from)
    return DraftTree(tokens, parents, probs, np.concatenate(dists)) if tokens else NO_DRAFT


def _certain(token_ids: Sequence[int], vocab_size: int) -> F32:
    """[K, V]: all of the mass on the token itself."""
    out = np.zeros((len(token_ids), vocab_size), np.float32)
    out[np.arange(len(token_ids)), token_ids] = 1.0
    return out


def make(bench: DraftBench) -> SpecInferDrafter:
    """Raises: ConfigError, as the drafters named do."""
    models = iter(bench.models)
    drafters: list[Drafter] = []
    for number, name in enumerate(part.strip() for part in (bench.config.model or "").split(",") if part.strip()):
        if name in DRAFTERS.names():
            own = replace(bench, config=replace(bench.config, method=name, model=None), models=())
            drafters.append(DRAFTERS.get(name)(own))
        else:
            drafters.append(make_model_drafter(next(models), bench, number))
    return SpecInferDrafter(drafters, bench.vocab_size, own_draws=bench.config.verifier in DRAWING_VERIFIERS)
