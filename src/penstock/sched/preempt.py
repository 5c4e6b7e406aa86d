"""How a preempted sequence gets its cache back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.core.step_shape import EMPTY

if TYPE_CHECKING:
    from penstock.core.protocols import SchedulingPolicy, StepTimer
    from penstock.core.sequence import Sequence
    from penstock.kv.swap import Swaps


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
