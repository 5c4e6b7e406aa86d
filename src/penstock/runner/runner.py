"""One rank's step, in the order that `core.batch` lays down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as replaced

from penstock.base.bf16 import F32
from penstock.base.clock import Clock
from penstock.base.errors import UnsupportedError
from penstock.config.selection import Keeping
from penstock.core.batch import Sampled, ScheduledRow, SchedulerOutput, Selected, StepOutput, Verified
from penstock.core.draft import DraftJob, DraftTree, Outcome, trimmed
from penstock.core.page_ops import BlendOp
from penstock.core.protocols import Drafter, PromptDrafter
from penstock.core.weight_swap import WeightFacts
from penstock.model.forward import (
    ChoosingForward,
    ExpertForward,
    Forward,
    GreedyForward,
    HeadForward,
    ObservedForward,
    PoolingForward,
    ResidentForward,
    SharingForward,
    StreamingForward,
    WarmedForward,
    WatchedForward,
)
from penstock.ops.plan import I32, StepPlan
from penstock.runner.drafted import DraftedRow
from penstock.runner.input_batch import InputBatch, Pick
from penstock.runner.kernel_sampler import KernelSampler
from penstock.runner.pooling import Pooler
from penstock.runner.promised import Promises
from penstock.runner.rows import RowStore
from penstock.runner.sampler import Sampler
from penstock.runner.storage import Storage
from penstock.runner.undo import States, Undo
from penstock.runner.verify import Verifier, Verifying

if TYPE_CHECKING:
    from penstock.runner.layer_streams import LayerStreams
    from penstock.runner.logits.grammar_cache import GrammarCache
    from penstock.runner.selecting import RowSelections

_LOG = logging.getLogger("penstock")
NO_STATES = np.zeros((0, 0), np.float32)


LOAD_WAIT_S = 0.02
"""How long a step without rows waits for a load."""


class Reload(Protocol):
    """Reads other weights of the model, beside the steps, and makes the rank over them (`launch.reload`)."""

    def read(self, path: str) -> WeightFacts: ...

    def switch(self, rank: Runner) -> Runner: ...


class Planned(msgspec.Struct, gc=False):
    """A step that has been planned: what runs, and what its results are for. Valid until the next one is planned.

    Attributes:
        step: of the model, with the drafts of `drafts` behind the newest tokens of their rows.
        picks, drafts: what the rows without and with drafts are owed.
        hidden: tokens [P] whose hidden states are wanted; the first `num_pooled` are to be pooled, then come those of
            `drafts`, for the drafter.
        before: recurrent states of the rows that draft, to be put back if a draft is wrong.
        draft_s: seconds that the drafts took.
        known: rows whose hidden states stand behind the first `num_told`, for a drafter that reads prompts.
    """

    step: StepPlan
    picks: list[Pick]
    drafted_rows: list[DraftedRow]
    hidden: I32
    num_pooled: int
    before: States
    draft_s: float
    known: Sequence[ScheduledRow] = ()
    num_told: int = 0


class Runner:
    """Executes steps, one after the other, in one thread. `launch.parts.make_rank` puts it together.

    A step is planned (its rows change, pages move, rows are given drafts), runs, and is settled (tokens are chosen,
    drafts judged, what was wrong undone). All that is decided by looking at logits happens between `forward` and the
    end of `settle`.
    """

    def __init__(
        self,
        forward: Forward,
        rows: RowStore,
        storage: Storage,
        sampler: Sampler,
        *,
        clock: Clock,
        grammars: GrammarCache | None = None,
        drafter: Drafter | None = None,
        verifier: Verifying | None = None,
        selections: RowSelections | None = None,
        keeping: Keeping | None = None,
        moves: bool = False,
        blend: Callable[[BlendOp], None] | None = None,
        num_own_groups: int | None = None,
        depth: int = 1,
        strict: bool = False,
        streams: LayerStreams | None = None,
    ) -> None:
        """
        Args:
            rows, storage, sampler: as those of `drafter`, `verifier` and `selections`; `sampler` with these `grammars`.
            drafter: drafts for rows with room for drafts; None: they run without.
            verifier: another than the one that changes no token.
            selections: who chooses what rows keep; None: they keep everything, or drop by position alone.
            keeping: rows may drop tokens.
            moves: tokens of a row may lie before what the row sees (`kv.modules`).
            blend: computes tokens of modules again (`runner.blending`).
            num_own_groups: leading groups that `forward` looks at, if not all; the others belong to draft models.
            depth: steps in flight; with two a row may be promised a token.
            streams: layers of `storage` that are away; None: none ever is.
            strict: each step checks that no row writes a page of another (tests).
        """
        self.packed_file = ""  # what builds it knows
        self.reload: Reload | None = None
        """Who reads other weights; None: nobody can."""
        self.vocab_size = rows.vocab_size
        self.rows = rows
        self.storage = storage
        self.sampler = sampler
        self.grammars = grammars
        head = partial(forward.run_head, planes=storage.planes) if isinstance(forward, HeadForward) else None
        self.pooler = Pooler(rows, head)
        self.drafter = drafter
        self.verifier: Verifying = Verifier(sampler) if verifier is None else verifier
        self.selections = selections
        self._undo = Undo(storage, rows)
        self._batch = InputBatch(rows, keeping, num_own_groups, moves=moves)
        self._forward, self._blend = forward, blend
        self._greedy = forward if isinstance(forward, GreedyForward) else None
        self._warmed = forward if isinstance(forward, WarmedForward) else None
        self._num_late = 0
        self._choosing = (
            forward if keeping is not None and keeping.ahead and isinstance(forward, ChoosingForward) else None
        )
        self._chosen = (0, 0)
        comes = isinstance(forward, StreamingForward) and forward.weights_read is not None
        self._streaming = forward if comes and isinstance(forward, StreamingForward) else None
        self._weights: tuple[int, float] = (0, 0.0)
        self._experts = forward if isinstance(forward, ExpertForward) and forward.expert_counts else None
        self._expert_counts: tuple[float, ...] = () if self._experts is None else self._experts.expert_counts
        sharing = forward if isinstance(forward, SharingForward) else None
        self._sharing = sharing if sharing is not None and sharing.keys_read is not None else None
        self._keys = (0, 0)
        # Other verifiers than ours look at logits as arrays.
        stays = isinstance(sampler, KernelSampler) and verifier is None
        self._resident = forward if stays and isinstance(forward, ResidentForward) else None
        self._clock = clock
        self._strict = strict
        self._streams = streams
        self._promises = Promises(rows, sampler.chain) if depth > 1 else None
        self._spoil_from: int | None = None
        self._moves: dict[int, bool] = {}
        """Loads that the step which was planned last has brought to an end (`StepOutput.moves`)."""

    @property
    def drafter(self) -> Drafter | None:
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._reads_prompts = isinstance(drafter, PromptDrafter)  # asked of a protocol here, not at every step

    # -- beside the steps (`executor.rank.Rank`) -----------------------------------------------------------------

    def watch(self, progress: int) -> None:
        """Let the model count its operations at this address, if it can (`WatchedForward`)."""
        if isinstance(self._forward, WatchedForward):
            self._forward.watch(progress)

    def back(self, num_slabs: Sequence[int]) -> None:
        """See `Storage.back`."""
        self.storage.back(num_slabs)

    def holds(self, grammar: str) -> bool:
        """Whether no step waits for this grammar to be compiled: it has been, or nobody here compiles any."""
        return self.grammars is None or self.grammars.holds(grammar)

    def prepare(self, grammar: str, param: str) -> None:
        """Compile it, in any thread. Raises: InputError for the parameter `param` if that cannot be done."""
        if self.grammars is not None:
            self.grammars.check(grammar, param)

    def ready_weights(self, path: str) -> WeightFacts:
        if self.reload is None:
            raise UnsupportedError("weights in the memory of this process are not swapped; start from files")
        return self.reload.read(path)

    def switched(self) -> Runner:
        assert self.reload is not None, "they were readied"
        return self.reload.switch(self)

    def greet(self, before: Runner) -> None:
        """It goes on with the rows of another rank: who follows rows hears of them. Mutates: those."""
        if self._promises is not None and before._promises is not None:
            self._promises.follow(before._promises)
        output = SchedulerOutput(-1, added=self.rows.entered())
        self.sampler.chain.track(output)
        if self.storage.adapters is not None:
            self.storage.adapters.begin(output)
        if self.selections is not None:
            self.selections.track(output)
        if self.drafter is not None:
            self._track(output)

    def spoil(self, step: int) -> None:
        """A fault for tests: the first row of logits of step number `step`, or the next that has any, becomes NaN."""
        self._spoil_from = step

    def spoil_first(self, output: SchedulerOutput, logits: F32) -> None:
        """What `spoil` ordered, if it is this step's turn. Mutates: `logits`."""
        if self._spoil_from is not None and self._spoil_from <= output.step and len(logits):
            logits[0], self._spoil_from = float("nan"), None

    # -- the step ------------------------------------------------------------------------------------------------

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """Run one step. Units: `duration_s` is seconds on the runner's clock, from row changes to the last token.

        Mutates: rows, processors, storage. What fails for one row alone is a RowError of that row; an exception means
        that the rank is broken.
        """
        start_s = self._clock.now()
        output, planned = self.plan(output)
        if planned is None:
            result = StepOutput(output.step, duration_s=self._clock.now() - start_s, moves=self._moves)
        else:
            found, hidden = self.forward(planned)
            result = self.settle(output, planned, found, hidden, start_s)
        if self._promises is not None:
            self._promises.settled(result)
        return self.with_late(result)

    def with_late(self, result: StepOutput) -> StepOutput:
        """The result with what was compiled since the last one, and with what was read, and could not be read, until
        now: who computes while blocks come decides by it what to compute next."""
        if (outside := self.storage.outside) is not None:
            moves, misses, read = outside.ended(), outside.misses(), outside.took()
            if moves or misses or read:
                result = replaced(result, moves=result.moves | moves, misses=misses, read=read)
        if self.storage.adapters is not None:
            result = self.storage.adapters.told(result)
        if self._warmed is not None and self._warmed.num_late > self._num_late:
            result = replaced(result, num_late=self._warmed.num_late - self._num_late)
            self._num_late = self._warmed.num_late
        if self._choosing is not None:
            had, self._chosen = self._chosen, self._choosing.tokens_read
            result = replaced(result, chosen=(self._chosen[0] - had[0], self._chosen[1] - had[1]))
        if self._streaming is not None:
            (num_bytes, waited_s), self._weights = self._weights, self._streaming.weights_read or self._weights
            result = replaced(result, weights=(self._weights[0] - num_bytes, self._weights[1] - waited_s))
        if self._sharing is not None:
            had, self._keys = self._keys, self._sharing.keys_read or self._keys
            result = replaced(result, keys=(self._keys[0] - had[0], self._keys[1] - had[1]))
        if self._experts is not None:
            before, self._expert_counts = self._expert_counts, self._experts.expert_counts
            more = tuple(now - had for now, had in zip(self._expert_counts, before, strict=True))
            result = replaced(result, experts=more)
        return result

    def plan(
        self, output: SchedulerOutput, lying: Mapping[int, int] | None = None
    ) -> tuple[SchedulerOutput, Planned | None]:
        """Change the rows, move pages, and plan what runs with which drafts; None if nothing does. Also the step as it
        runs: without rows that were promised a token which has not come. `lying`: see `Promises.keep`.

        Mutates: rows, processors, storage, drafter.
        """
        if self._promises is not None:
            output = self._promises.heard(output)
        heard = self.drafter is not None and concerns_drafter(output)
        if heard:
            self._track(output)
        self.rows.apply(output)
        if (adapters := self.storage.adapters) is not None:
            adapters.begin(output)
        self.sampler.chain.track(output)
        self.pooler.forget(output.removed)
        if self.selections is None:
            self._moves = self.storage.apply(output.page_ops, blend=self._blend)
        else:
            self.selections.track(output)
            self._moves = self.storage.apply(output.page_ops, self.selections.pack)
        if self._promises is not None:
            output = self._promises.keep(output, lying)
        if not output.scheduled:
            self._moves |= self.storage.ended(LOAD_WAIT_S)  # nobody computes meanwhile
            return output, None
        if self._experts is not None:
            self._experts.expect_rows([row.seq_id for row in output.scheduled], output.removed)
        if self._strict:
            self.rows.check_writes(output.scheduled)
        trees, draft_s = self._draft(output.scheduled) if heard else ({}, 0.0)
        step, picks, drafted_rows = self._batch.build(output.scheduled, trees)
        if adapters is not None:
            step = adapters.on(step, output.scheduled)
        before = self._undo.remember(drafted_rows)
        hidden = self.pooler.wanted(output.scheduled, step.query_start_loc)
        num_pooled = len(hidden)
        if drafted_rows and self.drafter is not None and self.drafter.wants_hidden:
            hidden = np.concatenate([hidden, *(step.logits_indices[_rows(drafted)] for drafted in drafted_rows)])
        num_told = len(hidden)
        known: list[ScheduledRow] = []
        if self._reads_prompts:
            known, read = self._known_rows(output.scheduled, step.query_start_loc)
            hidden = np.concatenate([hidden, *read])
        return output, Planned(step, picks, drafted_rows, hidden, num_pooled, before, draft_s, known, num_told)

    def forward(self, planned: Planned) -> tuple[list[int] | F32, F32]:
        """Run the model. Mutates: storage.

        Shapes: logits [R, V], or the largest of each row where nothing else is wanted; hidden states [P, E].
        """
        if self._streams is not None:
            self._streams.begin()
        if planned.hidden.size:
            assert isinstance(self._forward, PoolingForward), "this model gives no hidden states"
            plan = replace(planned.step, hidden_indices=planned.hidden)
            logits, hidden = self._forward.run_pooling(plan, self.storage.planes)
            assert hidden.dtype == np.float32, f"hidden states are {hidden.dtype}"
            return (logits if len(logits) else []), hidden
        if self._greedy is not None and self._wants_largest(planned.picks):  # nearly every step of greedy rows
            return self._greedy.run_greedy(planned.step, self.storage.planes), NO_STATES
        if self._resident is not None:
            return self._resident.run_resident(planned.step, self.storage.planes), NO_STATES
        return self._forward.run(planned.step, self.storage.planes), NO_STATES

    def settle(
        self, output: SchedulerOutput, planned: Planned, found: list[int] | F32, hidden: F32, start_s: float
    ) -> StepOutput:
        """Choose tokens, judge drafts and undo what was wrong; `found` and `hidden` are what `forward` gave.

        Mutates: storage, processors, drafter. Units: `start_s` is when the step began.
        """
        picks, drafted_rows, num_pooled, draft_s = (
            planned.picks,
            planned.drafted_rows,
            planned.num_pooled,
            planned.draft_s,
        )
        pooled, failed = self.pooler.fold(hidden[:num_pooled])
        if planned.known:
            draft_s += self._show(planned.known, hidden[planned.num_told :])
        selected: list[Selected] = []
        if self.selections is not None:
            queries: Sequence[F32] = ()
            if self.selections.watching:
                assert isinstance(self._forward, ObservedForward), "this model gives no queries"
                queries = self._forward.queries(len(planned.step.token_ids))
            selected = self.selections.after(output.scheduled, planned.step.query_start_loc, queries)
        if isinstance(found, list):
            sampled = [Sampled(p.seq_id, [found[p.row]] * p.num_samples) for p in picks]
            return StepOutput(
                output.step, sampled, [], failed, self._clock.now() - start_s, pooled, draft_s=draft_s,
                grammars=None if self.grammars is None else self.grammars.counts(), selected=selected,
                moves=self._moves,
            )  # fmt: skip
        logits = found
        self.spoil_first(output, logits)
        assert logits.dtype == np.float32, f"logits are {logits.dtype}"
        assert logits.shape == (len(planned.step.logits_indices), self.vocab_size), f"logits are {logits.shape}"
        nodes = self.verifier.nodes(drafted_rows) if drafted_rows else ()
        sampled, prompt_logprobs, errors, ended, choices = self.sampler.sample(logits, picks, nodes)
        verified: list[Verified] = []
        if drafted_rows:
            result = self.verifier.verify(logits, drafted_rows, choices)
            verified = self._undo.settle(drafted_rows, result, planned.before)
            errors, ended = errors + result.errors, [*ended, *result.ended]
            draft_s += self._tell(result.outcomes, hidden[num_pooled : planned.num_told])
        duration_s = self._clock.now() - start_s
        counts = None if self.grammars is None else self.grammars.counts()
        return StepOutput(
            output.step, sampled, prompt_logprobs, errors + failed, duration_s, pooled, list(ended), counts,
            verified, draft_s, selected, self._moves,
        )  # fmt: skip

    def _wants_largest(self, picks: Sequence[Pick]) -> bool:
        """Whether nothing but the first largest of each row's logits is wanted."""
        if not self._batch.greedy or self._spoil_from is not None:
            return False
        return not self.sampler.chain.follows_any([pick.seq_id for pick in picks])

    # -- drafts -------------------------------------------------------------------------------------------------

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
        _LOG.exception("the drafter %r failed; going on without drafts", drafter.name)
        self.drafter = None

    def _job(self, row: ScheduledRow) -> DraftJob:
        known = self.rows[row.seq_id]
        return DraftJob(
            row.seq_id, known.tokens, known.prompt_len, row.num_drafts, row.draft_depth, known.rules,
            known.sample_index, self._undo.has_states,
        )  # fmt: skip

    def _known_rows(self, scheduled: Sequence[ScheduledRow], starts: I32) -> tuple[list[ScheduledRow], list[I32]]:
        """The rows that read what is known of them, as prompts are read, and where their tokens are in the batch."""
        found, read = [], []
        for b, row in enumerate(scheduled):
            if (
                not row.num_drafts
                and not row.pooling
                and (row.num_tokens > 1 or row.start < self.rows[row.seq_id].prompt_len)
            ):
                found.append(row)
                read.append(np.arange(starts[b], starts[b + 1], dtype=np.int32))
        return found, read

    def _show(self, rows: Sequence[ScheduledRow], hidden: F32) -> float:
        """Let the drafter see the hidden states of rows; returns the seconds it took. See `_draft` for failures."""
        drafter = self.drafter
        if not isinstance(drafter, PromptDrafter):
            return 0.0
        start_s, at = self._clock.now(), 0
        runs: list[tuple[int, int, F32]] = []
        for row in rows:
            runs.append((row.seq_id, row.start, hidden[at : at + row.num_tokens]))
            at += row.num_tokens
        try:
            drafter.read(runs)
        except Exception:
            self._give_up_drafting(drafter)
        return self._clock.now() - start_s

    def _tell(self, outcomes: list[Outcome], hidden: npt.NDArray[np.float32]) -> float:
        """Let the drafter hear what came of its drafts; returns the seconds it took. See `_draft` for failures."""
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


def _rows(drafted: DraftedRow) -> slice:
    """Its rows of the logits."""
    return slice(drafted.row, drafted.row + 1 + len(drafted.tree.token_ids))
