"""An executor that computes nothing: it knows how long a step takes and lets virtual time pass.

Scheduler, KV manager and engine are the ones that serve; only the tokens are made up. Source: the idea of Vidur, arXiv
2405.05465, section 4 (simulate the scheduler for real, predict only the device).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.base.clock import VirtualClock
from penstock.core.batch import Sampled, ScheduledRow, SchedulerOutput, StepOutput, Verified
from penstock.core.page_ops import LoadOp, StoreOp, StreamOp
from penstock.core.protocols import Executor, StepTimer
from penstock.core.step_shape import shape_of
from penstock.executor.sim_files import SimFiles


class DraftOutcomes(Protocol):
    """What drafts would come of a simulated text, and what making them costs."""

    def draft(self, seq_id: int, position: int, room: int) -> tuple[int, int]:
        """(drafts made, drafts accepted) for the tokens from `position` on, at most `room`; asked once per step."""
        ...

    def draft_s(self, room: int, num_rows: int) -> float:
        """Seconds to draft for `num_rows` sequences, at most `room` for one of them."""
        ...


class SimExecutor(Executor):
    """Steps run one after the other on one simulated device; `collect` moves the clock to the oldest one's end.

    A sampled token is a function of (sequence, position), within `vocab_size`. With `depth` 2 the next step is queued
    on the device while one runs, so the time between collect and submit costs nothing. `page_bytes[g]`: bytes of a page
    of cache group g, to charge copies between device and tiers. A step waits for its own, but for late loads: these go
    one after the other beside the steps, and the first step that ends behind one reports it. `files`: the store of
    blocks outside the process; a step waits for copies of what is to be written, reads and writes go on beside it.
    `drafts`: who fills the room for drafts; without it nobody does. The step then takes as long as one of the drafts
    that were made. There are no grammars to compile, no logits and no memory.
    """

    def __init__(
        self,
        timer: StepTimer,
        clock: VirtualClock,
        *,
        vocab_size: int,
        depth: int = 1,
        page_bytes: Sequence[int] = (),
        drafts: DraftOutcomes | None = None,
        files: SimFiles | None = None,
    ) -> None:
        self.depth = depth
        self._files = files
        self._page_bytes = page_bytes
        self.busy_s = 0.0
        self._timer = timer
        self._clock = clock
        self._vocab_size = vocab_size
        self._free_at_s = 0.0
        self._drafts = drafts
        self._queue: deque[tuple[SchedulerOutput, float, float, float, list[Verified], float]] = deque()
        self._loads: dict[int, float] = {}
        """When the loads that are not reported yet end."""

    def submit(self, output: SchedulerOutput) -> None:
        rows, verified, draft_s = output.scheduled, [], 0.0
        drafting = [row for row in rows if row.num_drafts]
        if drafting:
            verified = [self._verify(row) for row in drafting]
            made = {v.seq_id: v.num_drafted for v in verified}
            rows = [msgspec.structs.replace(r, num_drafts=made[r.seq_id]) if r.num_drafts else r for r in rows]
            if self._drafts is not None:
                draft_s = self._drafts.draft_s(max(row.num_drafts for row in drafting), len(drafting))
        start_s = max(self._free_at_s, self._clock.now())
        step_s = self._beside_s(output, self._timer.step_s(shape_of(rows)))
        duration_s = step_s + self._copies_s(output, start_s) + draft_s
        if not rows and (ends := self._loads_end()):
            duration_s = max(duration_s, min(ends) - start_s)
        self._free_at_s = start_s + duration_s
        self.busy_s += duration_s
        # As a rank asks for what has been read and written: before it runs the rows, if there are any.
        heard_s = start_s if rows else self._free_at_s
        self._queue.append((output, duration_s, self._free_at_s, heard_s, verified, draft_s))

    def _beside_s(self, output: SchedulerOutput, step_s: float) -> float:
        """With layers that are copied while others compute: the longer of both, and one layer's."""
        ops = [op for op in output.page_ops if isinstance(op, StreamOp)]
        if not ops or not self._page_bytes:
            return step_s
        copy_s = self._timer.copy_s(sum(op.num_pages * self._page_bytes[op.group] for op in ops))
        return max(step_s, copy_s) + copy_s / max(len(op.layers) for op in ops)

    def _loads_end(self) -> list[float]:
        """When the first loads on their way end."""
        ends = [min(self._loads.values())] if self._loads else []
        if self._files is not None and (next_s := self._files.next_load_s) is not None:
            ends.append(next_s)
        return ends

    def _copies_s(self, output: SchedulerOutput, start_s: float) -> float:
        """Seconds that the step waits for its copies between device and tiers. Late loads begin behind these."""
        waits, late = 0, dict[int, int]()
        for op in output.page_ops:
            if isinstance(op, StoreOp | LoadOp):
                num_bytes = op.count * self._page_bytes[op.group] if self._page_bytes else 0
                if isinstance(op, LoadOp) and op.late:
                    late[op.move] = late.get(op.move, 0) + num_bytes
                    continue
                waits += num_bytes
                if isinstance(op, LoadOp):
                    self._loads[op.move] = start_s
        if self._files is not None:
            waits += self._files.order(output.page_ops, start_s)
        waits_s = self._timer.copy_s(waits) if waits else 0.0
        if self._files is not None:
            self._files.begin(start_s + waits_s)
        for move, num_bytes in late.items():
            begin_s = max([start_s + waits_s, *self._loads.values()])
            self._loads[move] = begin_s + self._timer.copy_s(num_bytes)
        return waits_s

    def collect(self) -> StepOutput:
        output, duration_s, end_s, heard_s, verified, draft_s = self._queue.popleft()
        self._clock.advance_to(end_s)
        sampled = [
            self._sample(row)
            for row in output.scheduled
            if (row.num_samples or row.num_candidates) and not row.num_drafts
        ]
        moves: dict[int, bool] = {}
        if self._loads:
            moves = {move: True for move, at_s in self._loads.items() if at_s <= end_s}
            self._loads = {move: at_s for move, at_s in self._loads.items() if at_s > end_s}
        if self._files is not None:
            moves |= self._files.ended(heard_s)
        return StepOutput(
            output.step, sampled, duration_s=duration_s, verified=verified, draft_s=draft_s, moves=moves,
            read={} if self._files is None else self._files.took(),
        )  # fmt: skip

    def close(self) -> None:
        self._queue.clear()

    def _verify(self, row: ScheduledRow) -> Verified:
        first = row.start + row.num_tokens
        made, accepted = (0, 0) if self._drafts is None else self._drafts.draft(row.seq_id, first, row.num_drafts)
        tokens = [self._token(row.seq_id, first + j) for j in range(accepted + 1)]
        return Verified(row.seq_id, tokens, made, row.num_tokens + accepted)

    def _token(self, seq_id: int, position: int) -> int:
        return (seq_id * 2654435761 + position * 40503) % self._vocab_size

    def _sample(self, row: ScheduledRow) -> Sampled:
        token = self._token(row.seq_id, row.start + row.num_tokens)
        if row.num_candidates:
            candidates = [((token + j) % self._vocab_size, -float(j + 1)) for j in range(row.num_candidates)]
            return Sampled(row.seq_id, [], candidates=candidates)
        return Sampled(row.seq_id, [(token + j) % self._vocab_size for j in range(row.num_samples)])
