"""A smaller model drafts: the k tokens that it would generate, or a tree of them.

Sources: Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318 (a draft model proposes, the model
verifies); k-ary trees: Miao et al., SpecInfer, arXiv 2305.09781, section 3 (expansion-based).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, ROOT, DraftJob, DraftTree, Outcome
from penstock.drafters.bench import DraftBench, DraftModel
from penstock.drafters.choose import DRAWING_VERIFIERS, F32, Candidate, Chooser, Sprout, softmax
from penstock.drafters.expanders import Expander, KAry, expander
from penstock.drafters.filled import Filled
from penstock.drafters.forward import Ahead, DraftForward

CATCH_UP = 2048
"""Tokens at most that one step runs because the draft model has not seen them yet."""

_CHAIN = KAry(1)


class DraftModelDrafter:
    """Runs a draft model over the rank's rows, in cache groups of its own, level by level for all jobs together.

    What it has not seen of a sequence (the prompt; what came with the prefix cache, or was drafted by others) it
    catches up with when the sequence wants drafts; until then there are none. Wrong or missing entries would cost
    acceptance, never a token.
    """

    name = "draft-model"
    wants_hidden = False

    def __init__(
        self, model: DraftModel, bench: DraftBench, expander: Expander, *, own_draws: bool = False, number: int = 0
    ) -> None:
        """`own_draws`, `number`: see `choose.Chooser`."""
        assert bench.sampler is not None, "a rank has a sampler"
        self.model = model
        self.forward = DraftForward(model.forward, bench.rows, bench.storage)
        self._filled = Filled(model.groups, bench.rows, bench.storage)
        self._chooser = Chooser(bench.sampler, bench.vocab_size, own_draws=own_draws, number=number)
        self._expander = expander
        self._proposed: dict[int, Sprout] = {}
        self.num_caught_up = 0
        """Tokens that were run before drafting, the newest known one of each job included."""

    def track(self, output: SchedulerOutput) -> None:
        self._filled.track(output.page_ops)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        self._proposed.clear()
        sprouts = [sprout for job in jobs if (sprout := self._sprout(job)) is not None]
        logits = self._catch_up(sprouts)
        growing = [sprout for sprout in sprouts if sprout.job.seq_id in logits]
        rows = [logits[sprout.job.seq_id] for sprout in growing]
        while growing:
            self._grow(growing, rows)
            growing = [sprout for sprout in growing if sprout.front]
            if growing:
                rows = self._run(growing)
        self._proposed = {sprout.job.seq_id: sprout for sprout in sprouts if sprout.candidates}
        return [self._tree(self._proposed.get(job.seq_id)) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Entries of accepted drafts lie in the right slots by now, as far as they were run in the order verified."""
        for outcome in outcomes:
            sprout = self._proposed.pop(outcome.seq_id, None)
            if sprout is None:
                continue
            self._chooser.learn(sprout, outcome)
            self._expander.observe(outcome)
            tree, path = outcome.tree, outcome.path
            if sprout.job.chain_only and len(path) < len(tree.token_ids):
                continue  # all of the step is taken back
            kept, above = 0, ROOT
            for i in path:
                own = sprout.candidates[i] if i < sprout.num_run else None
                if own is None or own.token_id != tree.token_ids[i] or own.parent != above:
                    break
                kept, above = kept + 1, i
            known = len(sprout.job.tokens)
            self._filled.fill(outcome.seq_id, known, known + kept)

    # -- running ------------------------------------------------------------------------------------------------------

    def _sprout(self, job: DraftJob) -> Sprout | None:
        """None if the draft model cannot draft here: too far on, or a token that it does not know."""
        depth = min(job.max_depth, self.model.max_len + 1 - len(job.tokens))
        if depth <= 0 or job.num_nodes <= 0:
            return None
        return Sprout(job, min(job.num_nodes, depth) if job.chain_only else job.num_nodes, depth)

    def _catch_up(self, sprouts: Sequence[Sprout]) -> dict[int, F32]:
        """Logits [1, V] behind the newest known token of the sequences that have been caught up with."""
        behind = []
        for sprout in sprouts:
            seq_id, known = sprout.job.seq_id, len(sprout.job.tokens)
            done = self._filled.num_tokens(seq_id, known - 1)
            if sprout.job.tokens[done:].max() < self.model.vocab_size:
                behind.append((known - done, done, sprout))
        left, work = CATCH_UP, []
        for lag, done, sprout in sorted(behind, key=lambda item: item[0]):  # the long ones wait for nobody else's sake
            count = min(lag, left)
            if count:
                tokens = sprout.job.tokens[done : done + count]
                work.append(Ahead(sprout.job.seq_id, done, tokens, None, int(count == lag)))
                left -= count
        if not work:
            return {}
        self.num_caught_up += CATCH_UP - left
        logits = self.forward.run(work)
        for item in work:
            self._filled.fill(item.seq_id, item.start, item.start + len(item.token_ids))
        return {item.seq_id: rows for item, rows in zip(work, logits, strict=True) if item.num_wanted}

    def _run(self, sprouts: Sequence[Sprout]) -> list[F32]:
        """Logits behind every front. A chain goes on by its newest draft; a tree runs again from its root."""
        work, picked = [], []
        for sprout in sprouts:
            job, tokens = sprout.job, sprout.token_ids
            root, first = len(job.tokens) - 1, sprout.front[0]
            picked.append([node - first for node in sprout.front])
            if sprout.is_chain and sprout.num_run == len(tokens) - 1:
                work.append(Ahead(job.seq_id, root + len(tokens), tokens[-1:]))
            else:
                whole = [int(job.tokens[-1]), *tokens]
                work.append(Ahead(job.seq_id, root, whole, sprout.parents, len(tokens) - first))
            sprout.num_run = len(tokens)
        logits = self.forward.run(work)
        return [rows[own] for rows, own in zip(logits, picked, strict=True)]

    def _grow(self, sprouts: Sequence[Sprout], logits: Sequence[F32]) -> None:
        """Give every sprout its next level. Mutates: the sprouts."""
        final = self._chooser.final(sprouts, logits)
        choices = self._chooser.tokens(sprouts, final)
        temperatures = [1.0 if s.job.rules.greedy else s.job.rules.temperature for s in sprouts for _ in s.front]
        probs = softmax(final, temperatures)
        r = 0
        for sprout in sprouts:
            end = r + len(sprout.front)
            expander = _CHAIN if sprout.job.chain_only else self._expander
            if self._chooser.draws(sprout.job):
                sprout.add(self._drawn(sprout, expander.shape(sprout, probs[r:end]), final[r:end]))
            else:
                expander.grow(sprout, probs[r:end], choices[r:end])
            r = end

    def _drawn(self, sprout: Sprout, counts: Sequence[int], final: F32) -> list[Candidate]:
        """As many draws behind each of the front as the shape has drafts there: their number may not depend on what
        was drawn, or the draws were not from the distribution that is told."""
        out: list[Candidate] = []
        for parent, row, count in zip(sprout.front, final, counts, strict=True):
            out += self._chooser.drawn(sprout, parent, row, len(sprout.candidates) + len(out), count)
        return out

    @staticmethod
    def _tree(sprout: Sprout | None) -> DraftTree:
        if sprout is None:
            return NO_DRAFT
        dists = [candidate.drawn_from for candidate in sprout.candidates if candidate.drawn_from is not None]
        drawn = np.stack(dists) if len(dists) == len(sprout.candidates) else None
        return DraftTree(sprout.token_ids, sprout.parents, [candidate.prob for candidate in sprout.candidates], drawn)


def make_model_drafter(model: DraftModel, bench: DraftBench, number: int = 0) -> DraftModelDrafter:
    own_draws = bench.config.verifier in DRAWING_VERIFIERS
    return DraftModelDrafter(model, bench, expander(bench), own_draws=own_draws, number=number)


def make(bench: DraftBench) -> DraftModelDrafter:
    assert len(bench.models) == 1, "the launch has opened one draft model"
    return make_model_drafter(bench.models[0], bench)
