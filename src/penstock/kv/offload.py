"""The hierarchical prefix cache: blocks that it gives up on the device wait in a tier until somebody asks for them.

Only where every cache group is a full one. Source: SGLang's hierarchical cache (HiCache).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.protocols import IdTier
from penstock.kv.events import EventRecorder

Block = tuple[int, ...]
"""One slab, or one id of the tier, per cache group."""


class PrefixOffload:
    """Between a prefix tree, which says what moves and what goes, and a tier.

    Attributes:
        num_stored, num_loaded: blocks that went to the tier, and that came back for somebody, since start.
        num_kept: blocks that the tree has in the tier now.
    """

    def __init__(self, tier: IdTier, num_groups: int) -> None:
        self.num_stored = self.num_loaded = self.num_kept = 0
        self._tier = tier
        self._groups = range(num_groups)
        self.events: EventRecorder | None = None

    @property
    def num_free(self) -> int:
        """Blocks for which the tier has room."""
        return min(map(self._tier.num_free, self._groups))

    def keep(self, blocks: Sequence[Block]) -> list[Block] | None:
        """Plan to copy blocks of the device to the tier: their ids, or None, and nothing planned, without room."""
        ids = self._tier.prepare_store([len(blocks) for _ in self._groups])
        if ids is None:
            return None
        for group, slabs in enumerate(zip(*blocks, strict=True)):
            self._tier.store(group, slabs, ids[group])
        self.num_stored += len(blocks)
        self.num_kept += len(blocks)
        copies: list[Block] = list(zip(*ids, strict=True))
        if self.events is not None:
            self.events.copied(blocks, copies)
        return copies

    def drop(self, copies: Sequence[Block]) -> None:
        """What the tree had in the tier is given up; whoever is loading it has its own hold on it."""
        if copies:
            if self.events is not None:
                self.events.dropped(copies)
            self.num_kept -= len(copies)
            self._tier.evict(list(zip(*copies, strict=True)))
