"""Tables whose lines have forgotten different tokens: growth, and what is left of them after a selection.

A line is a layer, or one kv head of it: see `ops.plan.GroupPlan`. Positions become slots by what the line has dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.outbox import Outbox


class LineGrowth(NamedTuple):
    """What a ragged table needs: `new[line]` pages behind each line, and copies of shared (line, block)."""

    new: list[int]
    copies: list[tuple[int, int]]

    @property
    def num_pages(self) -> int:
        return sum(self.new) + len(self.copies)


def line_blocks(num_slots: int, block_size: int) -> int:
    return -(-num_slots // block_size)


def share_table(table: BlockTable, pool: BlockPool, num_tokens: int, block_size: int) -> BlockTable:
    """A table, shared or ragged, of the same blocks up to `num_tokens` tokens, with a reference on each."""
    if table.layers is None:
        dropped = table.dropped[0] if table.dropped else 0
        copy = BlockTable(table.ids[: line_blocks(num_tokens, block_size) - dropped // block_size], base=table.base)
        pool.ref_slabs(copy.held)
    else:
        gone = table.dropped or [0] * len(table.layers)
        ends = [line_blocks(num_tokens - d, block_size) for d in gone]
        copy = BlockTable(layers=[p[:e] for p, e in zip(table.layers, ends, strict=True)], base=table.base)
        for pages in copy.held_pages:
            pool.ref_pages(pages)
    copy.dropped = list(table.dropped)
    return copy


def plan_lines(table: BlockTable, pool: BlockPool, start: int, end: int, block_size: int) -> LineGrowth:
    """What it takes to write tokens at positions start ... end-1. Reads only."""
    assert table.layers is not None
    new: list[int] = []
    copies: list[tuple[int, int]] = []
    for line, (pages, dropped) in enumerate(zip(table.layers, table.dropped, strict=True)):
        first, last = (start - dropped) // block_size, line_blocks(end - dropped, block_size)
        copies += [(line, b) for b in range(first, min(len(pages), last)) if pool.page_refs[pages[b]] > 1]
        new.append(max(0, last - len(pages)))
    return LineGrowth(new, copies)


def apply_lines(
    table: BlockTable, pool: BlockPool, growth: LineGrowth, seq_id: int, group: int, outbox: Outbox
) -> None:
    """Mutates: table, pool, outbox. The pool must have the pages (AssertionError)."""
    assert table.layers is not None
    taken = pool.alloc_pages(growth.num_pages)
    assert taken is not None
    for line, block in growth.copies:
        pages, page = table.layers[line], taken.pop()
        outbox.copy_page(group, pages[block], page)
        pool.unref_pages((pages[block],))
        pages[block] = page
        outbox.table(seq_id, group, block, [page], line)
    outbox.zero_pages(group, sorted(taken))
    for line, (pages, num) in enumerate(zip(table.layers, growth.new, strict=True)):
        own = [taken.pop() for _ in range(num)]
        outbox.table(seq_id, group, len(pages), own, line)
        pages += own


def own_pages(table: BlockTable, pool: BlockPool) -> list[list[int]]:
    """Per line, the pages that nobody else looks at: they can be filled anew. Of a shared table: those of its slabs."""
    width = pool.pages_per_slab
    if table.layers is None:
        slabs = [slab for slab in table.ids if pool.refs[slab] == 1]
        return [[slab * width + line for slab in slabs] for line in range(width)]
    return [[page for page in pages if pool.page_refs[page] == 1] for pages in table.layers]


def num_missing(table: BlockTable, pool: BlockPool, counts: Sequence[int], block_size: int) -> int:
    """Pages that have to come from the pool for lines of `counts` tokens."""
    own = own_pages(table, pool)
    return sum(max(0, line_blocks(n, block_size) - len(o)) for n, o in zip(counts, own, strict=True))


def cut_lines(
    table: BlockTable, pool: BlockPool, counts: Sequence[int], num_tokens: int, block_size: int,
    seq_id: int, group: int, outbox: Outbox, aside: Sequence[int] = (),
) -> None:  # fmt: skip
    """The table becomes ragged, with lines of `counts` slots out of the `num_tokens` tokens computed; the rest is free.

    The rank fills the pages (`Outbox.pack`). A line's own pages are used first, then spare ones, then others.
    Mutates: table, pool, outbox.
    """
    spare: list[int] = []
    for slab in table.spare:
        pool.split(slab)
        spare += range(slab * pool.pages_per_slab, (slab + 1) * pool.pages_per_slab)
    table.spare = []
    sources = [table.ids] if table.layers is None else table.layers
    if table.layers is None:
        width = pool.pages_per_slab
        mine = [slab for slab in table.ids if pool.refs[slab] == 1]
        for slab in mine:
            pool.split(slab)
        pool.unref_slabs([slab for slab in table.ids if pool.refs[slab] > 1])
        lines = [[slab * width + line for slab in mine] for line in range(width)]
        others: list[list[int]] = [[] for _ in lines]
    else:
        lines = own_pages(table, pool)
        others = [[p for p in pages if pool.page_refs[p] > 1] for pages in table.layers]
    kept: list[list[int]] = []
    for pages, shared, count in zip(lines, others, counts, strict=True):
        need = line_blocks(count, block_size)
        kept.append(pages[:need])
        pool.unref_pages(pages[need:])
        pool.unref_pages(shared)
    for pages, count in zip(kept, counts, strict=True):
        missing = line_blocks(count, block_size) - len(pages)
        pages += [spare.pop() for _ in range(min(missing, len(spare)))]
        more = pool.alloc_pages(line_blocks(count, block_size) - len(pages))
        assert more is not None
        pages += more
    pool.unref_pages(spare)
    # What was freed here is handed out, and zeroed, behind this.
    outbox.pack(seq_id, group, kept, sources, list(aside))
    table.ids, table.layers = [], kept
    table.dropped = [num_tokens - count for count in counts]
    outbox.whole_table(seq_id, group, table)
