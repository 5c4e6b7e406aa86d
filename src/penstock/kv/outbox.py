"""What the ranks have to be told before the next step: table updates and page operations, in order of planning."""

from __future__ import annotations

from penstock.core.batch import TableUpdate
from penstock.core.page_ops import AnyPageOp, PackOp, PageOp
from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable


class Outbox:
    """Collects until drained.

    The rank runs page operations strictly in list order. That is what makes it safe to hand out and zero a slab that an
    earlier operation of the same list still copies from.
    """

    __slots__ = ("_ops", "_pools", "_tables")

    def __init__(self, pools: list[BlockPool]) -> None:
        self._pools = pools
        self._ops: list[AnyPageOp] = []
        self._tables: dict[int, list[TableUpdate]] = {}

    def table(self, seq_id: int, group: int, start: int, ids: list[int], layer: int = -1, dropped: int = -1) -> None:
        """Blocks `start`, `start + 1`, ... of the sequence's table are now `ids` (copied: the list may change)."""
        if ids:
            self._tables.setdefault(seq_id, []).append(TableUpdate(seq_id, group, start, list(ids), layer, dropped))

    def whole_table(self, seq_id: int, group: int, table: BlockTable) -> None:
        """The table from its first block on, every layer of it."""
        lines = [table.ids] if table.layers is None else table.layers
        for line, ids in enumerate(lines):
            dropped = table.dropped[line] if table.dropped else -1
            self.table(seq_id, group, 0, ids, -1 if table.layers is None else line, dropped)

    def zero_slabs(self, group: int, slabs: list[int]) -> None:
        """Fill slabs with zeros; ascending neighbours share one operation."""
        width = self._pools[group].pages_per_slab
        self._zero(group, [slab * width for slab in slabs], width)

    def zero_pages(self, group: int, pages: list[int]) -> None:
        self._zero(group, pages, 1)

    def _zero(self, group: int, firsts: list[int], width: int) -> None:
        i = 0
        while i < len(firsts):
            j = i + 1
            while j < len(firsts) and firsts[j] == firsts[j - 1] + width:
                j += 1
            self._ops.append(PageOp(group, -1, firsts[i], (j - i) * width))
            i = j

    def copy_slab(self, group: int, src: int, dst: int) -> None:
        width = self._pools[group].pages_per_slab
        assert src >= 0, "a block that is gone is copied"  # a negative source would mean: fill with zeros
        self._ops.append(PageOp(group, src * width, dst * width, width))

    def copy_page(self, group: int, src: int, dst: int) -> None:
        assert src >= 0, "a block that is gone is copied"
        self._ops.append(PageOp(group, src, dst, 1))

    def pack(self, seq_id: int, group: int, lines: list[list[int]], sources: list[list[int]], aside: list[int]) -> None:
        """What the sequence's selection keeps moves from the pages `sources` into the pages `lines`.

        Both are named, because the rank's own table may be older (a block may have changed for that of the prefix
        cache since), and newer (a fork goes on with the new pages when the sequence itself has ended).
        """
        self._ops.append(PackOp(group, seq_id, tuple(map(tuple, lines)), tuple(map(tuple, sources)), tuple(aside)))

    def add(self, op: AnyPageOp) -> None:
        """An operation of somebody else's making (a tier's)."""
        self._ops.append(op)

    def discard(self, seq_id: int) -> None:
        """Forget the table updates of a sequence that is gone. Its page operations stay: they harm nobody."""
        self._tables.pop(seq_id, None)

    def pending(self) -> set[int]:
        """Sequences that have table updates waiting."""
        return set(self._tables)

    def drain(self) -> tuple[list[TableUpdate], list[AnyPageOp]]:
        """Everything collected, once."""
        tables = [update for updates in self._tables.values() for update in updates]
        ops = self._ops
        self._tables = {}
        self._ops = []
        return tables, ops
