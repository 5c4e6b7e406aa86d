"""The scheduler: every sequence's computed count catches up with its known count under a token budget.

There are no prefill and decode phases here. A new prompt, a prefix hit, a decode step, a resume after preemption and
a replay are all "the computed count lags behind" (docs/concepts/the-step.md).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.base.errors import EngineError
from penstock.core.batch import AddedRow, Appended, Fork, ScheduledRow, SchedulerOutput
from penstock.core.events import EngineStats
from penstock.core.sequence import LOST_LOAD, NEVER, NO_LOAD, Sequence, Status
from penstock.kv.backing import RETRY_S
from penstock.sched.ahead import FetchAhead
from penstock.sched.budget import SecondsBudget
from penstock.sched.offline import WithOffline
from penstock.sched.pauses import Pauses
from penstock.sched.preempt import prefers_swap, send_back, yields_soon
from penstock.sched.promise import may_promise
from penstock.sched.reserve import Reserve
from penstock.sched.rows import candidates_of, count_found, row_of, row_with_drafts
from penstock.sched.swap_ahead import SwapAhead

if TYPE_CHECKING:
    from penstock.core.protocols import DraftController, SchedulingPolicy, StepTimer
    from penstock.kv.manager import KVManager


class Scheduler:
    """Owns the queues; asks the policy for order and victims, and the KV manager for memory.

    Units: tokens. `max_num_batched_tokens` bounds the tokens of one step; `long_prefill_token_threshold` > 0 bounds
    those of one sequence in it. Without `chunked_prefill` a prompt runs in one step or waits for a roomier one.

    With a `timer` and `seconds_budget` a step is also bounded in seconds, so that nobody waits for a two-second
    prefill: `decode_step_s` while anyone decodes, `prefill_step_s` otherwise. Decodes always run; prefills get what is
    left, at least one block.
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
        timer: StepTimer | None = None,
        seconds_budget: bool = True,
        preemption_mode: str = "auto",
        pause_mode: str = "auto",
        conservativeness: float = 1.0,
        decode_step_s: float = 0.1,
        prefill_step_s: float = 1.0,
        stats: EngineStats | None = None,
        drafts: DraftController | None = None,
        offline: WithOffline | None = None,
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.chunked_prefill = chunked_prefill
        self.block_size = block_size
        self.timer = timer
        self.decode_step_s = decode_step_s
        self.prefill_step_s = prefill_step_s
        self.preemption_mode = preemption_mode
        self.pauses = Pauses(self, timer, pause_mode)
        self.clockwork = SecondsBudget(timer, block_size) if timer is not None and seconds_budget else None
        self.reserve = Reserve(conservativeness)
        self._ahead = FetchAhead(kv)
        self.swap_ahead = SwapAhead(self)
        self.stats = stats or EngineStats()
        self.drafts = drafts
        """How much to draft; None: the rank has no drafter."""
        self.offline = offline
        """What keeps offline work behind the rest (a part of `policy`); None: it is as all other."""
        if offline is not None:
            offline.queues = self
        self.wake_s: float | None = None
        """Set while somebody waits and nothing runs because of the policy, or of the machine's memory."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Those who own memory, also while they wait for blocks that are on their way (`Status.LOADING`)."""
        self._claimed: set[int] = set()
        """Waiting sequences that have more right to memory than somebody who runs; found anew in every step."""
        self._on_rank: set[int] = set()
        self._forked: list[Fork] = []
        self._removed: list[int] = []
        self._appended: dict[int, list[int]] = {}

    # -- what commit and intake tell the scheduler ------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence (new, or one that lost its memory)."""
        seq.status = Status.WAITING
        if seq.request.calls:
            self.pauses.entered(seq)
        self.pauses.watches |= seq.offline
        insort(self.waiting, seq, key=self.policy.key)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child` as a copy of `parent`'s cache. Without room for it, it queues and is recomputed."""
        self.stats.num_forks += 1
        child.offline = parent.offline
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
        queue = self.waiting if seq.status is Status.WAITING else self.running
        queue.remove(seq)
        seq.status = Status.FINISHED
        self._drop(seq)
        self.pauses.forget(seq)
        self.kv.swaps.drop(seq)
        if self.drafts is not None:
            self.drafts.forget(seq.seq_id)

    def preempt(self, seq: Sequence, *, may_swap: bool = True, swap: bool | None = None) -> None:
        """Take a running sequence's memory; it resumes ahead of everyone who came after it.

        Its cache is recomputed then, or brought back from a tier where that is cheaper and the tier has room. Not if
        a load failed: of windows it has what it would see behind that, not behind what it has computed.
        """
        self.running.remove(seq)
        self.stats.num_preemptions += 1
        self.stats.num_offline_preemptions += seq.offline
        num_computed = seq.num_computed
        seq.num_preemptions += 1  # also tells commit to ignore what is still in flight for it
        # A pooled vector needs every position's hidden state again, not its cache.
        may_swap = may_swap and seq.num_inflight == 0 and not seq.request.pooling
        if swap is None:
            swap = prefers_swap(self.preemption_mode, self.timer, self.kv.swaps, num_computed)
        if may_swap and swap and self.kv.swap_out(seq):
            self.stats.num_swaps += 1
        else:
            self.stats.num_recomputed_tokens += num_computed
        self._drop(seq)
        self.add(seq)

    def settle(self, moves: Mapping[int, bool]) -> None:
        """These loads have ended (`StepOutput.moves`): who waited for one goes on; who has blocks of one that failed
        computes them again. Before anything else of the step is committed: what it computed of those is ignored."""
        again = {move for move in moves if self.kv.stored is not None and self.kv.stored.reads(move)}
        tokens = {move: self.kv.ended(move, good=good) for move, good in moves.items()}
        for seq in [seq for seq in self.running if seq.load in moves]:
            if not moves[seq.load]:
                self.stats.num_failed_loads += 1
                load = NO_LOAD if seq.load in again else LOST_LOAD
                self.preempt(seq, may_swap=False)
                seq.load = load
            elif seq.status is Status.LOADING:
                seq.status = Status.RUNNING
                seq.num_computed = tokens[seq.load]
                count_found(seq, self.kv, self.stats)
                self.kv.commit(seq)  # what it shares with others must not look evictable when they go

    def _drop(self, seq: Sequence) -> None:
        self.kv.release(seq)
        seq.num_computed = seq.num_inflight = 0
        if seq.seq_id in self._on_rank:
            self._on_rank.discard(seq.seq_id)
            self._removed.append(seq.seq_id)
            self._appended.pop(seq.seq_id, None)  # if it comes back, it comes back with all its tokens

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- one step ------------------------------------------------------------------------------------------------

    def schedule(self, step: int, *, idle: bool, now_s: float = 0.0) -> SchedulerOutput | None:
        """The next step's work, or None if nobody can run now.

        `now_s` is the time at which the step begins: the only time that policies may look at, so that a recorded run
        replays to the same schedule.
        `idle`: nothing is in flight. Then somebody must be able to run if anybody is queued; otherwise EngineError.
        While a load is on its way (`kv.swaps.loads`) that is not so: a step without rows is due, to hear of it.
        """
        alone, idle = idle, idle and not self.kv.swaps.loads
        rows: dict[int, tuple[Sequence, ScheduledRow]] = {}
        added: list[Sequence] = []
        budget = self.max_num_batched_tokens
        preempted = blocked = False
        self.pauses.begin_step(now_s)
        self.policy.begin_step(now_s, self.kv)
        self.reserve.begin_step()
        stays = send_back(self)
        # Whoever is in flight cannot make room for others.
        promising = not (idle or stays or self.drafts is not None or (self.policy.displaces and self.waiting))
        self.kv.hints.begin_step(now_s)
        self.wake_s = self.policy.not_before_s(self.running, self.waiting)
        if self.wake_s is not None and now_s < self.wake_s:
            return None
        self.wake_s = None
        self._claimed.clear()
        if self.policy.displaces and self.waiting:
            self._displace()
        if self.clockwork is not None:
            self.clockwork.begin(self._step_limit_s())
        rooms: Mapping[int, tuple[int, int]] = {}
        if self.drafts is not None:
            rooms = self.drafts.begin_step(self.running, now_s)
        num_running_ahead = len(self.running)
        num_decodes = decode_context = 0  # those the seconds budget has not heard of yet
        for seq in candidates_of(self.policy, self.running, self.waiting, rows):
            if budget <= 0 or (blocked and num_running_ahead == 0):
                break
            if seq.status is Status.RUNNING:
                num_running_ahead -= 1
                start = seq.num_computed + seq.num_inflight
                one_left = len(seq.token_ids) - start == 1 and not seq.held
                if one_left and seq.prompt_len <= start and seq.seq_id in rooms:
                    row = row_with_drafts(self.kv, seq, start, budget - num_running_ahead, rooms[seq.seq_id])
                    if row is not None:
                        rows[seq.seq_id] = (seq, row)
                        budget -= 1 + row.num_drafts
                        if self.clockwork is not None:
                            self.clockwork.add(start, 1 + row.num_drafts, True)
                        continue
                # A decode in a block of its own, which is nearly every row of nearly every step; or promised.
                plain = one_left and seq.prompt_len <= start < seq.writable and seq.request.beam is None
                if plain or (promising and may_promise(self.kv, seq, start)):
                    rows[seq.seq_id] = (seq, ScheduledRow(seq.seq_id, start, 1, 1))
                    budget -= 1
                    num_decodes += 1
                    decode_context += start + 1
                    continue
            if self.clockwork is not None and num_decodes:
                self.clockwork.add_decodes(num_decodes, decode_context)
                num_decodes = decode_context = 0
            if seq.status is Status.WAITING:
                if seq.held:
                    continue
                if blocked or preempted or len(self.running) >= self.max_num_seqs:
                    blocked = True
                    continue
                n = self._admit(seq, budget)
                if n is None:
                    blocked = not self.policy.packs  # first come, first served: nobody overtakes the head of the queue
                    continue
                added.append(seq)
                if n == 0:
                    continue
            elif seq.status is Status.RUNNING:
                n = self._chunk(seq, seq.lag, budget)
                if n == 0:
                    continue
                while not self.kv.grow(seq, seq.num_computed + seq.num_inflight + n):
                    if not idle and self.kv.reclaiming:
                        n = 0  # memory is on its way: it is free once the steps in flight have retired
                        break
                    victim = self.policy.victim(self.running, seq)
                    if victim is None and not idle and yields_soon(self.policy, self.running, seq):
                        n = 0
                        break
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
                num_running_ahead -= 1  # its blocks are on their way
                continue
            row = row_of(self.kv, seq, n)
            rows[seq.seq_id] = (seq, row)
            budget -= n
            if self.clockwork is not None:
                self.clockwork.add(row.start, n, row.num_samples > 0 or row.num_candidates > 0)
        if not rows:
            if self.kv.swaps.loads and (alone or added):  # they wait for blocks
                return self._emit(step, rows, added, 0)
            if self.kv.orders_wait and alone and (not self.has_work or self.kv.swaps.stores_awaited):
                return self._emit(step, rows, added, 0)
            if not idle:
                return None
            if self.offline is not None and self.offline.give_way():
                return self.schedule(step, idle=idle, now_s=now_s)
            held = [s for s in self.running if s.held]
            if held and self._stuck():
                # Beams that only wait for a sibling may hold the memory this sibling needs. They have their
                # candidates already, so they can give it up.
                self.preempt(held[-1])
                return self.schedule(step, idle=idle, now_s=now_s)
            if self._stuck():
                if self.kv.hints.give_way():
                    return self.schedule(step, idle=idle, now_s=now_s)
                if not self.kv.backing.is_short:
                    raise EngineError("no sequence can make progress: the KV pool is too small for any queued request")
                self.wake_s = now_s + RETRY_S  # others have the memory
            else:
                self.wake_s = self.pauses.wake_s(now_s)
            return None
        if not preempted:
            self.reserve.step()
        if self.policy.max_rows and self.swap_ahead.make_room(rows) and not (blocked or preempted):
            added += self.swap_ahead.bring_back(lambda seq: self._admit(seq, 0, runs=False) is not None)
        return self._emit(step, rows, added, self.max_num_batched_tokens - budget)

    def _displace(self) -> None:
        """Make room for those at the head of the queue at the cost of whom the policy names."""
        for ahead, seq in enumerate([s for s in self.policy.claims(self.waiting) if not s.held]):
            while self._is_short(seq, ahead) and not self.kv.reclaiming:
                victim = self.policy.displaced(self.running, seq)
                if victim is None:
                    return
                if seq.seq_id in self._claimed or victim.offline > seq.offline:
                    self.preempt(victim)
                    continue
                self._claimed.add(seq.seq_id)  # from now on it does not count what others have set aside

    def _is_short(self, seq: Sequence, ahead: int) -> bool:
        """Whether a waiting sequence, with `ahead` others before it, lacks a place or memory."""
        if len(self.running) + ahead >= self.max_num_seqs:
            return True
        return not self.kv.can_admit(seq, self.kv.match(seq), self._tokens_to_admit(seq))

    def _tokens_to_admit(self, seq: Sequence) -> int:
        """Tokens' worth of memory that must be there before a waiting sequence enters.

        Beyond what is known of it, the worst case of what its samples will not share (one tail block each), or what
        everybody is expected to add if that is more. Only a sequence that would run alone enters without that margin
        (it fits by validation, if need be one sample after the other). Who may make others leave does not wait for
        what they have set aside.
        """
        width = max(seq.request.n, seq.request.beam.beam_width if seq.request.beam else 1)
        if not self.running:
            return seq.num_known
        aside = 0 if seq.seq_id in self._claimed else self.reserve.tokens(self.running, seq)
        coming = self.kv.selections.coming(self.running) * self.block_size
        return seq.num_known + max(width * self.block_size, aside) + coming

    def _step_limit_s(self) -> float:
        return self.decode_step_s if any(s.is_decoding for s in self.running if not s.offline) else self.prefill_step_s

    def _stuck(self) -> bool:
        return any(not s.held for s in self.waiting) or any(s.lag > 0 and not s.held for s in self.running)

    def _chunk(self, seq: Sequence, lag: int, budget: int) -> int:
        """Tokens of `seq` to run in this step; 0 if none."""
        if lag <= 0 or seq.held or seq.num_computed + seq.num_inflight >= seq.next_selection:
            return 0
        n = self.policy.num_tokens(seq, lag, budget)
        if self.long_prefill_token_threshold > 0:
            n = min(n, self.long_prefill_token_threshold)
        start = seq.num_computed + seq.num_inflight
        if self.clockwork is not None and n > 1:
            n = self.clockwork.fit(start, n)
        if n < lag and not self.chunked_prefill and lag > 1:
            n = lag if budget >= self.max_num_batched_tokens else 0
        return n if n <= 0 else self.kv.cut(seq, start, n)

    def _admit(self, seq: Sequence, budget: int, *, runs: bool = True) -> int | None:
        """Give a waiting sequence memory and, if it `runs`, a first chunk: its tokens; 0 while blocks are on their way.

        None leaves everything as it was.
        """
        match = self.kv.match(seq)
        known = seq.num_known
        if not self.kv.can_admit(seq, match, self._tokens_to_admit(seq)):
            return None
        if runs and self._chunk(seq, known - match.num_tokens, budget) == 0:
            return None
        self.kv.admit(seq, match)
        seq.held = seq.request.prefetches
        status, n = Status.LOADING, 0
        if self.kv.restore(seq):
            status, n = Status.RUNNING, self._chunk(seq, known - seq.num_computed, budget) if runs else 0
        if n and not self.kv.grow(seq, seq.num_computed + n):
            if seq.next_selection == NEVER or not (self.running or self.kv.reclaiming):
                raise EngineError("admission promised memory that growth did not find")
            self.kv.release(seq)  # others, or steps in flight, use what its first selection would copy
            return None
        self.waiting.remove(seq)
        seq.status = status
        insort(self.running, seq, key=self.policy.key)
        if status is Status.RUNNING:
            count_found(seq, self.kv, self.stats)
        self.stats.peak_running = max(self.stats.peak_running, len(self.running))
        return n

    def _preempt_in_step(self, victim: Sequence, rows: dict[int, tuple[Sequence, ScheduledRow]]) -> int:
        """Preempt, taking back what this step had given the victim. Returns the tokens won back for the budget."""
        taken = rows.pop(victim.seq_id, None)
        if not victim.offline:
            self.reserve.forced_out(self.running)
        self.preempt(victim)
        return taken[1].num_tokens + taken[1].num_drafts if taken else 0

    def _emit(
        self, step: int, rows: dict[int, tuple[Sequence, ScheduledRow]], added: list[Sequence], num_tokens: int
    ) -> SchedulerOutput:
        entering = []
        for seq in added:
            if seq.status is not Status.WAITING:  # not if it was preempted again within this step
                rules = seq.request.rules
                entering.append(AddedRow(seq.seq_id, seq.index, seq.token_ids.tolist(), seq.prompt_len, rules))
                self._on_rank.add(seq.seq_id)
        for seq, row in rows.values():
            seq.num_inflight += row.num_tokens
            if seq.offline:
                self.stats.num_offline_tokens += row.num_tokens
        self._ahead.look(self.waiting)
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
        self.stats.num_scheduled_tokens += num_tokens
        return out
