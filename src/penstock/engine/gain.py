"""What drafting gains, estimated from the steps that ran: beside each other, steps that draft and steps that do not.

Steps in which every sequence only decodes are compared: a plain one with n sequences gives n tokens in so many seconds,
one with drafts gives more in more. What plain steps are known to take for n sequences, times the plain steps that a
step with drafts stands for, over what it took, is the speed-up. Steps with another n, or with prompts in them, are
left out: they say nothing about each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.batch import SchedulerOutput, StepOutput
    from penstock.core.events import EngineStats

EVERY = 8
"""Plain steps of which one is looked at: where nobody drafts this must cost nothing."""
FORGET = 64
"""The mean of plain steps follows about so many of them: contexts grow, machines change their pace."""


class Gain:
    """Counts into `stats`: spec_compared_s and spec_plain_s."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._num_plain = -1
        self._plain: dict[int, tuple[float, int]] = {}
        """Sequences -> (mean seconds of a plain step, how many it was made of, at most FORGET)."""

    def observe(self, output: SchedulerOutput, result: StepOutput, num_tokens: int) -> None:
        """A step has been committed that made `num_tokens` tokens known."""
        rows = output.scheduled
        if not result.verified:  # a mean needs no more than some of them
            self._num_plain += 1
            if self._num_plain % EVERY:
                return
        if not rows or not num_tokens or any(row.num_tokens != 1 or not row.num_samples for row in rows):
            return
        n = len(rows)
        if not any(verified.num_drafted for verified in result.verified):
            mean, count = self._plain.get(n, (0.0, 0))
            count = min(count + 1, FORGET)
            took_s = result.duration_s - result.draft_s  # the drafter may have looked, and found nothing
            self._plain[n] = mean + (took_s - mean) / count, count
        elif n in self._plain:
            self._stats.spec_compared_s += result.duration_s
            self._stats.spec_plain_s += num_tokens / n * self._plain[n][0]
