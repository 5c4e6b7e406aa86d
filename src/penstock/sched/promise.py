"""Who may run a token that nobody here knows yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.sequence import NEVER, Sequence
from penstock.sched.pauses import tokens_left

if TYPE_CHECKING:
    from penstock.kv.manager import KVManager


def may_promise(kv: KVManager, seq: Sequence, start: int) -> bool:
    """Whether the token at `start`, which a step in flight will choose, may run: the rank will know it by then. If the
    sequence ends with it, the row was for nothing, and nobody hears of it.

    Nobody is preempted for it. Mutates: the sequence's memory.
    """
    request = seq.request
    if start != len(seq.token_ids) or seq.held or request.beam is not None or request.pooling:
        return False
    if seq.next_selection != NEVER or tokens_left(seq) <= 0:
        return False
    if request.n > 1 and seq.num_generated == 0:
        return False  # it may fork yet
    return kv.cut(seq, start, 1) == 1 and (start < seq.writable or kv.grow(seq, start + 1))
