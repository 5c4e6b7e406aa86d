"""A trained head predicts the model's next hidden states, one after the other, and a tree of drafts grows on them.

The head (`eagle_head`) reads the hidden state that the newest token was chosen from, and that token; the model's own
output matrix turns the state that it predicts into drafts; each draft and the predicted state are its next input. All
sequences of a step go through it together, level by level. Of each level the likeliest drafts are expanded, and the
likeliest `num_nodes` of all are proposed.

Sources: Li et al., EAGLE, arXiv 2401.15077 (the head); Li et al., EAGLE-2, arXiv 2406.16858, section 4 (the tree).
There the head attends to the whole text. Here it keeps a window of each sequence's newest slots, because hidden states
of prompts are not at hand: those that came from the prefix cache were never computed. A learnt vector stands in for
them, so there are drafts right behind a prompt too. `tools/train/eagle.py` trains heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome
from penstock.drafters.bench import DraftBench
from penstock.drafters.choose import Chooser, Sprout, softmax
from penstock.drafters.eagle_head import F32, I64, EagleHead, Known, Queries, read_eagle
from penstock.drafters.expanders import KAry, Likeliest
from penstock.drafters.heads import heads_problem
from penstock.drafters.per_row import PerRow
from penstock.model.forward import HeadForward
from penstock.runner.sampler import Sampler
from penstock.runner.storage import Storage

WIDTH = 4
"""Drafts of a level that are expanded, and drafts behind each."""
DEPTH = 8
"""Levels at most: each is a pass of the head."""

_CHAIN, _TREE = KAry(1), Likeliest(WIDTH)


class Slots:
    """The newest slots of one sequence.

    Attributes:
        ring: [2, W, E] keys and values; slot i is kept at i % W.
        end: slots before this one have been filled.
        root: position of the newest known token when drafts were last asked for.
        features: [A, E] of positions start, start + 1, ...: what the model has told last.
    """

    __slots__ = ("end", "features", "ring", "root", "start")

    def __init__(self, head: EagleHead) -> None:
        self.ring = np.zeros((2, head.window, head.hidden_size), np.float32)
        self.features: F32 = np.zeros((0, head.hidden_size), np.float32)
        self.end = self.root = self.start = 0

    def unfilled(self) -> range:
        """Slots of the window that are to be filled: the newest one always."""
        newest = self.root - 1
        return range(max(min(self.end, newest), newest + 1 - self.ring.shape[1], 0), newest + 1)

    def known(self, slots: range) -> tuple[F32, Known]:
        """The features [P, E] of slots, as far as they are known, and which are."""
        at = np.arange(slots.start, slots.stop) - self.start
        known = (at >= 0) & (at < len(self.features))
        found = np.zeros((len(slots), self.features.shape[1]), np.float32)
        found[known] = self.features[at[known]]
        return found, known

    def ages(self) -> I64:
        """[W] how many slots each of the ring lies behind the newest; W: it was never filled."""
        newest, window = self.root - 1, self.ring.shape[1]
        ages: I64 = (newest - np.arange(window)) % window
        return np.where(ages <= newest, ages, window)


class Front:
    """The ends of J trees: which row of the arrays each of them is, by the tokens that lead there.

    Attributes:
        features: [R, E] what the head predicts behind each.
        path: [2, R, L, E] keys and values of the L drafts that lead there.
    """

    def __init__(self, features: F32) -> None:
        self.features = features
        self.path: F32 = np.zeros((2, len(features), 0, features.shape[1]), np.float32)
        self._rows: list[dict[tuple[int, ...], int]] = [{(): row} for row in range(len(features))]

    def follow(self, sprouts: Sequence[Sprout]) -> tuple[I64, I64, I64, I64]:
        """The fronts of the J trees now: tree, branch and token of each end, and the row it grows from; [R] each."""
        rows: list[tuple[int, int, int, int]] = []
        below: list[dict[tuple[int, ...], int]] = []
        for j, (sprout, above) in enumerate(zip(sprouts, self._rows, strict=True)):
            paths = [tuple(sprout.path(node)) for node in sprout.front]
            below.append({path: len(rows) + b for b, path in enumerate(paths)})
            rows += [(j, b, path[-1], above[path[:-1]]) for b, path in enumerate(paths)]
        self._rows = below
        tree, branch, token, row = np.array(rows, np.int64).T
        return tree, branch, token, row


class EagleDrafter(PerRow[Slots]):
    """Chosen drafts, no drawn ones, as of other heads: verifiers that draw take them for what they are."""

    name = "eagle"
    wants_hidden = True

    def __init__(
        self,
        head: EagleHead,
        forward: HeadForward,
        embeddings: Callable[[I64], F32],
        storage: Storage,
        sampler: Sampler,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self.head = head
        self._forward, self._embeddings, self._storage = forward, embeddings, storage
        self._chooser = Chooser(sampler, vocab_size)
        self._proposed: dict[int, Sprout] = {}
        self.num_rows = 0
        """Rows that the head was run on, roots and drafts."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        self._proposed.clear()
        sprouts: list[Sprout] = []
        for job in jobs:
            slots = self.states.setdefault(job.seq_id, Slots(self.head))
            slots.root = len(job.tokens) - 1
            depth = min(job.max_depth, DEPTH, self.head.window)
            if slots.root > 0 and depth > 0 and job.num_nodes > 0:
                sprouts.append(Sprout(job, min(job.num_nodes, depth) if job.chain_only else job.num_nodes, depth))
        if sprouts:
            with np.errstate(all="ignore"):  # what is not finite leads to no draft, and must not stop the others
                self._draft(sprouts)
        self._proposed = {sprout.job.seq_id: sprout for sprout in sprouts if sprout.candidates}
        return [self._tree(self._proposed.get(job.seq_id)) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            sprout = self._proposed.pop(outcome.seq_id, None)
            if sprout is not None:
                self._chooser.learn(sprout, outcome)
            slots = self.states.get(outcome.seq_id)
            if slots is not None:
                assert outcome.hidden is not None, "the rank gives hidden states to who wants them"
                slots.start, slots.features = slots.root, outcome.hidden[[0, *(i + 1 for i in outcome.path)]]

    # -- running ------------------------------------------------------------------------------------------------------

    def _draft(self, sprouts: Sequence[Sprout]) -> None:
        """Mutates: the sprouts, which grow until they are done."""
        every = [self.states[sprout.job.seq_id] for sprout in sprouts]
        x, q = self._fill(sprouts, every)
        ring, ages = np.stack([slots.ring for slots in every], axis=1), np.stack([slots.ages() for slots in every])
        trees = np.arange(len(sprouts))
        front = Front(x)
        queries = Queries(q, trees, np.zeros_like(trees), front.path)
        while True:
            front.features = self.head.predict(x, self.head.attend(queries, ring, ages))
            self.num_rows += len(x)
            self._grow([sprout for sprout in sprouts if sprout.front], front.features)
            if not any(sprout.front for sprout in sprouts):
                return
            tree, branch, tokens, above = front.follow(sprouts)
            sure = np.ones(len(tokens), np.bool_)
            x = self.head.pairs(front.features[above], sure, self._embeddings(tokens))
            q, own = self.head.project(x)
            front.path = np.concatenate([front.path[:, above], own[:, :, None]], axis=2)
            queries = Queries(q, tree, branch, front.path)

    def _fill(self, sprouts: Sequence[Sprout], every: Sequence[Slots]) -> tuple[F32, F32]:
        """Fill the slots that are new. Returns the newest pair of each sequence, and its query: [J, E] each.

        Mutates: the slots.
        """
        wanted = [slots.unfilled() for slots in every]
        told = [slots.known(new) for slots, new in zip(every, wanted, strict=True)]
        tokens = [s.job.tokens[new.start + 1 : new.stop + 1] for s, new in zip(sprouts, wanted, strict=True)]
        x = self.head.pairs(
            np.concatenate([features for features, _ in told]),
            np.concatenate([known for _, known in told]),
            self._embeddings(np.concatenate(tokens).astype(np.int64)),
        )
        q, own = self.head.project(x)
        ends = np.cumsum([len(new) for new in wanted])
        for slots, new, end in zip(every, wanted, ends.tolist(), strict=True):
            slots.ring[:, np.arange(new.start, new.stop) % self.head.window] = own[:, end - len(new) : end]
            slots.end = new.stop
        return x[ends - 1], q[ends - 1]

    def _grow(self, sprouts: Sequence[Sprout], features: F32) -> None:
        """Give every sprout its next level. Shapes: features [R, E], those of all fronts. Mutates: the sprouts."""
        counts = [len(sprout.front) for sprout in sprouts]
        logits = self._forward.run_head(features, self._storage.planes)
        final = self._chooser.final(sprouts, np.split(logits, np.cumsum(counts)[:-1]))
        choices = self._chooser.tokens(sprouts, final)
        temperatures = [1.0 if s.job.rules.greedy else s.job.rules.temperature for s in sprouts for _ in s.front]
        probs = softmax(final, temperatures)
        end = 0
        for sprout, count in zip(sprouts, counts, strict=True):
            rows = slice(end, end := end + count)
            (_CHAIN if sprout.job.chain_only else _TREE).grow(sprout, probs[rows], choices[rows])

    @staticmethod
    def _tree(sprout: Sprout | None) -> DraftTree:
        if sprout is None:
            return NO_DRAFT
        return DraftTree(sprout.token_ids, sprout.parents, [candidate.prob for candidate in sprout.candidates])


def make(bench: DraftBench) -> EagleDrafter:
    """Raises: ConfigError for heads that are missing, unsound, or trained on another model."""
    target = bench.target
    if target is None or not isinstance(target.forward, HeadForward):
        raise heads_problem("method eagle needs a model that gives hidden states, which this one does not")
    if bench.config.heads is None:
        raise heads_problem("method eagle needs heads: the folder of the trained head")
    assert bench.sampler is not None, "a rank has a sampler"
    head = read_eagle(Path(bench.config.heads), target.spec.hidden_size, target.fingerprint())
    return EagleDrafter(head, target.forward, target.embeddings, bench.storage, bench.sampler, bench.vocab_size)
