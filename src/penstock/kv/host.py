"""Host memory as a tier: a pool of slabs per cache group. Its copies are page operations, carried out in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import LoadOp, StoreOp
from penstock.core.protocols import Ids
from penstock.kv.block_pool import BlockPool
from penstock.kv.outbox import Outbox


class HostTier:
    """An `IdTier`. `num_slabs[g]` may be 0: then nothing of that group finds room.

    `late`: ranks may take their time for what they bring back (an accelerator that copies beside its steps).
    """

    name = "host"
    keeps = False

    def __init__(
        self, groups: Sequence[CacheGroup], num_slabs: Sequence[int], outbox: Outbox, *, late: bool = False
    ) -> None:
        self.pools = [BlockPool(n, g.pages_per_slab) for g, n in zip(groups, num_slabs, strict=True)]
        self.late = late
        self._outbox = outbox

    def num_free(self, group: int) -> int:
        return self.pools[group].num_free

    def prepare_store(self, needs: Sequence[int]) -> list[list[int]] | None:
        if any(need > pool.num_free for need, pool in zip(needs, self.pools, strict=True)):
            return None
        return [pool.alloc_slabs(need) or [] for need, pool in zip(needs, self.pools, strict=True)]

    def prepare_load(self, keys: Ids) -> None:
        for pool, slabs in zip(self.pools, keys, strict=True):
            pool.ref_slabs(slabs)

    def store(self, group: int, slabs: Sequence[int], ids: Sequence[int]) -> None:
        width = self.pools[group].pages_per_slab
        for src, dst in zip(slabs, ids, strict=True):
            assert src >= 0, "a block that is gone is stored"
            self._outbox.add(StoreOp(group, src * width, dst * width, width))

    def load(self, group: int, ids: Sequence[int], slabs: Sequence[int], move: int) -> None:
        width = self.pools[group].pages_per_slab
        for src, dst in zip(ids, slabs, strict=True):
            assert dst >= 0, "a block that is gone is loaded"
            self._outbox.add(LoadOp(group, src * width, dst * width, width, move, self.late))

    def complete_load(self, keys: Ids, *, good: bool = True) -> None:
        """What was not good is dropped by whoever found it: the prefix cache, by `evict`."""
        self.evict(keys)

    def evict(self, keys: Ids) -> None:
        """One holder less."""
        for pool, slabs in zip(self.pools, keys, strict=True):
            pool.unref_slabs(slabs, unseen=True)

    def check_invariants(self, held: Ids) -> None:
        for g, (pool, ids) in enumerate(zip(self.pools, held, strict=True)):
            pool.check_invariants()
            counted = {slab: count for slab, count in enumerate(pool.refs) if count}
            assert counted == Counter(ids), f"group {g}: ids {counted} of tier {self.name} have holders {Counter(ids)}"


class DiskTier(HostTier):
    """The same, of a file (`runner.disk_pages`)."""

    name = "disk"
