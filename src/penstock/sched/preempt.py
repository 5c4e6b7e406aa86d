"""Who gives memory up without being asked, and how a preempted sequence gets its cache back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from penstock.core.sequence import Sequence, Status
from penstock.core.step_shape import EMPTY

if TYPE_CHECKING:
    from penstock.core.protocols import SchedulingPolicy, StepTimer
    from penstock.kv.swap import Swaps


class PolicyQueues(Protocol):
    """The scheduler, as far as it concerns whom its policy sends back."""

    policy: SchedulingPolicy
    waiting: list[Sequence]
    running: list[Sequence]

    def preempt(self, seq: Sequence) -> None: ...


def prefers_swap(mode: str, timer: StepTimer | None, swaps: Swaps, num_computed: int) -> bool:
    """Whether to bring `num_computed` tokens back from a tier rather than compute them again.

    `mode`: `swap` or `recompute`, or `auto`, which takes the cheaper way by `timer`, and recomputes without one.
    """
    if mode != "auto":
        return mode == "swap"
    if timer is None:
        return False
    copies_s = 2 * timer.copy_s(swaps.num_bytes(num_computed))
    return copies_s < timer.step_s(EMPTY.plus(0, num_computed))


def yields_soon(policy: SchedulingPolicy, running: Iterable[Sequence], seq: Sequence) -> bool:
    """Whether somebody who goes after `seq` could yield to it, were it not for a step in flight."""
    return any(other.num_inflight and policy.outranks(seq, other) for other in running)


def send_back(scheduler: PolicyQueues) -> bool:
    """Preempt whom the policy sends back to the queue; whether it would send somebody on whom a step still works."""
    leaving = scheduler.policy.leaves(scheduler.running, scheduler.waiting)
    for seq in leaving:
        if seq.num_inflight == 0 and seq.status is Status.RUNNING:
            scheduler.preempt(seq)
    return any(seq.status is Status.RUNNING for seq in leaving)
