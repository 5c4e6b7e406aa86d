"""Where the slots of the KV pool are: what the vLLM paper calls the wastes, measured on the engine's own tables.

A slot holds the keys and values of one token. With C slots in the pool, S slots a block, and for a running sequence i:
A_i slots of its blocks, F_i slots filled (or being filled by the step in flight), U_i tokens it will still write
before it ends (known in a simulation):

    reserved   = sum_i min(A_i - F_i, U_i)         promised to tokens to come
    internal   = sum_i max(A_i - F_i - U_i, 0)     allocated and never filled
    external   = S * (quarantined blocks)          free, but nobody can have them before a step in flight retires
    tokens     = S * (blocks in use) - reserved - internal     filled; blocks that several sequences share count once
    cached     = S * (evictable blocks)            finished prompts kept for reuse; given up when somebody needs room
    free       = C - all of these

With blocks of equal size no free block is too small for anybody, so `external` is nothing but that delay. Source: Kwon
et al., PagedAttention, arXiv 2309.06180, section 3 and figure 2 (there, reservation of whole sequences makes the
wastes).
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.sequence import Sequence
from penstock.kv.manager import KVManager
from penstock.kv.waste import unfilled

SHARES = ("tokens", "reserved", "internal", "external", "cached")
"""Parts of the pool, in the order of `SlotUse.shares`; what is missing to 1 is free."""
EXACT_STEPS = 4096
STRIDE = 16


class SlotUse:
    """Measures one KVManager. All full groups have equally many blocks, so its main group speaks for all.

    Walking all sequences costs time: reserved and internal are measured at each of the first EXACT_STEPS steps, and at
    every STRIDE-th one after that.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._group = kv.main_group
        self._measured = 0
        self._reserved = 0
        self._internal = 0
        self.peak = 0.0
        """Largest share of the pool that was in use (everything but cached and free)."""

    def shares(self, running: Iterable[Sequence], head: Sequence | None = None) -> tuple[float, ...]:
        """The parts named in SHARES, as fractions of the pool. Zeros for models of slots only.

        `head` waits first: free slots that it cannot use because they do not lie together are external fragmentation.
        """
        if self._group is None:
            return (0.0,) * len(SHARES)
        size = self._kv.block_size
        stats = self._kv.stats().groups[self._group]
        self._measured += 1
        if self._measured <= EXACT_STEPS or self._measured % STRIDE == 0:
            self._reserved, self._internal = unfilled(self._kv, running)
        used = stats.used * size
        reserved = min(self._reserved, used)
        internal = min(self._internal, used - reserved)
        total = stats.total * size
        stranded = 0 if head is None else self._kv.num_stranded(head)
        self.peak = max(self.peak, (stats.used + stats.quarantined) / stats.total)
        return (
            (used - reserved - internal) / total,
            reserved / total,
            internal / total,
            (stats.quarantined + stranded) * size / total,
            stats.evictable * size / total,
        )
