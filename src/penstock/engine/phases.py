"""Seconds of steps by what they were for: reading prompts, or decoding. Prices of the two kinds of tokens follow.

A step without prompts is decoding, one without decodes is a prompt's. A mixed step owes to its decodes what a step of
as many decodes alone takes (a running mean), and the rest to its prompts: without them it would have taken that long.
Before such a step has been seen, tokens share the time alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.batch import SchedulerOutput, StepOutput
    from penstock.core.events import EngineStats

FORGET = 64
"""The mean of decoding steps follows about so many of them: contexts grow, machines change their pace."""


class Phases:
    """Counts into `stats`: prefill_s and decode_s, which together are the seconds of all steps with rows."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._alone: dict[int, tuple[float, int]] = {}
        """Bits of the number of decodes -> (mean seconds of a step of such alone, how many, at most FORGET)."""

    def observe(self, output: SchedulerOutput, result: StepOutput) -> None:
        """A step has been committed. A prompt's last token, alone, counts as a decode."""
        rows, took_s = output.scheduled, result.duration_s
        if not rows:
            return
        num_tokens = sum([row.num_tokens for row in rows])
        if num_tokens == len(rows):
            kind = num_tokens.bit_length()
            mean, count = self._alone.get(kind, (0.0, 0))
            count = min(count + 1, FORGET)
            self._alone[kind] = mean + (took_s - mean) / count, count
            self._stats.decode_s += took_s
            return
        num_decodes = sum([row.num_tokens == 1 for row in rows])
        decode_s = 0.0
        if num_decodes:
            mean, count = self._alone.get(num_decodes.bit_length(), (0.0, 0))
            decode_s = min(mean, took_s) if count else took_s * num_decodes / num_tokens
        self._stats.decode_s += decode_s
        self._stats.prefill_s += took_s - decode_s
