"""Weights swapped in a running engine, and generation on hold (docs/concepts/hot-weights.md).

What is read beside the steps (`Executor.ready_weights`) is switched to between two of them: when nobody runs any more
who has to end over the old ones, and no step is in flight. What was computed over the old ones is nowhere afterwards:
the prefix cache is empty, names in a store are others, and host copies are given up.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.core.output import EngineOutput
from penstock.core.request import Control
from penstock.core.sequence import Sequence, Status
from penstock.core.weight_swap import BUSY, SWAPPED
from penstock.kv.selection import KeepAll
from penstock.sched.frozen import Frozen

if TYPE_CHECKING:
    from penstock.core.protocols import Executor
    from penstock.engine.commit import Commit


class Swapping:
    """A part of `Entry`. Mutates: sequences, the queues, the scheduler's policy, KV memory, the executor.

    `inflight`: the steps that are. Attributes: `order`: the swap that waits for its time, if one does.
    """

    def __init__(self, commit: Commit, executor: Executor, inflight: Collection[Any]) -> None:
        self._commit, self._executor, self._inflight = commit, executor, inflight
        self._scheduler, self._kv = commit.scheduler, commit.kv
        self._aside: dict[int, Sequence] = {}
        """Those who begin over the new weights."""
        self._held = self._waits = False
        self.order: Control | None = None

    # -- orders ------------------------------------------------------------------------------------------------------

    def swap(self, order: Control) -> None:
        """`order.weights`, with facts: ranks have read them."""
        weights = order.weights
        assert weights is not None, "checked when it was queued"
        if self.order is not None:
            self._tell(order, BUSY)
            return
        if weights.mode == "wait" and self._held and not self._waits:  # they do not end while they are held
            weights = replace(weights, mode="recompute")
        self.order = replace(order, weights=weights)
        if weights.mode == "abort":
            self._abort_all()
        elif weights.mode == "wait":
            self._part()
            return
        self._freeze()  # steps in flight come home

    def hold(self, how: str | None) -> None:
        """Nobody runs until `go_on`; with `how` "wait", but for those who have begun."""
        if how == "wait" and not self._held:
            self._held = self._waits = True
            self._part()
            return
        if how == "abort":
            self._abort_all()
        elif how == "retract":
            for seq in list(self._scheduler.running):
                self._scheduler.preempt(seq, may_swap=False)
        self._held = True
        self._freeze()

    def go_on(self) -> None:
        self._held = self._waits = False
        if self.order is None or self._drains:
            self._thaw()
        if self.order is None:
            self._join()

    def _part(self) -> None:
        """Those who have not begun do not."""
        for seq in [seq for seq in self._scheduler.waiting if not has_begun(seq)]:
            self._scheduler.waiting.remove(seq)
            self._aside[seq.seq_id] = seq

    def _join(self) -> None:
        for seq in self._aside.values():
            self._scheduler.add(seq)
        self._aside.clear()

    @property
    def _drains(self) -> bool:
        """A swap waits for those who have begun."""
        return self.order is not None and self.order.weights is not None and self.order.weights.mode == "wait"

    # -- who waits ---------------------------------------------------------------------------------------------------

    def enter(self, seq: Sequence) -> None:
        """A new request's sequence is queued."""
        if self._drains or self._waits:
            self._aside[seq.seq_id] = seq
        else:
            self._scheduler.add(seq)

    def leaves(self, seqs: Collection[Sequence]) -> None:
        """They are about to end: they are where others are who wait."""
        for seq in seqs:
            if self._aside.pop(seq.seq_id, None) is not None:
                self._scheduler.add(seq)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    # -- the swap ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Swap, if its time has come: before anything is scheduled."""
        order, scheduler = self.order, self._scheduler
        if order is None or self._inflight:
            return
        if self._drains and (scheduler.running or scheduler.waiting):
            return
        weights = order.weights
        assert weights is not None, "it is a swap"
        assert weights.facts is not None, "ranks have read them"
        for seq in list(scheduler.running):
            if weights.mode != "keep" or not self._can_keep(seq):
                scheduler.preempt(seq, may_swap=False)
        self._kv.reset_prefix_cache()
        if self._kv.stored is not None:
            self._kv.stored.renamed(weights.facts.fingerprint)
        for seq in [*scheduler.waiting, *scheduler.running, *self._aside.values()]:
            seq.names, seq.claim = [], None
            if seq.status is Status.WAITING:
                self._kv.swaps.drop(seq)
        stats = self._commit.stats
        stats.weight_swap_s += self._executor.switch_weights()
        stats.num_weight_swaps += 1
        self.order = None
        if not self._held:
            self._thaw()
        if not self._waits:
            self._join()
        self._tell(order)

    def _can_keep(self, seq: Sequence) -> bool:
        """Half of a pooled vector would be the old model's, and so would what a selector has seen."""
        return not seq.request.pooling and isinstance(self._kv.selections, KeepAll)

    def _tell(self, order: Control, error: str | None = None) -> None:
        weights = order.weights
        content = None if weights is None or weights.facts is None else weights.facts.content
        self._commit.emitted.append(
            EngineOutput(
                request_id=order.request_id, index=0, finish_reason=SWAPPED, stop_reason=content, error=error
            )
        )  # fmt: skip

    def _abort_all(self) -> None:
        groups = list(self._commit.groups.values())
        for group in groups:
            self.leaves(group.live.values())
            self._commit.abort_group(group, "abort")

    def _freeze(self) -> None:
        if not isinstance(self._scheduler.policy, Frozen):
            self._scheduler.policy = Frozen(self._scheduler.policy)

    def _thaw(self) -> None:
        if isinstance(self._scheduler.policy, Frozen):
            self._scheduler.policy = self._scheduler.policy.inner


def has_begun(seq: Sequence) -> bool:
    """Whether a part of its answer may depend on the weights that it began over."""
    return seq.scheduled_s is not None or seq.num_generated > 0 or seq.num_preemptions > 0
