"""No more adapters at once than a rank has places for: a scheduling policy around another.

Whose adapter has no place is passed over until one is free, but not for ever: once it has been passed over for PATIENCE
steps, nobody behind it enters. Under a policy by which some displace others (`fair`), whoever may take the places of
all who run with one adapter takes that adapter's place, too: shares are those of tenants, over all of their adapters.
Adapters of those who wait are named to the rank, which reads them beside the steps.
Source: Sheng et al., S-LoRA, arXiv 2311.03285, sections 4.2 (which run) and 5.2 (prefetching).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from penstock.core.adapter import AdapterRef
from penstock.core.page_ops import AdapterOp
from penstock.core.protocols import SchedulingPolicy
from penstock.core.sequence import Sequence

PATIENCE = 64
MERGE_WINDOW = 32
"""Steps over which the share of those that have one adapter alone is counted."""
WINDOW = 16
"""Adapters of those who wait, the first in the queue first, that are read ahead."""


class Preempting(Protocol):
    """The scheduler, as far as places concern it."""

    @property
    def running(self) -> Seq[Sequence]: ...

    def preempt(self, seq: Sequence) -> None: ...


class WithAdapters:
    """See `core.protocols.SchedulingPolicy`; all else is as the policy `inner` has it."""

    def __init__(self, inner: SchedulingPolicy, max_adapters: int, merge: float | None = None) -> None:
        """`merge`: from which share of the last steps having one adapter alone on that is merged; None: none ever is.
        It is taken apart below half of that, so that it does not come and go. Source: Wu et al., dLoRA, OSDI 2024."""
        self._inner, self._max = inner, max_adapters
        self._merge, self._alone = merge, deque[bytes | None](maxlen=MERGE_WINDOW)
        self._merged: AdapterRef | None = None
        self._passed: dict[int, int] = {}
        self._named: set[bytes] = set()
        self._kv: Any = None
        self.num_waiting = 0
        """Of those who wait, how many lack a place for their adapter."""
        self.queues: Preempting | None = None
        """The scheduler, once there is one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_step(self, now_s: float, kv: Any) -> None:
        self._kv = kv
        self._inner.begin_step(now_s, kv)

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        if self._merge is not None and running:
            self._weigh(running, self._merge)
        if not waiting:
            self._passed.clear()
            self._named.clear()
            self.num_waiting = 0
            return self._inner.order(running, waiting)
        self._announce(waiting)
        found = self._inner.order(running, waiting)
        own = {seq.seq_id for seq in waiting}
        allowed = self._allowed(running, [seq for seq in found if seq.seq_id in own])
        return [seq for seq in found if seq.seq_id in allowed or seq.seq_id not in own]

    def _weigh(self, running: Seq[Sequence], share: float) -> None:
        """Whose adapter is merged: by what has been scheduled alone, so a replay finds the same."""
        refs = {None if ref is None else ref.hash: ref for ref in (seq.request.rules.adapter for seq in running)}
        only = next(iter(refs)) if len(refs) == 1 else None
        self._alone.append(only)
        merged = self._merged
        if merged is not None and self._alone.count(merged.hash) < share / 2 * MERGE_WINDOW:
            self._kv.outbox.add(AdapterOp(merged, False))
            self._merged = merged = None
        if only is not None and self._alone.count(only) >= share * MERGE_WINDOW:
            ref = refs[only]
            if ref is not None and (merged is None or merged.hash != only):
                self._kv.outbox.add(AdapterOp(ref, True))
                self._merged = ref

    def claims(self, waiting: Seq[Sequence]) -> Seq[Sequence]:
        claims = self._inner.claims(waiting)
        for seq in claims:
            if self._take_place(seq):
                break
        return [seq for seq in claims if seq.seq_id not in self._passed]

    def _take_place(self, newcomer: Sequence) -> bool:
        """The fewest who run with one adapter leave for `newcomer`, whose adapter has no place, if each of them would
        for a place alone. Returns whether somebody left."""
        ref = newcomer.request.rules.adapter
        if ref is None or self.queues is None or newcomer.seq_id not in self._passed:
            return False
        users: dict[bytes, list[Sequence]] = {}
        running = list(self.queues.running)
        for seq in running:
            if (own := seq.request.rules.adapter) is not None:
                users.setdefault(own.hash, []).append(seq)
        if ref.hash in users or len(users) < self._max:
            return False
        for victims in sorted(users.values(), key=len):
            left = list(victims)
            others = [seq for seq in running if seq not in victims]
            while left and self._inner.displaced([*others, *left], newcomer) in left[-1:]:
                left.pop()  # whoever comes last leaves first
            if not left:
                for seq in victims:
                    self.queues.preempt(seq)
                return True
        return False

    def _allowed(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> set[int]:
        used = {ref.hash for seq in running if (ref := seq.request.rules.adapter) is not None}
        passed: dict[int, int] = {}
        allowed: set[int] = set()
        shut = False
        for seq in waiting:
            ref = seq.request.rules.adapter
            if seq.held:  # it will not run in this step, whatever it is allowed
                allowed.add(seq.seq_id)
                continue
            if shut:
                if seq.seq_id in self._passed:
                    passed[seq.seq_id] = self._passed[seq.seq_id]
                continue
            if ref is not None and ref.hash not in used and len(used) >= self._max:
                passed[seq.seq_id] = self._passed.get(seq.seq_id, 0) + 1
                shut = passed[seq.seq_id] > PATIENCE
                continue
            if ref is not None:
                used.add(ref.hash)
            allowed.add(seq.seq_id)
        self._passed, self.num_waiting = passed, len(passed)
        return allowed

    def _announce(self, waiting: Seq[Sequence]) -> None:
        refs: dict[bytes, AdapterRef] = {}
        for seq in waiting:
            if (ref := seq.request.rules.adapter) is not None:
                refs.setdefault(ref.hash, ref)
                if len(refs) == WINDOW:
                    break
        new = [ref for key, ref in refs.items() if key not in self._named]
        self._named &= set(refs)
        if not new:
            return
        pages = self._kv.adapters
        if pages is not None:  # what had to make room meanwhile is read again at its turn
            there = [ref for key, ref in refs.items() if key not in self._named or pages.has(key)]
            self._named |= {ref.hash for ref in pages.ahead(there)}
            return
        for ref in new:
            self._kv.outbox.add(AdapterOp(ref))
        self._named |= set(refs)
