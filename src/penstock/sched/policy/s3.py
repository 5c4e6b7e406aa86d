"""S3: memory is packed by predicted lengths; who outgrows its prediction yields, and comes back with twice the room.

Of those that wait, the largest go first, and who does not fit lets others pass (first fit, decreasing), so that gaps
are filled with whoever fills them best. What a request takes is its prompt and the bucket of its predicted length
(`core.lengths`), which memory sets aside (`sched.reserve`, or runs with `kv_allocator contiguous-predicted`). The price
of packing is order, so it has a bound: whoever has waited for `max_wait_s` goes before everybody and is not passed.
Source: Jin et al., S3, arXiv 2306.06000, sections 3 and 4 (decreasing first fit; the supervisor preempts who outgrows
its allocation and doubles it).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.lengths import room_for
from penstock.core.sequence import Sequence
from penstock.sched.policy.fcfs import Fcfs


class S3(Fcfs):
    """Args:
    window: how many of the waiting, the oldest, are looked at in a step, >= 1.
    max_wait_s: who has waited for so long is overtaken no more, >= 0.
    """

    name = "s3"
    packs = True

    def __init__(self, window: int = 32, max_wait_s: float = 30.0) -> None:
        if window < 1 or not max_wait_s >= 0:
            raise ConfigError("window of s3 must be at least 1, and max_wait_s at least 0", field="window")
        self.window = window
        self.max_wait_s = max_wait_s
        self._now_s = 0.0
        self._granted: dict[int, int] = {}
        """Tokens of output for which each running sequence was let in."""

    def begin_step(self, now_s: float, kv: Any) -> None:
        self._now_s = now_s

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        self._granted = {seq.seq_id: self._grant(seq) for seq in running}
        first = waiting[: self.window]
        oldest = first[:1]
        if oldest and self._now_s - oldest[0].request.arrival_s >= self.max_wait_s:
            return super().order(running, oldest)
        return super().order(running, sorted(first, key=self._size))

    def victim(self, running: Seq[Sequence], needy: Sequence) -> Sequence | None:
        """Who has outgrown its prediction, the youngest first; `needy` itself if it has; else as first come."""
        if needy is not running[0] and self._outgrown(needy):
            return None
        for seq in reversed(running[1:]):
            if seq is not needy and seq.num_inflight == 0 and seq.tables and self._outgrown(seq):
                return seq
        return super().victim(running, needy)

    def _grant(self, seq: Sequence) -> int:
        return self._granted.get(seq.seq_id) or room_for(seq.request, seq.num_generated)

    def _outgrown(self, seq: Sequence) -> bool:
        return seq.num_generated >= self._grant(seq) < seq.request.max_tokens

    @staticmethod
    def _size(seq: Sequence) -> tuple[int, ...]:
        return (-seq.prompt_len - room_for(seq.request, seq.num_generated), seq.arrival, seq.index)
