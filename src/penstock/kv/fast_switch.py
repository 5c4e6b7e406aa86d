"""Host memory for those who are swapped again and again: whole runs of blocks, loads beside the step, copies that stay.

Who is switched out a second time has most of what it computed in host memory already: only what is new is copied. What
comes back is copied by threads while others compute (`runner.beside_pages`). Blocks that lie side by side at both ends
are one operation. Source: FastSwitch, arXiv 2411.18424, section 3 (block groups, swap manager, KV cache reuse).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import LoadOp, StoreOp
from penstock.kv.host import HostTier
from penstock.kv.outbox import Outbox


class FastSwitchTier(HostTier):
    """An `IdTier`. Ids are handed out in ascending order, so that what is stored together lies together."""

    name = "fastswitch"
    keeps = True

    def __init__(
        self, groups: Sequence[CacheGroup], num_slabs: Sequence[int], outbox: Outbox, *, late: bool = True
    ) -> None:
        super().__init__(groups, num_slabs, outbox, late=late)

    def prepare_store(self, needs: Sequence[int]) -> list[list[int]] | None:
        ids = super().prepare_store(needs)
        return None if ids is None else [sorted(taken) for taken in ids]

    def store(self, group: int, slabs: Sequence[int], ids: Sequence[int]) -> None:
        width = self.pools[group].pages_per_slab
        for src, dst, n in runs(slabs, ids):
            assert src >= 0, "a block that is gone is stored"
            self._outbox.add(StoreOp(group, src * width, dst * width, n * width))

    def load(self, group: int, ids: Sequence[int], slabs: Sequence[int], move: int) -> None:
        width = self.pools[group].pages_per_slab
        for src, dst, n in runs(ids, slabs):
            assert dst >= 0, "a block that is gone is loaded"
            self._outbox.add(LoadOp(group, src * width, dst * width, n * width, move, self.late))

    def evict(self, keys: Sequence[Sequence[int]]) -> None:
        super().evict([list(reversed(column)) for column in keys])  # the first is the next to be handed out


def runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, target, how many) of each run of pairs that are neighbours at both ends."""
    found: list[tuple[int, int, int]] = []
    for src, dst in zip(sources, targets, strict=True):
        if found and (src, dst) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((src, dst, 1))
    return found
