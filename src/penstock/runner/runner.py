"""One rank's step, in the order that `core.batch` lays down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.base.clock import Clock
from penstock.config.selection import Keeping
from penstock.core.batch import Sampled, ScheduledRow, SchedulerOutput, Selected, StepOutput, Verified
from penstock.core.cache_spec import CacheGroup
from penstock.core.draft import DraftJob, DraftTree, Outcome, trimmed
from penstock.core.protocols import Drafter
from penstock.model.forward import Forward, GreedyForward, ObservedForward, PoolingForward, WatchedForward
from penstock.runner.guess import Guess
from penstock.runner.input_batch import InputBatch, Pick
from penstock.runner.pooling import Pooler
from penstock.runner.rows import RowStore
from penstock.runner.sampler import Sampler
from penstock.runner.selecting import Selections
from penstock.runner.storage import Storage
from penstock.runner.undo import Undo
from penstock.runner.verify import Verifier, Verifying

if TYPE_CHECKING:
    from penstock.runner.logits.grammar_cache import GrammarCache

_LOG = logging.getLogger("penstock")
_NO_STATES = np.zeros((0, 0), np.float32)


class Runner:
    """Executes steps, one after the other, in one thread.

    `poison` is for tests: fresh memory is NaN, and each step checks that no row writes a page of another.
    """

    def __init__(
        self,
        forward: Forward,
        groups: tuple[CacheGroup, ...],
        num_slabs: Sequence[int],
        block_size: int,
        vocab_size: int,
        *,
        clock: Clock,
        host_slabs: Sequence[int] | None = None,
        poison: bool = False,
        storage: type[Storage] = Storage,
        grammars: GrammarCache | None = None,
        sampler: Sampler | None = None,
        keeping: Keeping | None = None,
        num_own_groups: int | None = None,
    ) -> None:
        """`sampler`: another than the reference, with these `grammars`. `keeping`: rows may drop tokens.
        `num_own_groups`: leading groups that `forward` looks at, if not all; the others belong to draft models.
        """
        self.vocab_size = vocab_size
        self.storage = storage(groups, num_slabs, block_size, host_slabs=host_slabs, poison=poison)
        self.rows = RowStore(groups, num_slabs, block_size, vocab_size)
        self.sampler = Sampler(vocab_size, grammars) if sampler is None else sampler
        self.grammars = grammars
        self.pooler = Pooler(self.rows)
        self.drafter: Drafter | None = None
        """Guesses for rows with room for guesses; None: they run without."""
        self.verifier: Verifying = Verifier(self.sampler)
        self._undo = Undo(self.storage, self.rows)
        self._batch = InputBatch(self.rows, keeping, num_own_groups)
        self.selections: Selections | None = None
        """Who chooses what rows keep; None: they keep everything, or drop by position alone."""
        self._forward = forward
        self._greedy = forward if isinstance(forward, GreedyForward) else None
        self._clock = clock
        self._strict = poison
        self.spoil: Callable[[npt.NDArray[np.float32]], None] | None = None
        """Changes the logits of every step before anything looks at them: faults for tests."""

    def watch(self, progress: int) -> None:
        """Let the model count its operations at this address, if it can (`WatchedForward`)."""
        if isinstance(self._forward, WatchedForward):
            self._forward.watch(progress)

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """Run one step. Units: `duration_s` is seconds on the runner's clock, from row changes to the last token.

        Mutates: rows, processors, storage. What fails for one row alone is a RowError of that row; an exception means
        that the rank is broken.
        """
        start_s = self._clock.now()
        heard = self.drafter is not None and concerns_drafter(output)
        if heard:
            self._track(output)
        self.rows.apply(output)
        self.sampler.chain.track(output)
        self.pooler.forget(output.removed)
        if self.selections is None:
            moves = self.storage.apply(output.page_ops)
        else:
            self.selections.track(output)
            moves = self.storage.apply(output.page_ops, self.selections.pack)
        if not output.scheduled:
            return StepOutput(output.step, duration_s=self._clock.now() - start_s, moves=moves)
        if self._strict:
            self.rows.check_writes(output.scheduled)
        trees, draft_s = self._draft(output.scheduled) if heard else ({}, 0.0)
        plan, picks, guesses = self._batch.build(output.scheduled, trees)
        before = self._undo.remember(guesses)
        wanted = self.pooler.wanted(output.scheduled, plan.query_start_loc)
        num_pooled = len(wanted)
        if guesses and self.drafter is not None and self.drafter.wants_hidden:
            wanted = np.concatenate([wanted, *(plan.logits_indices[_rows(guess)] for guess in guesses)])
        found: list[int] | F32
        if wanted.size:
            assert isinstance(self._forward, PoolingForward), "this model gives no hidden states"
            found, hidden = self._forward.run_pooling(replace(plan, hidden_indices=wanted), self.storage.planes)
            assert hidden.dtype == np.float32, f"hidden states are {hidden.dtype}"
        elif self._greedy is not None and self._wants_largest(picks):  # nearly every step of greedy rows
            found, hidden = self._greedy.run_greedy(plan, self.storage.planes), _NO_STATES
        else:
            found, hidden = self._forward.run(plan, self.storage.planes), _NO_STATES
        pooled, failed = self.pooler.fold(hidden[:num_pooled])
        selected: list[Selected] = []
        if self.selections is not None:
            queries: Sequence[F32] = ()
            if self.selections.watching:
                assert isinstance(self._forward, ObservedForward), "this model gives no queries"
                queries = self._forward.queries(len(plan.token_ids))
            selected = self.selections.after(output.scheduled, plan.query_start_loc, queries)
        if isinstance(found, list):
            sampled = [Sampled(p.seq_id, [found[p.row]] * p.num_samples) for p in picks]
            return StepOutput(
                output.step, sampled, [], failed, self._clock.now() - start_s, pooled, draft_s=draft_s,
                grammars=None if self.grammars is None else self.grammars.counts(), selected=selected, moves=moves,
            )  # fmt: skip
        logits = found
        if self.spoil is not None:
            self.spoil(logits)
        assert logits.dtype == np.float32, f"logits are {logits.dtype}"
        assert logits.shape == (len(plan.logits_indices), self.vocab_size), f"logits are {logits.shape}"
        nodes = self.verifier.nodes(guesses) if guesses else ()
        sampled, prompt_logprobs, errors, ended, choices = self.sampler.sample(logits, picks, nodes)
        verified: list[Verified] = []
        if guesses:
            result = self.verifier.verify(logits, guesses, choices)
            verified = self._undo.settle(guesses, result, before)
            errors, ended = errors + result.errors, [*ended, *result.ended]
            draft_s += self._tell(result.outcomes, hidden[num_pooled:])
        duration_s = self._clock.now() - start_s
        counts = None if self.grammars is None else self.grammars.counts()
        return StepOutput(
            output.step, sampled, prompt_logprobs, errors + failed, duration_s, pooled, list(ended), counts,
            verified, draft_s, selected, moves,
        )  # fmt: skip

    def _wants_largest(self, picks: Sequence[Pick]) -> bool:
        """Whether nothing but the first largest of each row's logits is wanted."""
        if not self._batch.greedy or self.spoil is not None:
            return False
        return not self.sampler.chain.follows_any([pick.seq_id for pick in picks])

    # -- guesses -------------------------------------------------------------------------------------------------

    def _track(self, output: SchedulerOutput) -> None:
        """Let the drafter hear what becomes of its rows. See `_draft` for failures."""
        assert self.drafter is not None, "only with a drafter"
        try:
            self.drafter.track(output)
        except Exception:
            self._give_up_drafting(self.drafter)

    def _draft(self, scheduled: Sequence[ScheduledRow]) -> tuple[Mapping[int, DraftTree], float]:
        """Drafts of the rows with room for them, and the seconds they took: nothing where nobody has any.

        A drafter that fails is used no more: it can only cost time, so it must not cost anybody's answer.
        """
        drafter = self.drafter
        jobs = [self._job(row) for row in scheduled if row.num_drafts]
        if drafter is None or not jobs:
            return {}, 0.0
        start_s = self._clock.now()
        trees: dict[int, DraftTree] = {}
        try:
            for job, tree in zip(jobs, drafter.propose(jobs), strict=True):
                trees[job.seq_id] = trimmed(tree, job, self.vocab_size)
        except Exception:
            self._give_up_drafting(drafter)
            trees = {}
        return trees, self._clock.now() - start_s

    def _give_up_drafting(self, drafter: Drafter) -> None:
        _LOG.exception("the drafter %r failed; going on without guesses", drafter.name)
        self.drafter = None

    def _job(self, row: ScheduledRow) -> DraftJob:
        known = self.rows[row.seq_id]
        return DraftJob(
            row.seq_id, known.tokens, known.prompt_len, row.num_drafts, row.draft_depth, known.rules,
            known.sample_index, self._undo.has_states,
        )  # fmt: skip

    def _tell(self, outcomes: list[Outcome], hidden: npt.NDArray[np.float32]) -> float:
        """Let the drafter hear what came of its guesses; returns the seconds it took. See `_draft` for failures."""
        if self.drafter is None:
            return 0.0
        start_s = self._clock.now()
        if self.drafter.wants_hidden:
            counts = np.cumsum([0] + [1 + len(o.tree.token_ids) for o in outcomes])
            outcomes = [o._replace(hidden=hidden[counts[i] : counts[i + 1]]) for i, o in enumerate(outcomes)]
        try:
            self.drafter.observe(outcomes)
        except Exception:
            self._give_up_drafting(self.drafter)
        return self._clock.now() - start_s


def concerns_drafter(output: SchedulerOutput) -> bool:
    """Whether a drafter must hear of a step. Of those in which rows only decode, without drafts, it need not."""
    if output.removed or output.added or output.forked or output.page_ops:
        return True
    for row in output.scheduled:
        if row.num_drafts or row.num_candidates:
            return True
    for appended in output.appended:  # noqa: SIM110 (this runs in every step, and a generator costs more)
        if appended.rollback:
            return True
    return False


def _rows(guess: Guess) -> slice:
    """Its rows of the logits."""
    return slice(guess.row, guess.row + 1 + len(guess.tree.token_ids))
