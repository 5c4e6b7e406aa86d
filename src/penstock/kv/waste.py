"""Where the slots of the KV pool are: the three wastes of the vLLM paper, for paging and for its baselines alike.

A slot holds the keys and values of one token. With S slots a block, and for a sequence i: A_i slots of memory held,
F_i of them filled (or being filled by the step in flight), U_i tokens still to be written. U_i is known only
afterwards; here it is prompt + max_tokens - 1 - F_i, the truth for requests that ignore the end-of-sequence token (the
last token of an answer is never written). Then

    reserved   = sum_i min(A_i - F_i, U_i)        promised to tokens to come
    internal   = sum_i max(A_i - F_i - U_i, 0)    held and never filled
    external   = S * (quarantined blocks + stranded blocks)
    used       = S * (blocks in use) - reserved - internal

Quarantined blocks wait for a step in flight. Stranded ones are free, but no run of them is long enough for the head of
the queue; with blocks of one size none ever is. Source: arXiv 2309.06180, section 3 and figure 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.core.sequence import Sequence
from penstock.kv.manager import KVManager


class Waste(NamedTuple):
    """Slots of the manager's main group (full groups all count alike). The six add up to `total`."""

    used: int
    reserved: int
    internal: int
    external: int
    cached: int
    free: int

    @property
    def total(self) -> int:
        return sum(self)


def unfilled(kv: KVManager, live: Iterable[Sequence]) -> tuple[int, int]:
    """(reserved, internal) slots of the main group; what several samples of a request share counts once."""
    group = kv.main_group
    assert group is not None
    size = kv.block_size
    reserved = internal = 0
    begun: set[int] = set()
    for seq in live:
        if not seq.tables:
            continue
        filled = seq.num_computed + seq.num_inflight
        empty = kv.num_held(seq) * size - filled
        at, in_block = divmod(filled, size)
        ids = seq.tables[group].ids
        if in_block and at < len(ids):  # a fork shares the block that it has begun until it writes there
            if ids[at] in begun:
                empty -= size - in_block
            begun.add(ids[at])
        promised = min(empty, max(0, seq.prompt_len + seq.request.max_tokens - 1 - filled))
        reserved += promised
        internal += empty - promised
    return reserved, internal


def waste(kv: KVManager, live: Iterable[Sequence], head: Sequence | None = None) -> Waste:
    """Measure now. `live`: all with memory; `head`: the one that waits first. Zeros for models of slots only."""
    group = kv.main_group
    if group is None:
        return Waste(0, 0, 0, 0, 0, 0)
    size = kv.block_size
    stats = kv.stats().groups[group]
    reserved, internal = unfilled(kv, live)
    stranded = 0 if head is None else kv.num_stranded(head)
    return Waste(
        stats.used * size - reserved - internal,
        reserved,
        internal,
        (stats.quarantined + stranded) * size,
        stats.evictable * size,
        (stats.free - stranded) * size,
    )
