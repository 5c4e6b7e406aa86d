"""Caches that go to a tier before anybody needs their room, and come back before their turn.

Some sequences have memory and do not run (a policy's `max_rows`). While less than the policy's `spare` of the memory is
free, those whose turn is furthest off are copied out, so that newcomers find room without waiting for a copy. While
there is more than enough, those in the tier whose turn comes first are copied back.
Source: Wu et al., FastServe, arXiv 2305.05920, section 4.2 (proactive swapping by estimated next scheduled time).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

from penstock.core.sequence import Sequence, Status

if TYPE_CHECKING:
    from penstock.core.protocols import SchedulingPolicy
    from penstock.kv.manager import KVManager

MOST = 4
"""Sequences that one step copies out at most."""


class SwapQueues(Protocol):
    """The scheduler, as far as those that pause concern it."""

    kv: KVManager
    policy: SchedulingPolicy
    max_num_seqs: int
    running: list[Sequence]
    waiting: list[Sequence]

    def preempt(self, seq: Sequence, *, swap: bool | None = None) -> None: ...


class SwapAhead:
    """A part of the scheduler; with a policy whose `spare` is 0 it does nothing.

    Attributes:
        num_out, num_back: sequences copied out and back so, since start.
    """

    def __init__(self, scheduler: SwapQueues) -> None:
        self._scheduler = scheduler
        self.num_out = self.num_back = 0

    def make_room(self, rows: Collection[int]) -> bool:
        """The step has its rows (by sequence): who pauses may leave. Returns whether enough is free without that.
        Mutates: the queues, KV memory."""
        places = self._scheduler
        spare = self._spare()
        if not spare or places.kv.reclaiming:
            return False
        if self._free() >= spare:
            return True
        paused = [s for s in places.running if s.seq_id not in rows and _may_leave(s)]
        for seq in _by_turn(places.policy, paused)[::-1][:MOST]:
            if not places.kv.swaps.fits(seq.num_computed):
                break
            places.preempt(seq, swap=True)
            self.num_out += 1
            if self._free() >= spare:
                break
        return False

    def bring_back(self, bring: Callable[[Sequence], bool]) -> list[Sequence]:
        """Who comes back, one at most: `bring` gives a sequence its memory, if it is there. Mutates: as `bring`."""
        places, kv = self._scheduler, self._scheduler.kv
        away = [s for s in places.waiting if s.swapped is not None and not s.held]
        if not away or len(places.running) >= places.max_num_seqs:
            return []
        first = _by_turn(places.policy, away)[0]
        need = kv.swaps.need(kv.groups[kv.main_group or 0], first.num_known) + 1
        # Twice the spare, or what comes back goes out again at once.
        if self._free() - need < 2 * self._spare() or not bring(first):
            return []
        self.num_back += 1
        return [first]

    def _spare(self) -> int:
        """Blocks to be kept free."""
        kv = self._scheduler.kv
        if kv.main_group is None:
            return 0
        pool = kv.pools[kv.main_group]
        return int(self._scheduler.policy.spare * (pool.num_slabs - pool.num_kept_back))

    def _free(self) -> int:
        kv = self._scheduler.kv
        return kv.pools[kv.main_group or 0].num_free + kv.cache.num_evictable


def _by_turn(policy: SchedulingPolicy, seqs: list[Sequence]) -> list[Sequence]:
    """Whose turn comes first is first."""
    due_s = policy.next_run_s(seqs) if seqs else []
    return [seqs[i] for i in sorted(range(len(seqs)), key=due_s.__getitem__)]


def _may_leave(seq: Sequence) -> bool:
    """It pauses because of the policy: not for a sibling, a tool or its own blocks."""
    return seq.status is Status.RUNNING and not seq.held and seq.num_inflight == 0 and seq.num_computed > 0
