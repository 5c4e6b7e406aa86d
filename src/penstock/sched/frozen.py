"""Nobody runs, and all keep what they have: a scheduling policy around another, while generation is held."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from penstock.core.protocols import SchedulingPolicy
from penstock.core.sequence import Sequence

LOOK_S = 0.25
"""How often a loop that has nothing else to do looks whether it may go on."""


class Frozen:
    """See `core.protocols.SchedulingPolicy`; all else is as the policy `inner` has it."""

    def __init__(self, inner: SchedulingPolicy) -> None:
        self.inner = inner
        self._now_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin_step(self, now_s: float, kv: Any) -> None:
        self._now_s = now_s

    def not_before_s(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> float:
        return self._now_s + LOOK_S
