"""Always the same number of drafts: the baseline, and what papers mean by k."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.sequence import Sequence
from penstock.sched.drafts.state import can_draft


class FixedDrafts:
    """`num_drafts` drafts, at most `depth` deep, for everybody in every step.

    With more than `max_batch` sequences decoding (0: no limit) for nobody: vLLM's disable_by_batch_size.
    """

    name = "fixed"

    def __init__(self, num_drafts: int, depth: int, *, max_batch: int = 0) -> None:
        self._room = (num_drafts, depth)
        self._max_batch = max_batch

    def begin_step(self, running: Seq[Sequence], now_s: float | None = None) -> Mapping[int, tuple[int, int]]:
        decoding = can_draft(running)
        if self._max_batch and len(decoding) > self._max_batch:
            return {}
        return {seq.seq_id: self._room for seq in decoding}

    def observe(self, output: SchedulerOutput, result: StepOutput) -> None:
        """It does not learn."""

    def forget(self, seq_id: int) -> None:
        """It knows nobody."""
