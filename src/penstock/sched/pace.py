"""What tokens and copied bytes take, as steps of this run have shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.page_ops import LoadOp, StoreOp
from penstock.core.step_shape import EMPTY

if TYPE_CHECKING:
    from penstock.core.batch import SchedulerOutput
    from penstock.core.protocols import StepTimer

FORGETTING = 0.98
"""What a step counts less than the one behind it: some fifty are remembered."""
ENOUGH = 8
MOST = 1 << 16
"""Tokens of a step, more than any has."""


class StepPace:
    """A line through (tokens, seconds) of steps without copies; what steps with copies take beyond it, per byte.

    Until enough was seen: what `timer` says; without one, nothing takes any time.
    """

    def __init__(self, timer: StepTimer | None) -> None:
        self._timer = timer
        self._sums = [0.0] * 5  # weight, tokens, seconds, tokens squared, tokens x seconds
        self._num_steps = self._num_copies = 0
        self._copied = [0.0, 0.0]  # seconds, bytes

    def observe(self, output: SchedulerOutput, seconds: float, page_bytes: Sequence[int]) -> None:
        """A step that took so long. Units: bytes of a page of each cache group."""
        tokens = sum(row.num_tokens for row in output.scheduled)
        copied = sum(
            op.count * page_bytes[op.group]
            for op in output.page_ops
            if isinstance(op, StoreOp) or (isinstance(op, LoadOp) and not op.late)
        )
        if copied:
            if self._num_steps >= ENOUGH:
                self._num_copies += 1
                beyond_s = max(0.0, seconds - (self._line(tokens) if tokens else 0.0))
                self._copied = [FORGETTING * a + b for a, b in zip(self._copied, (beyond_s, copied), strict=True)]
        elif tokens:
            self._num_steps += 1
            seen = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
            self._sums = [FORGETTING * a + b for a, b in zip(self._sums, seen, strict=True)]

    def compute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens of one sequence, beyond what steps take without them."""
        if self._num_steps < ENOUGH:
            return 0.0 if self._timer is None else self._timer.step_s(EMPTY.plus(0, num_tokens))
        return max(0.0, self._line(num_tokens))

    def tokens_within(self, seconds: float) -> int | None:
        """How many tokens a step may have so that it takes no longer; None: nothing is known yet."""
        if self._num_steps < ENOUGH and self._timer is None:
            return None
        low, high = 0, 1
        while high < MOST and self.compute_s(high) <= seconds:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.compute_s(middle) <= seconds else (low, middle)
        return low

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes one way."""
        if not self._num_copies:
            return 0.0 if self._timer is None else self._timer.copy_s(num_bytes)
        return num_bytes * self._copied[0] / self._copied[1]

    def _line(self, tokens: int) -> float:
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        slope = (n * xy - x * y) / spread if spread > 1e-9 * n * xx else y / x
        return y / n + slope * (tokens - x / n)
