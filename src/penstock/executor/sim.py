"""An executor that computes nothing: it knows how long a step takes and lets virtual time pass.

Scheduler, KV manager and engine are the ones that serve; only the tokens are made up. Source: the idea of Vidur, arXiv
2405.05465, section 4 (simulate the scheduler for real, predict only the device).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.base.clock import VirtualClock
from penstock.core.batch import TIER_DEVICE, Sampled, ScheduledRow, SchedulerOutput, StepOutput
from penstock.core.protocols import StepTimer
from penstock.core.step_shape import shape_of


class SimExecutor:
    """Steps run one after the other on one simulated device; `collect` moves the clock to the oldest one's end.

    A sampled token is a function of (sequence, position), within `vocab_size`. With `depth` 2 the next step is queued
    on the device while one runs, so the time between collect and submit costs nothing. `page_bytes[g]`: bytes of a page
    of cache group g, to charge swaps.
    """

    def __init__(
        self,
        timer: StepTimer,
        clock: VirtualClock,
        *,
        vocab_size: int,
        depth: int = 1,
        page_bytes: Sequence[int] = (),
    ) -> None:
        self.depth = depth
        self.copied_bytes = 0
        self._page_bytes = page_bytes
        self.busy_s = 0.0
        self._timer = timer
        self._clock = clock
        self._vocab_size = vocab_size
        self._free_at_s = 0.0
        self._queue: deque[tuple[SchedulerOutput, float, float]] = deque()

    def submit(self, output: SchedulerOutput) -> None:
        duration_s = self._timer.step_s(shape_of(output.scheduled)) + self._copies_s(output)
        self._free_at_s = max(self._free_at_s, self._clock.now()) + duration_s
        self.busy_s += duration_s
        self._queue.append((output, duration_s, self._free_at_s))

    def _copies_s(self, output: SchedulerOutput) -> float:
        """Seconds of the step's copies between device and host, which it waits for."""
        if not self._page_bytes:
            return 0.0
        num_bytes = sum(op.count * self._page_bytes[op.group] for op in output.page_ops if op.tier != TIER_DEVICE)
        self.copied_bytes += num_bytes
        return self._timer.copy_s(num_bytes) if num_bytes else 0.0

    def collect(self) -> StepOutput:
        output, duration_s, end_s = self._queue.popleft()
        self._clock.advance_to(end_s)
        sampled = [self._sample(row) for row in output.scheduled if row.num_samples or row.num_candidates]
        return StepOutput(output.step, sampled, duration_s=duration_s)

    def close(self) -> None:
        self._queue.clear()

    def _sample(self, row: ScheduledRow) -> Sampled:
        position = row.start + row.num_tokens
        token = (row.seq_id * 2654435761 + position * 40503) % self._vocab_size
        if row.num_candidates:
            candidates = [((token + j) % self._vocab_size, -float(j + 1)) for j in range(row.num_candidates)]
            return Sampled(row.seq_id, [], candidates=candidates)
        return Sampled(row.seq_id, [(token + j) % self._vocab_size for j in range(row.num_samples)])
