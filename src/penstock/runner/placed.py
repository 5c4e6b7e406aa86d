"""Blocks that lie on one of several ranks each, as one rank has them: its tables, its memory, its page operations.

The scheduler's side gives every rank the same numbers (`kv.ranked_pool`): slab s is slab s // N of rank s mod N.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import AnyPageOp, PageOp
from penstock.ops.plan import I32
from penstock.runner.tables import RowTable


class PlacedTable(RowTable):
    """A table whose `view` names the blocks that are on this rank, in order, by the rank's own slabs.

    All else is by the numbers that all ranks have. Shared only: a ragged update is our own bug (AssertionError).
    """

    __slots__ = ("_held", "_held_view", "_own", "_rank", "_size")

    def __init__(self, num_layers: int, num_slabs: int, rank: int, size: int) -> None:
        super().__init__(num_layers, num_slabs)
        self._rank, self._size = rank, size
        self._own: I32 = np.zeros((1, 8), np.int32)
        self._held: I32 = np.zeros(9, np.int32)
        self._held_view = self._held[:1]

    @property
    def held(self) -> I32:
        """[M + 1] of the M blocks of the last `view`: how many of the first ones are here."""
        return self._held_view

    def update(self, start: int, ids: Sequence[int], layer: int, dropped: int = -1) -> None:
        assert layer < 0, "blocks on one of several ranks are whole"
        assert dropped < 0, "blocks on one of several ranks are whole"
        super().update(start, ids, layer, dropped)
        end = self.num_blocks
        if end > self._own.shape[1]:
            own, held = np.zeros((1, 2 * end), np.int32), np.zeros(2 * end + 1, np.int32)
            own[:, : self._own.shape[1]], held[: len(self._held)] = self._own, self._held
            self._own, self._held = own, held
        changed = self._ids[0, start:end]
        here, first = changed % self._size == self._rank, int(self._held[start])
        self._held[start + 1 : end + 1] = first + np.cumsum(here)
        own_ids = changed[here] // self._size
        self._own[0, first : first + len(own_ids)] = own_ids

    def view(self, num_blocks: int) -> I32:
        view = self._view
        if view.shape[1] != num_blocks or view.base is not self._own:
            assert num_blocks <= self.num_blocks, f"{num_blocks} blocks wanted, {self.num_blocks} in the table"
            view = self._view = self._own[:, :num_blocks]
            self._held_view = self._held[: num_blocks + 1]
        return view


class WithTables(Protocol):
    """A sequence's tables, by cache group (`runner.rows.Row`)."""

    tables: tuple[RowTable, ...]


def held_of(rows: Sequence[WithTables], group: int) -> tuple[I32, ...] | None:
    """See `ops.plan.GroupPlan`, of the blocks of each row's last `view`; None: all are on this rank."""
    if not rows or not isinstance(rows[0].tables[group], PlacedTable):
        return None
    return tuple([table.held for row in rows if isinstance(table := row.tables[group], PlacedTable)])


class OwnBlocks:
    """Which slabs and pages of each group are on `rank`; None from `placed_on` where all of all groups are."""

    def __init__(self, groups: Sequence[CacheGroup], rank: int) -> None:
        self.rank = rank
        self.groups = {g.index: (g.pages_per_slab, g.spec.ranks) for g in groups if g.spec.whole}

    def num_slabs(self, num_slabs: Sequence[int]) -> tuple[int, ...]:
        """Those of this rank, of the first `num_slabs` of each group."""
        return tuple(self._before(g, n) for g, n in enumerate(num_slabs))

    def ops(self, ops: Iterable[AnyPageOp]) -> Iterator[AnyPageOp]:
        """What this rank has to do of them, by its own pages, in order. Pages come by whole slabs, and are copied
        within a rank (else AssertionError)."""
        for op in ops:
            if not isinstance(op, PageOp) or op.group not in self.groups:
                assert getattr(op, "group", -1) not in self.groups, f"{op}: blocks on one of several ranks stay there"
                yield op
                continue
            width, size = self.groups[op.group]
            (slab, rest), (count, more) = divmod(op.dst, width), divmod(op.count, width)
            assert not rest + more, f"{op}: pages of no whole slab"
            first, last = self._before(op.group, slab), self._before(op.group, slab + count)
            if first == last:
                continue
            source = op.src
            if source >= 0:
                assert count == 1, f"{op}: more slabs than one are copied"
                assert source // width % size == self.rank, f"{op}: a copy from one rank to another"
                source = source // width // size * width
            yield PageOp(op.group, source, first * width, (last - first) * width)

    def _before(self, group: int, slab: int) -> int:
        """Slabs of this rank before `slab`."""
        if group not in self.groups:
            return slab
        size = self.groups[group][1]
        return (slab - self.rank + size - 1) // size


def placed_on(groups: Sequence[CacheGroup], rank: int) -> OwnBlocks | None:
    """What `rank` has of the groups; None: blocks are not placed."""
    size = max((g.spec.ranks for g in groups if g.spec.whole), default=0)
    return OwnBlocks(groups, rank % size) if size else None
