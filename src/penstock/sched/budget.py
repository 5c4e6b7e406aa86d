"""The step's budget in seconds: how many prefill tokens fit beside what is already in the step."""

from __future__ import annotations

from penstock.core.protocols import StepTimer
from penstock.core.step_shape import EMPTY, StepShape


class SecondsBudget:
    """Follows the shape of the step that is being put together. See docs/concepts/the-step.md."""

    def __init__(self, timer: StepTimer, block_size: int) -> None:
        self._timer = timer
        self._block_size = block_size
        self._limit_s = 0.0
        self._shape = EMPTY
        self._has_prefill = False

    def begin(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._shape = EMPTY
        self._has_prefill = False

    def add(self, start: int, n: int, samples: bool) -> None:
        self._shape = self._shape.plus(start, n, int(samples))
        self._has_prefill |= n > 1

    def add_decodes(self, n: int, num_context: int) -> None:
        """`n` decodes at once, which read `num_context` cached tokens together."""
        tokens, rows, context, pairs, logits = self._shape
        self._shape = StepShape(tokens + n, rows + n, context + num_context, pairs + num_context, logits + n)

    def fit(self, start: int, n: int) -> int:
        """The most tokens <= n, from position `start`, that keep the step within its limit.

        The first prefill of a step gets at least one block, or a long queue of decodes would starve it; further ones
        may get 0.
        """
        if self._fits(self._shape.plus(start, n, 1)):
            return n
        low, high = 0, n  # low fits or is 0, high does not fit
        while high - low > max(1, self._block_size // 2):
            middle = (low + high) // 2
            if self._fits(self._shape.plus(start, middle, 1)):
                low = middle
            else:
                high = middle
        if self._has_prefill:
            return low
        return min(n, max(low, self._block_size))

    def _fits(self, shape: StepShape) -> bool:
        return self._timer.step_s(shape) <= self._limit_s
