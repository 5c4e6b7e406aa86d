"""Host memory for sequences that had to give up their device memory: swapped out whole, swapped in whole.

Sources: vLLM, arXiv 2309.06180, section 4.5 (swapping); FastServe, arXiv 2305.05920, section 4.3 (proactive swapping).
The copies are page operations like any other, planned in order, so a slab may be handed to somebody else in the very
list that copies it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.core.batch import TIER_IN, TIER_OUT
from penstock.core.cache_spec import CacheGroup
from penstock.kv.block_pool import BlockPool
from penstock.kv.outbox import Outbox

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq


class HostCopy:
    """Where a swapped-out sequence waits: `slabs[g]` of the host pools hold what is seen of its `num_tokens` tokens."""

    __slots__ = ("num_tokens", "slabs")

    def __init__(self, num_tokens: int, slabs: list[list[int]]) -> None:
        self.num_tokens = num_tokens
        self.slabs = slabs


class HostTier:
    """The host's pools. `num_slabs[g]` may be 0: then nothing is ever swapped."""

    def __init__(self, groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, outbox: Outbox) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._outbox = outbox
        self.pools = [BlockPool(n, g.pages_per_slab) for g, n in zip(self._groups, num_slabs, strict=True)]

    def need(self, group: CacheGroup, num_tokens: int) -> int:
        """Slabs of a group that a sequence of so many tokens takes; of a window group, those that it still sees."""
        if not group.spec.per_token:
            return 1
        return -(-num_tokens // self._block_size) - group.spec.first_block(num_tokens, self._block_size)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes that one way of the swap moves."""
        return sum(self.need(g, num_tokens) * g.slab_bytes(self._block_size) for g in self._groups)

    def copy_out(self, seq: Seq) -> HostCopy | None:
        """Plan the copies of everything `seq` has computed; None if the host lacks room, or some of it was dropped."""
        n = seq.num_computed
        if any(table.layers is not None or table.dropped for table in seq.tables):
            return None
        needs = [self.need(g, n) for g in self._groups]
        if any(need > pool.num_free for need, pool in zip(needs, self.pools, strict=True)):
            return None
        slabs: list[list[int]] = []
        for g, (need, pool) in enumerate(zip(needs, self.pools, strict=True)):
            taken = pool.alloc_slabs(need) or []
            slabs.append(taken)
            for src, dst in zip(seq.tables[g].held, taken, strict=False):
                self._outbox.copy_slab(g, src, dst, TIER_OUT)
        return HostCopy(n, slabs)

    def copy_in(self, seq: Seq, copy: HostCopy, num_present: int) -> None:
        """Plan the copies back into `seq`'s tables, but for the blocks of the first `num_present` tokens."""
        for g, group in enumerate(self._groups):
            base = group.spec.first_block(copy.num_tokens, self._block_size)
            first = max(base, num_present // self._block_size) if group.spec.per_token else 0
            for src, dst in zip(copy.slabs[g][first - base :], seq.tables[g].ids[first:], strict=False):
                self._outbox.copy_slab(g, src, dst, TIER_IN)

    def free(self, copy: HostCopy) -> None:
        for pool, slabs in zip(self.pools, copy.slabs, strict=True):
            pool.unref_slabs(slabs, unseen=True)

    def check_invariants(self, live: Iterable[Seq]) -> None:
        """AssertionError unless exactly the live sequences' copies are taken."""
        held: list[list[int]] = [[] for _ in self._groups]
        for seq in live:
            if seq.host is not None:
                assert not seq.tables, f"{seq} owns device memory and a host copy"
                for g, slabs in enumerate(seq.host.slabs):
                    held[g] += slabs
        for g, pool in enumerate(self.pools):
            pool.check_invariants()
            assert len(set(held[g])) == len(held[g]), f"group {g}: two sequences wait in one host slab"
            assert pool.num_slabs - pool.num_free == len(held[g]), f"group {g}: host slabs are lost"
