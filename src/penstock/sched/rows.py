"""What a sequence is owed for a chunk of its tokens, and what it begins with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING

from penstock.core.batch import ScheduledRow
from penstock.sched.pauses import tokens_left

if TYPE_CHECKING:
    from penstock.core.events import EngineStats
    from penstock.core.protocols import SchedulingPolicy
    from penstock.core.sequence import Sequence
    from penstock.kv.manager import KVManager

BEAM_CANDIDATES_PER_WIDTH = 2
"""A beam of width k looks at 2k continuations: up to k may end, and k must still go on."""


def row_of(kv: KVManager, seq: Sequence, n: int) -> ScheduledRow:
    """The next `n` tokens of `seq` that no step has been given yet."""
    start = seq.num_computed + seq.num_inflight
    request = seq.request
    samples = candidates = 0
    if start + n == seq.num_known and not request.pooling:
        if request.beam is not None:
            candidates = BEAM_CANDIDATES_PER_WIDTH * request.beam.beam_width
        else:
            samples = request.n if seq.num_generated == 0 else 1
    prompt_from = -1
    if request.rules.num_prompt_logprobs >= 0 and seq.index == 0 and start < seq.prompt_len - 1:
        prompt_from = max(start, seq.prompt_logprobs_done)
    keeps = kv.selections.keeps(seq, start + n) if start + n == seq.next_selection else 0
    return ScheduledRow(seq.seq_id, start, n, samples, candidates, prompt_from, request.pooling, keeps=keeps)


def row_with_drafts(
    kv: KVManager, seq: Sequence, start: int, budget: int, room: tuple[int, int]
) -> ScheduledRow | None:
    """A decode with room for at most `room` (drafts, depth), as far as budget and memory go; None: without any.

    Nobody is preempted for it. Slots behind the last token that may still come are nobody's: no drafts there.
    """
    num_left = tokens_left(seq)
    num_drafts = min(room[0], num_left, budget - 1)
    if num_drafts > 0:
        num_drafts = kv.cut(seq, start, 1 + num_drafts) - 1
    if num_drafts <= 0 or not kv.grow(seq, start + 1 + num_drafts):
        return None
    return ScheduledRow(seq.seq_id, start, 1, 1, num_drafts=num_drafts, draft_depth=min(room[1], num_left))


def candidates_of(
    policy: SchedulingPolicy, running: list[Sequence], waiting: list[Sequence], rows: Sized
) -> Iterable[Sequence]:
    """In the policy's order, while the step, which has `rows` by now, may have more."""
    candidates = policy.order(running, waiting)
    return until_full(candidates, rows, policy.max_rows) if policy.max_rows else candidates


def until_full(candidates: Iterable[Sequence], rows: Sized, most: int) -> Iterator[Sequence]:
    """`candidates`, until the step that is put together from them has `most` rows."""
    for seq in candidates:
        if len(rows) >= most:
            return
        yield seq


def count_found(seq: Sequence, kv: KVManager, stats: EngineStats) -> None:
    """`seq` begins with what was found of it, which has come. What a load only promises counts nowhere."""
    if seq.scheduled_s is None and seq.num_generated == 0:
        seq.first_cached = seq.num_cached
        kv.hints.admitted(seq)
    if seq.request.reads_cache:
        stats.num_prefix_queries_tokens += seq.num_known
    stats.num_prefix_hit_tokens += seq.num_cached
