"""Which cache entries of a draft model are there: kept with the pages, because sequences share them and swap them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import HOST, AnyPageOp, BlendOp, LoadOp, OutsideOp, PackOp, StoreOp, StreamOp
from penstock.runner.rows import RowStore
from penstock.runner.storage import Storage

Counts = dict[int, npt.NDArray[np.int32]]


class Filled:
    """For each page of a model's own groups, how many of its leading slots hold entries of the tokens there.

    The model it drafts for computes every token of a block before the block enters the prefix cache; the draft model
    may not have seen any of them. A page that is found there, copied or brought back says itself what it has. Counted
    are the pages of a group's first layer: all layers are written together.
    """

    def __init__(self, groups: Sequence[CacheGroup], rows: RowStore, storage: Storage) -> None:
        assert all(group.spec.per_token for group in groups), "a draft model keeps tokens, no states"
        self._rows = rows
        device = {g.index: np.zeros(storage.num_pages[g.index], np.int32) for g in groups}
        host = {g.index: np.zeros(storage.tiers[HOST].num_pages[g.index], np.int32) for g in groups}
        self._device, self._host = device, host

    def track(self, ops: Iterable[AnyPageOp]) -> None:
        """The page operations of a step, in their order. Mutates: the counts."""
        for op in ops:
            # A store outside the process has nothing of a draft model, and no layer is away beside one.
            if not isinstance(op, PackOp | StreamOp | BlendOp | OutsideOp) and op.group in self._device:
                source: Counts = self._host if isinstance(op, LoadOp) else self._device
                target: Counts = self._host if isinstance(op, StoreOp) else self._device
                pages = target[op.group][op.dst : op.dst + op.count]
                pages[:] = 0 if op.src < 0 else source[op.group][op.src : op.src + op.count]

    def num_tokens(self, seq_id: int, most: int) -> int:
        """Leading tokens of a row, `most` at most, whose entries are there in every group."""
        size = self._rows.block_size
        for g, counts in self._device.items():
            filled = counts[self._pages(seq_id, g, 0, -(-most // size))]
            short = np.flatnonzero(filled < size)
            if short.size:
                first = int(short[0])
                most = min(most, first * size + int(filled[first]))
        return most

    def fill(self, seq_id: int, start: int, end: int) -> None:
        """Entries of tokens start ... end-1 are there now, as are all before them. Mutates: the counts."""
        if end <= start:
            return
        size = self._rows.block_size
        first, last = start // size, -(-end // size)
        for g, counts in self._device.items():
            counts[self._pages(seq_id, g, first, last)] = np.minimum(size, end - size * np.arange(first, last))

    def _pages(self, seq_id: int, group: int, first: int, last: int) -> npt.NDArray[np.int32]:
        """Those of the group's first layer."""
        return self._rows[seq_id].tables[group].pages(first, last)[: last - first]
