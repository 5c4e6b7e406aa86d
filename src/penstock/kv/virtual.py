"""Baseline: every sequence has a contiguous range of addresses for its longest length, and memory only where it wrote.

Source: vAttention, arXiv 2405.04437: virtual memory is reserved per request, physical memory is mapped as tokens come,
so attention needs no block table. Here the mapping is the operating system's (`runner.lazy`): addresses cost nothing
until written, and zeroing whole pages gives their memory back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from math import gcd, lcm

from penstock.core.cache_spec import CacheGroup
from penstock.core.sequence import Sequence
from penstock.kv.contiguous import ContiguousManager
from penstock.kv.cursor import PrefixMatch
from penstock.kv.stats import GroupStats, KVStats

OS_PAGE_BYTES = 4096
"""Lanes begin at multiples of it in every plane, so that giving back one lane never touches the page of another."""


def lane_blocks(groups: Seq[CacheGroup], block_size: int, max_model_len: int) -> int:
    """Blocks of address space per sequence: max_model_len, rounded up to whole pages of memory in every plane."""
    step = 1
    for group in groups:
        if group.spec.per_token:
            for plane in group.spec.planes:
                slab_bytes = group.pages_per_slab * block_size * plane.num_bytes
                step = lcm(step, OS_PAGE_BYTES // gcd(OS_PAGE_BYTES, slab_bytes))
    return -(-max_model_len // (block_size * step)) * step


def virtual_slabs(
    groups: Seq[CacheGroup], num_slabs: Seq[int], block_size: int, max_model_len: int, max_num_seqs: int
) -> tuple[int, ...]:
    """Slabs that have an address: a lane per running sequence; slots are not virtual."""
    lanes = max_num_seqs * lane_blocks(groups, block_size, max_model_len)
    return tuple(lanes if g.spec.per_token else n for g, n in zip(groups, num_slabs, strict=True))


class VirtualManager(ContiguousManager):
    """Runs of addresses; `num_slabs` limits what is opened, over all sequences together.

    Admission and growth count opened blocks against that budget, and whoever cannot grow is preempted as ever. A
    release plans the zeroing of the whole lane, which is what returns its memory: with the next step, before that step
    writes anything, so the budget is free at once. (vAttention defers reclamation too.) Memory of tokens that left a
    sliding window stays opened.
    """

    def __init__(
        self,
        groups: Seq[CacheGroup],
        num_slabs: Seq[int],
        block_size: int,
        *,
        max_model_len: int,
        max_num_seqs: int,
        slot_checkpoint_tokens: int = 512,
        host_slabs: Seq[int] | None = None,
        tier: str = "host",
    ) -> None:
        super().__init__(
            groups,
            virtual_slabs(groups, num_slabs, block_size, max_model_len, max_num_seqs),
            block_size,
            max_model_len=max_model_len,
            slot_checkpoint_tokens=slot_checkpoint_tokens,
            host_slabs=host_slabs,
            tier=tier,
        )
        self.lane_blocks = lane_blocks(groups, block_size, max_model_len)
        self.budget_blocks = min((num_slabs[g] for g in self._paged), default=0)

    def reservation(self, seq: Sequence, num_tokens: int = 0) -> int:
        """The lane; it holds the longest sequence there can be."""
        return self.lane_blocks

    def _affords(self, num_blocks: int) -> bool:
        return not self._paged or self._num_opened + num_blocks <= self.budget_blocks

    def can_admit(self, seq: Sequence, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether memory for `num_tokens` tokens, a lane and a slot are there."""
        return self._affords(self._blocks(num_tokens)) and super().can_admit(seq, match, num_tokens)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make tokens up to `num_tokens` writable; False if the memory for them is not to be had."""
        more = self._blocks(num_tokens) - self._opened[seq.seq_id]
        return (more <= 0 or self._affords(more)) and super().grow(seq, num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        return self._affords(self._blocks(parent.num_computed)) and super().fork(parent, child)

    def release(self, seq: Sequence) -> None:
        if self._opened.get(seq.seq_id, 0):
            for g in self._paged:
                self.outbox.zero_slabs(g, seq.tables[g].ids)
        super().release(seq)

    def num_held(self, seq: Sequence) -> int:
        return self._opened.get(seq.seq_id, 0)

    def num_stranded(self, seq: Sequence) -> int:
        return 0

    def stats(self) -> KVStats:
        """Memory, not addresses: paged groups count opened blocks against the budget."""
        stats = super().stats()
        opened, total = self._num_opened, self.budget_blocks
        groups = [
            GroupStats(total, total - opened, opened, 0, 0) if g.spec.per_token else own
            for g, own in zip(self.groups, stats.groups, strict=True)
        ]
        return replace(stats, groups=tuple(groups))
