"""Commit: the only place where sequences change after execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.core.output import EngineOutput
from penstock.core.request import REPETITION
from penstock.core.sequence import Sequence
from penstock.engine.beams import Beams
from penstock.engine.drafting import Drafting

if TYPE_CHECKING:
    from penstock.core.batch import Pooled, Sampled, SchedulerOutput, StepOutput, TokenLogprobs
    from penstock.core.request import Request
    from penstock.engine.group import SequenceGroup
    from penstock.kv.manager import KVManager
    from penstock.sched.scheduler import Scheduler


class Commit:
    """Applies a step's results in the order of its rows, so that equal steps leave equal states.

    Mutates: sequences, groups, the queues and the KV tables; appends to `emitted`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVManager,
        groups: dict[str, SequenceGroup],
        sequences: dict[int, Sequence],
        new_sequence: Callable[[Request, int, int], Sequence],
        emitted: list[EngineOutput],
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.groups = groups
        self.sequences = sequences
        self.new_sequence = new_sequence
        self.emitted = emitted
        self.stats = scheduler.stats
        self.beams = Beams(scheduler, groups, sequences, new_sequence, emitted)
        self.drafts = Drafting(scheduler, kv, groups, self.emit, self.finish)

    def apply(
        self, output: SchedulerOutput, rows: list[tuple[Sequence, int, int]], result: StepOutput, now: float
    ) -> None:
        """`rows`: the sequences of `output.scheduled`, their tokens and their preemption counts at submission."""
        if result.moves:
            self.scheduler.settle(result.moves if self.kv.stored is None else self.kv.stored.all_of(result.moves))
        if result.misses and self.kv.stored is not None:
            self.kv.stored.misses.update(result.misses)
        alive: dict[int, Sequence] = {}
        failed = {error.seq_id for error in result.errors}
        drafted = {verified.seq_id for verified in result.verified}
        known, keep = self.sequences, self.kv.commit
        chosen = {s.seq_id: s.counts for s in result.selected} if result.selected else None
        before = self.stats.num_sampled_tokens
        for seq, num_tokens, num_preemptions in rows:
            seq_id = seq.seq_id
            if seq_id not in known or seq.num_preemptions != num_preemptions:
                continue  # aborted, or preempted while this step was in flight: its cache entries are gone
            seq.num_inflight -= num_tokens
            alive[seq_id] = seq
            if seq_id in drafted:
                continue
            seq.num_computed += num_tokens
            if seq_id not in failed:  # what a sick row computed must not be found by others
                keep(seq)
                if chosen is not None and seq_id in chosen:
                    self.kv.select(seq, chosen[seq_id])
        if result.verified:
            self.drafts.apply(alive, result, failed)
        for prompt in result.prompt_logprobs:
            if prompt.seq_id in alive:
                self._prompt_logprobs(alive[prompt.seq_id], prompt.start, prompt.entries)
        for error in result.errors:
            if error.seq_id in alive and error.seq_id in self.sequences:
                self._fail(alive[error.seq_id], error.message)
        for sampled in result.sampled:
            seq_id = sampled.seq_id
            if seq_id in alive and seq_id in known:
                self._sampled(alive[seq_id], sampled)
        for seq_id in result.ended:
            if seq_id in alive and seq_id in self.sequences:
                self._complete(alive[seq_id])
        if result.grammars is not None:
            stats = self.stats
            stats.num_grammar_hits, stats.num_grammar_misses, stats.grammar_bytes = result.grammars
        self.stats.ran(result)
        for pooled in result.pooled:
            if pooled.seq_id in alive and pooled.seq_id in self.sequences:
                self._pooled(alive[pooled.seq_id], pooled)
        self.drafts.after(output, result, self.stats.num_sampled_tokens - before)

    # -- one row -------------------------------------------------------------------------------------------------

    def _sampled(self, seq: Sequence, sampled: Sampled) -> None:
        group = self.groups[seq.request.request_id]
        if group.forked and not group.cancelled and group.request.beam is None:  # nearly always
            self._append(group, seq, sampled.token_ids[0], sampled.logprobs[0] if sampled.logprobs else None)
            return
        if group.request.beam is not None:
            group.candidates[seq.seq_id] = list(sampled.candidates)
            seq.held = True
            if len(group.candidates) == len(group.live):
                self.beams.advance(group)
            return
        members = [(seq, 0)] if 0 not in group.cancelled or group.forked else []
        if not group.forked:
            for index in range(1, group.request.n):
                if index in group.cancelled:
                    continue
                child = self.new_sequence(group.request, group.arrival, index)
                child.first_cached, child.scheduled_s = seq.first_cached, seq.scheduled_s
                group.live[index] = child
                self.scheduler.fork(seq, child)
                members.append((child, index))
            group.forked = True
        for member, j in members:
            logprob = sampled.logprobs[j] if sampled.logprobs else None
            self._append(group, member, sampled.token_ids[j], logprob)
        if seq.index in group.cancelled:  # it only computed the prompt for the others
            self.finish(group, seq, "abort", None, emit=False, aborted=True)

    def _append(self, group: SequenceGroup, seq: Sequence, token_id: int, logprob: TokenLogprobs | None) -> None:
        request = group.request
        seq.token_ids.append(token_id)
        self.scheduler.appended(seq, [token_id])
        self.stats.num_sampled_tokens += 1
        num_generated = len(seq.token_ids) - seq.prompt_len
        finish_reason, stop_reason = request.ending(num_generated, token_id)
        if finish_reason is None and request.repetition is not None and request.circles(seq.token_ids):
            finish_reason, stop_reason = REPETITION
        if finish_reason is None and num_generated > 1 and logprob is None:  # nearly always
            out = EngineOutput(
                request_id=request.request_id, index=seq.index, token_ids=[token_id],
                num_cached_tokens=seq.first_cached, num_preemptions=seq.num_preemptions,
            )  # fmt: skip
            self.emitted.append(out)
            return
        self.emit(seq, [token_id], [logprob] if logprob is not None else [], finish_reason, stop_reason)
        if finish_reason is not None:
            self.finish(group, seq, finish_reason, stop_reason, emit=False)

    def _pooled(self, seq: Sequence, pooled: Pooled) -> None:
        group = self.groups[seq.request.request_id]
        out = EngineOutput(
            request_id=seq.request.request_id, index=0, pooled=pooled.vector, finish_reason="stop",
            num_preemptions=seq.num_preemptions,
        )  # fmt: skip
        self.emitted.append(out)
        self.finish(group, seq, "stop", None, emit=False)

    def _prompt_logprobs(self, seq: Sequence, start: int, entries: list[TokenLogprobs]) -> None:
        first = start - 1  # the logits of position p are about prompt token p + 1
        fresh = entries[max(0, seq.prompt_logprobs_done - first) :]
        if fresh:
            seq.prompt_logprobs_done = first + len(entries)
            self.emitted.append(EngineOutput(request_id=seq.request.request_id, index=seq.index, prompt_logprobs=fresh))

    def emit(
        self, seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs], finish_reason: str | None,
        stop_reason: int | str | None,
        num_drafted: int = 0, num_accepted: int = 0,
    ) -> None:  # fmt: skip
        out = EngineOutput(
            request_id=seq.request.request_id, index=seq.index, token_ids=token_ids, logprobs=logprobs,
            finish_reason=finish_reason, stop_reason=stop_reason, num_cached_tokens=seq.first_cached,
            num_preemptions=seq.num_preemptions, scheduled_s=seq.scheduled_s if seq.num_generated == 1 else None,
            num_drafted=num_drafted, num_accepted=num_accepted,
        )  # fmt: skip
        self.emitted.append(out)

    # -- endings -------------------------------------------------------------------------------------------------

    def finish(
        self, group: SequenceGroup, seq: Sequence, reason: str, stop_reason: int | str | None, *, emit: bool = True,
        aborted: bool = False,
    ) -> None:  # fmt: skip
        """End one sample. A finished sequence owns nothing."""
        self.scheduler.remove(seq)
        del self.sequences[seq.seq_id]
        del group.live[seq.index]
        if aborted:
            self.stats.num_aborted += 1
        else:
            self.stats.num_finished += 1
        if emit:
            self.emit(seq, [], [], reason, stop_reason)
        if not group.live:
            del self.groups[group.request.request_id]

    def cancel(self, group: SequenceGroup, index: int, reason: str) -> None:
        """Abort a sample that does not exist yet. The first sequence still computes the prompt for the others."""
        if index in group.cancelled or not 0 <= index < group.request.n:
            return
        group.cancelled.add(index)
        self.emitted.append(EngineOutput(request_id=group.request.request_id, index=index, finish_reason=reason))
        if len(group.cancelled) == group.request.n:
            self.abort_group(group, reason)

    def abort_group(self, group: SequenceGroup, reason: str) -> None:
        """End all that is left of a request, samples that were never started included."""
        request = group.request
        unborn = [] if group.forked else [i for i in range(1, request.n) if i not in group.cancelled]
        for seq in list(group.live.values()):
            told = request.beam is not None or seq.index in group.cancelled
            self.finish(group, seq, reason, None, emit=not told, aborted=True)
        for index in unborn:
            self.emitted.append(EngineOutput(request_id=request.request_id, index=index, finish_reason=reason))
        if request.beam is not None:
            self.emitted.append(EngineOutput(request_id=request.request_id, index=0, finish_reason=reason))

    def _complete(self, seq: Sequence) -> None:
        """A sample that is complete without another token; all of them, if it was about to draw their first ones."""
        group = self.groups[seq.request.request_id]
        if group.forked:
            self.finish(group, seq, "stop", None)
        else:
            self.abort_group(group, "stop")

    def _fail(self, seq: Sequence, message: str) -> None:
        """A row that failed ends its request, and only its request."""
        group = self.groups[seq.request.request_id]
        self.stats.num_errors += 1
        for member in list(group.live.values()):
            self.finish(group, member, "error", None, emit=False, aborted=True)
        self.emitted.append(
            EngineOutput(request_id=seq.request.request_id, index=seq.index, finish_reason="error", error=message)
        )
