"""How a preempted sequence gets its cache back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.step_shape import EMPTY

if TYPE_CHECKING:
    from penstock.core.protocols import StepTimer
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
