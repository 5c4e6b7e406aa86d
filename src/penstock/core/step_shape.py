"""What of a step decides its duration, as five numbers. Timers see nothing else, so schedules stay replayable."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.batch import ScheduledRow


class StepShape(NamedTuple):
    """Attributes:
    num_tokens: tokens run through the linear layers.
    num_rows: sequences in the step.
    num_context: cached tokens read by attention, summed over sequences (each counted once per sequence).
    num_pairs: (query, key) pairs of causal attention, summed over sequences.
    num_logits: rows that need the LM head.
    """

    num_tokens: int = 0
    num_rows: int = 0
    num_context: int = 0
    num_pairs: int = 0
    num_logits: int = 0

    def plus(self, start: int, n: int, num_logits: int = 0) -> StepShape:
        """With tokens [start, start + n) of one more sequence."""
        return StepShape(
            self.num_tokens + n,
            self.num_rows + 1,
            self.num_context + start + n,
            self.num_pairs + n * start + n * (n + 1) // 2,
            self.num_logits + num_logits,
        )


EMPTY = StepShape()


def shape_of(rows: list[ScheduledRow]) -> StepShape:
    """The shape of a scheduled step."""
    tokens = context = pairs = logits = 0
    for row in rows:
        n, start = row.num_tokens + row.num_drafts, row.start
        tokens += n
        context += start + n
        pairs += n * start + n * (n + 1) // 2
        if row.num_samples or row.num_candidates:
            logits += 1 + row.num_drafts
        if row.prompt_logprobs_from >= 0:
            logits += n
    return StepShape(tokens, len(rows), context, pairs, logits)
