"""Commit of rows whose drafts were verified: several tokens at once, or one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.core.request import REPETITION
from penstock.core.sequence import Sequence
from penstock.engine.gain import Gain

if TYPE_CHECKING:
    from penstock.core.batch import SchedulerOutput, StepOutput, Verified
    from penstock.engine.group import SequenceGroup
    from penstock.kv.manager import KVManager
    from penstock.sched.scheduler import Scheduler


class Drafting:
    """A part of `Commit`, with its rules: only here and there do sequences change."""

    def __init__(
        self, scheduler: Scheduler, kv: KVManager, groups: dict[str, SequenceGroup], emit: Callable[..., None],
        finish: Callable[..., None],
    ) -> None:  # fmt: skip
        self._scheduler, self._kv, self._groups = scheduler, kv, groups
        self._emit, self._finish = emit, finish
        self._stats = scheduler.stats
        self._gain = Gain(scheduler.stats) if scheduler.drafts is not None else None

    def after(self, output: SchedulerOutput, result: StepOutput, num_tokens: int) -> None:
        """A step, with drafts or without, has made `num_tokens` tokens known."""
        if self._gain is not None:
            self._gain.observe(output, result, num_tokens)

    def apply(self, alive: dict[int, Sequence], result: StepOutput, failed: set[int]) -> None:
        """Mutates: the sequences of `result.verified` that are `alive`. `failed`: those that end with an error."""
        for verified in result.verified:
            seq = alive.get(verified.seq_id)
            if seq is not None:
                self._take(seq, verified, verified.seq_id in failed)
        stats = self._stats
        stats.num_spec_steps += 1
        stats.draft_s += result.draft_s
        stats.spec_step_s += result.duration_s

    def _take(self, seq: Sequence, verified: Verified, failed: bool) -> None:
        """Tokens first, because blocks are kept under them."""
        self._count(verified)
        group = self._groups[seq.request.request_id]
        tokens, (reason, stop_reason) = self._upto_end(seq, verified.token_ids)
        seq.token_ids.extend(tokens)
        seq.num_computed = min(seq.num_computed + verified.num_kept, len(seq.token_ids))
        self._stats.num_sampled_tokens += len(tokens)
        if tokens:
            self._scheduler.appended(seq, tokens)
        if not failed:
            self._kv.commit(seq)
        if tokens:
            logprobs = list(verified.logprobs[: len(tokens)])
            self._emit(seq, tokens, logprobs, reason, stop_reason, verified.num_drafted, verified.num_accepted)
        if reason is not None:
            self._finish(group, seq, reason, stop_reason, emit=False)

    def _count(self, verified: Verified) -> None:
        if not verified.num_drafted:
            return
        stats, accepted = self._stats, verified.num_accepted
        stats.num_drafts += 1
        stats.num_draft_tokens += verified.num_drafted
        stats.num_accepted_tokens += accepted
        stats.accepted_at += [0] * (accepted - len(stats.accepted_at))
        for depth in range(accepted):
            stats.accepted_at[depth] += 1

    def _upto_end(self, seq: Sequence, token_ids: list[int]) -> tuple[list[int], tuple[str | None, int | str | None]]:
        """The tokens up to the one that ends the sample, and (finish reason, stop reason)."""
        request = seq.request
        known = seq.token_ids[:] if request.repetition is not None else None
        for i, token_id in enumerate(token_ids):
            ending = request.ending(seq.num_generated + i + 1, token_id)
            if known is not None and ending[0] is None:
                known.append(token_id)
                ending = REPETITION if request.circles(known) else ending
            if ending[0] is not None:
                return token_ids[: i + 1], ending
        return token_ids, (None, None)
