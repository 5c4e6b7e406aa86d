"""The scheduler: every sequence's computed count catches up with its known count under a token budget.

There are no prefill and decode phases here. A new prompt, a prefix hit, a decode step, a resume after preemption and
a replay are all "the computed count lags behind" (DESIGN 3.3).
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from penstock.base.errors import EngineError
from penstock.core.batch import AddedRow, Appended, Fork, ScheduledRow, SchedulerOutput
from penstock.core.events import EngineStats
from penstock.core.sequence import Sequence, Status

if TYPE_CHECKING:
    from penstock.core.protocols import SchedulingPolicy
    from penstock.kv.manager import KVManager

BEAM_CANDIDATES_PER_WIDTH = 2
"""A beam of width k looks at 2k continuations: up to k may end, and k must still go on."""


class Scheduler:
    """Owns the queues; asks the policy for order and victims, and the KV manager for memory.

    Units: tokens. `max_num_batched_tokens` bounds the tokens of one step; `long_prefill_token_threshold` > 0 bounds
    those of one sequence in it. Without `chunked_prefill` a prompt runs in one step or waits for a roomier one.
    """

    def __init__(
        self,
        kv: KVManager,
        policy: SchedulingPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        long_prefill_token_threshold: int = 0,
        chunked_prefill: bool = True,
        stats: EngineStats | None = None,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.chunked_prefill = chunked_prefill
        self.block_size = block_size
        self.stats = stats or EngineStats()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._on_rank: set[int] = set()
        self._forked: list[Fork] = []
        self._removed: list[int] = []
        self._appended: dict[int, list[int]] = {}

    # -- what commit and intake tell the scheduler ------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence (new, or one that lost its memory)."""
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=self.policy.key)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child` as a copy of `parent`'s cache. Without room for it, it queues and is recomputed."""
        self.stats.num_forks += 1
        roomy = len(self.running) < self.max_num_seqs and parent.status is Status.RUNNING
        if roomy and parent.seq_id in self._on_rank and self.kv.fork(parent, child):
            child.status = Status.RUNNING
            insort(self.running, child, key=self.policy.key)
            self._on_rank.add(child.seq_id)
            self._forked.append(Fork(parent.seq_id, child.seq_id, child.index))
        else:
            self.add(child)

    def appended(self, seq: Sequence, token_ids: list[int]) -> None:
        """Commit made these tokens known; the rank hears of it with the next step."""
        if seq.seq_id in self._on_rank:
            self._appended.setdefault(seq.seq_id, []).extend(token_ids)

    def remove(self, seq: Sequence) -> None:
        """The sequence is finished or aborted: it owns nothing afterwards."""
        queue = self.running if seq.status is Status.RUNNING else self.waiting
        queue.remove(seq)
        seq.status = Status.FINISHED
        self._drop(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's memory; it will be recomputed, ahead of everyone who came after it."""
        self.running.remove(seq)
        self.stats.num_preemptions += 1
        self.stats.num_recomputed_tokens += seq.num_computed
        seq.num_preemptions += 1  # also tells commit to ignore what is still in flight for it
        self._drop(seq)
        self.add(seq)

    def _drop(self, seq: Sequence) -> None:
        self.kv.release(seq)
        seq.num_computed = 0
        seq.num_inflight = 0
        if seq.seq_id in self._on_rank:
            self._on_rank.discard(seq.seq_id)
            self._removed.append(seq.seq_id)
            self._appended.pop(seq.seq_id, None)  # if it comes back, it comes back with all its tokens

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step ------------------------------------------------------------------------------------------------

    def schedule(self, step: int, *, idle: bool) -> SchedulerOutput | None:
        """The next step's work, or None if nobody can run now.

        `idle`: nothing is in flight. Then somebody must be able to run if anybody is queued; otherwise EngineError.
        """
        rows: dict[int, tuple[Sequence, ScheduledRow]] = {}
        added: list[Sequence] = []
        budget = self.max_num_batched_tokens
        preempted = blocked = False
        num_running_ahead = len(self.running)
        for seq in self.policy.order(self.running, self.waiting):
            if budget <= 0 or (blocked and num_running_ahead == 0):
                break
            if seq.status is Status.WAITING:
                if seq.held:
                    continue
                if blocked or preempted or len(self.running) >= self.max_num_seqs:
                    blocked = True
                    continue
                n = self._admit(seq, budget)
                if n == 0:
                    blocked = True  # first come, first served: nobody overtakes the head of the queue
                    continue
                added.append(seq)
            elif seq.status is Status.RUNNING:
                num_running_ahead -= 1
                n = self._chunk(seq, seq.lag, budget)
                if n == 0:
                    continue
                while not self.kv.grow(seq, seq.num_computed + seq.num_inflight + n):
                    if not idle and self.kv.reclaiming:
                        n = 0  # memory is on its way: it is free once the steps in flight have retired
                        break
                    victim = self.policy.victim(self.running, seq)
                    if victim is None:
                        # Nobody should yield to this sequence. It yields itself, unless it is all there is (then it
                        # fits by admission control) or a step in flight still works on it.
                        if seq.num_inflight == 0 and (len(self.running) > 1):
                            self._preempt_in_step(seq, rows)
                            preempted = True
                        n = 0
                        break
                    budget += self._preempt_in_step(victim, rows)
                    preempted = True
                if n == 0:
                    continue
            else:
                continue  # ended while the order was being walked
            rows[seq.seq_id] = (seq, self._row(seq, n))
            budget -= n
        if not rows:
            if not idle:
                return None
            held = [s for s in self.running if s.held]
            if held and self._stuck():
                # Beams that only wait for a sibling may hold the memory this sibling needs. They have their
                # candidates already, so they can give it up.
                self.preempt(held[-1])
                return self.schedule(step, idle=idle)
            if self._stuck():
                raise EngineError("no sequence can make progress: the KV pool is too small for any queued request")
            return None
        return self._emit(step, rows, added)

    def _stuck(self) -> bool:
        return any(not s.held for s in self.waiting) or any(s.lag > 0 and not s.held for s in self.running)

    def _chunk(self, seq: Sequence, lag: int, budget: int) -> int:
        """Tokens of `seq` to run in this step; 0 if none."""
        if lag <= 0 or seq.held:
            return 0
        n = self.policy.num_tokens(seq, lag, budget)
        if self.long_prefill_token_threshold > 0:
            n = min(n, self.long_prefill_token_threshold)
        if n < lag and not self.chunked_prefill and lag > 1:
            n = lag if budget >= self.max_num_batched_tokens else 0
        return n if n <= 0 else self.kv.cut(seq, seq.num_computed + seq.num_inflight, n)

    def _admit(self, seq: Sequence, budget: int) -> int:
        """Give a waiting sequence memory and a first chunk; 0 leaves everything as it was."""
        match = self.kv.match(seq)
        # Worst case of what its samples will not share, one tail block each; only the last request alone may be
        # admitted without that margin (it fits by validation, if need be one sample after the other).
        known = seq.num_known
        width = max(seq.request.n, seq.request.beam.beam_width if seq.request.beam else 1)
        margin = width * self.block_size if self.running else 0
        if not self.kv.can_admit(seq, match, known + margin):
            return 0
        if self._chunk(seq, known - match.num_tokens, budget) == 0:
            return 0
        self.kv.admit(seq, match)
        n = self._chunk(seq, known - seq.num_computed, budget)
        if not self.kv.grow(seq, seq.num_computed + n):
            raise EngineError("admission promised memory that growth did not find")
        self.waiting.remove(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=self.policy.key)
        if seq.num_preemptions == 0 and seq.num_generated == 0:
            seq.first_cached = seq.num_cached
        if seq.request.rules.num_prompt_logprobs < 0:  # those never read the cache
            self.stats.num_prefix_queries_tokens += known
        self.stats.num_prefix_hit_tokens += seq.num_cached
        self.stats.peak_running = max(self.stats.peak_running, len(self.running))
        return n

    def _preempt_in_step(self, victim: Sequence, rows: dict[int, tuple[Sequence, ScheduledRow]]) -> int:
        """Preempt, taking back what this step had given the victim. Returns the tokens won back for the budget."""
        taken = rows.pop(victim.seq_id, None)
        self.preempt(victim)
        return taken[1].num_tokens if taken else 0

    def _row(self, seq: Sequence, n: int) -> ScheduledRow:
        start = seq.num_computed + seq.num_inflight
        request = seq.request
        samples = candidates = 0
        if start + n == seq.num_known:
            if request.beam is not None:
                candidates = BEAM_CANDIDATES_PER_WIDTH * request.beam.beam_width
            else:
                samples = request.n if seq.num_generated == 0 else 1
        prompt_from = -1
        if request.rules.num_prompt_logprobs >= 0 and seq.index == 0 and start < seq.prompt_len - 1:
            prompt_from = max(start, seq.prompt_logprobs_done)
        return ScheduledRow(seq.seq_id, start, n, samples, candidates, prompt_from)

    def _emit(
        self, step: int, rows: dict[int, tuple[Sequence, ScheduledRow]], added: list[Sequence]
    ) -> SchedulerOutput:
        entering = []
        for seq in added:
            if seq.seq_id in rows:  # not if it was preempted again within this step
                rules = seq.request.rules
                entering.append(AddedRow(seq.seq_id, seq.index, seq.token_ids.tolist(), seq.prompt_len, rules))
                self._on_rank.add(seq.seq_id)
        for seq, row in rows.values():
            seq.num_inflight += row.num_tokens
        tables, page_ops = self.kv.drain()
        forked, removed, appended = self._forked, self._removed, self._appended
        self._forked, self._removed, self._appended = [], [], {}
        self.stats.num_steps += 1
        out = SchedulerOutput(
            step=step,
            forked=forked,
            removed=removed,
            added=entering,
            appended=[Appended(seq_id, ids) for seq_id, ids in appended.items()],
            tables=tables,
            page_ops=page_ops,
            scheduled=[row for _, row in rows.values()],
        )
        self.stats.num_scheduled_tokens += out.num_tokens
        return out
