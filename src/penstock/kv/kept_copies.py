"""Copies in a tier that stay when their sequence goes back to the device: the next swap copies only what is new.

A full block never changes, so its copy is good for as long as the sequence lives. Source: FastSwitch, arXiv 2411.18424,
section 3.3 (KV cache reuse).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.cache_spec import CacheGroup
from penstock.core.protocols import IdTier

Ids = list[list[int]]


class KeptCopies:
    """`ids(seq)[g]` hold the first full blocks of a sequence that is on the device, as many in every group.

    Only where every group is a full one: windows slide, and states change. Who needs the room takes it from the copy
    that has waited longest.

    Attributes:
        num_reused: blocks that needed no copy, since start.
    """

    def __init__(self, tier: IdTier, groups: Sequence[CacheGroup], block_size: int) -> None:
        self._tier = tier
        self._on = tier.keeps and all(group.spec.kind == "paged" for group in groups)
        self._block_size = block_size
        self._ids: dict[int, Ids] = {}
        self.num_reused = 0

    def keep(self, seq_id: int, ids: Ids, first: int, num_tokens: int) -> None:
        """What a sequence takes back to the device, blocks `first` and those behind it, stays here, too."""
        full = num_tokens // self._block_size
        if self._on and self._tier.late and first == 0 and full:  # of others a step tells nothing if all is well
            self.drop(seq_id)
            self._ids[seq_id] = [column[:full] for column in ids]
            self._tier.prepare_load(self._ids[seq_id])

    def take(self, seq_id: int, num_tokens: int) -> Ids | None:
        """The copies of a sequence that goes out with so many tokens, at most of as many blocks as are full.

        They are the caller's now. None if there are none.
        """
        kept = self._ids.pop(seq_id, None)
        if kept is None:
            return None
        full = num_tokens // self._block_size
        self._tier.evict([column[full:] for column in kept])
        return [column[:full] for column in kept]

    def prepare_store(self, needs: Sequence[int]) -> Ids | None:
        """Ids of the tier (`IdTier.prepare_store`), if need be in the place of copies kept here."""
        found = self._tier.prepare_store(needs)
        for g, need in enumerate(needs):
            if need > self._tier.num_free(g) + sum(len(ids[g]) for ids in self._ids.values()):
                return found
        while found is None and self._ids:
            self.drop(next(iter(self._ids)))
            found = self._tier.prepare_store(needs)
        return found

    def drop(self, seq_id: int) -> None:
        if (kept := self._ids.pop(seq_id, None)) is not None:
            self._tier.evict(kept)

    def contents(self) -> list[Ids]:
        """For the audit."""
        return list(self._ids.values())
