"""The laws of the KV manager, counted afresh. Slow; for tests and sampling in production."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.core.batch import GONE
from penstock.kv.block_pool import BROKEN, BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.cursor import PrefixCursor
from penstock.kv.window_pool import WindowPool

if TYPE_CHECKING:
    from penstock.core.cache_spec import CacheGroup
    from penstock.core.protocols import PrefixCache
    from penstock.core.sequence import Sequence as Seq
    from penstock.kv.adapter_pages import AdapterPages
    from penstock.kv.swap import SwapIn


class Audit:
    """Recounts who holds what. Every violation is an AssertionError that names it."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: Sequence[BlockPool],
        cache: PrefixCache,
        block_size: int,
        generation: int,
        adapters: AdapterPages | None = None,
    ) -> None:
        self.groups = groups
        self.pools = pools
        self.cache = cache
        self.block_size = block_size
        self.generation = generation
        self.adapters = adapters
        self.per_token = [g.index for g in groups if g.spec.per_token]
        self.full = [g.index for g in groups if g.spec.kind == "paged"]
        self.slots = [g.index for g in groups if g.spec.kind == "slot"]
        self.slabs: list[Counter[int]] = [Counter() for _ in groups]
        self.pages: list[Counter[int]] = [Counter() for _ in groups]
        self.held: list[Any] = []
        self.loads: Mapping[int, SwapIn] = {}

    def run(self, live: Iterable[Seq], leaving: Iterable[Any], pending: set[int], loads: Mapping[int, SwapIn]) -> None:
        """`leaving`: entries held only because steps in flight saw them; `pending`: sequences with table updates;
        `loads`: on their way."""
        live = list(live)
        self.loads = loads
        for pool in self.pools:
            pool.check_invariants()
        blocks, checkpoints = self.cache.contents()
        columns = list(zip(*blocks, strict=True)) or [()] * len(self.per_token)
        self._handles(columns)
        self._count(self.per_token, [self._found(g, column) for g, column in zip(self.per_token, columns, strict=True)])
        self._count(self.slots, list(zip(*checkpoints, strict=True)) or [()] * len(self.slots))
        cached = [set(counter) for counter in self.slabs]
        for g, counter in enumerate(self.slabs):
            assert all(n == 1 for n in counter.values()), f"group {g}: the prefix cache keeps a slab twice"
        for seq in live:
            self._sequence(seq, cached)
        for load in loads.values():
            self._count(list(range(len(self.groups))), load.slabs)
        if self.adapters is not None:
            self._adapters(self.adapters, live)
        self._references()
        self.held.extend(leaving)
        self.cache.check_invariants(self.held)
        alone = len(self._alone(columns, len(blocks)))
        assert self.cache.num_evictable <= alone, (
            f"{self.cache.num_evictable} blocks count as evictable, but evicting frees {alone} at most"
        )
        owners = {seq.seq_id for seq in live if seq.tables}
        assert pending <= owners, f"table updates wait for sequences {pending - owners} that own nothing"

    def _adapters(self, adapters: AdapterPages, live: list[Seq]) -> None:
        """Blocks of adapters are nobody else's, and adapters have the users that they count."""
        for held in adapters.held:
            for block in held.blocks:
                for g, slab in zip(self.full, block, strict=True):
                    assert not self.slabs[g][slab], f"slab {slab} of group {g} has an adapter's numbers and is in use"
                    self.slabs[g][slab] = 1
        users = Counter(ref.hash for seq in live if seq.tables and (ref := seq.request.rules.adapter) is not None)
        adapters.check_invariants(dict(users))

    def _count(self, groups: list[int], columns: Sequence[Sequence[int]]) -> None:
        """`columns`: of each group, the slabs that somebody holds."""
        for g, column in zip(groups, columns, strict=True):
            self.slabs[g].update(column)
            self.slabs[g].pop(GONE, None)

    def _found(self, g: int, column: Sequence[int]) -> Sequence[int]:
        """What blocks of the prefix cache have in group `g`, with slabs for handles."""
        pool = self.pools[g]
        return [pool.slab_of(x) for x in column] if isinstance(pool, WindowPool) else column

    def _alone(self, columns: list[tuple[int, ...]], num_blocks: int) -> set[int]:
        """Indices of the cache's blocks that nobody else holds."""
        alone = set(range(num_blocks))
        for g, column in zip(self.per_token, columns, strict=True):
            if g in self.full:
                refs = self.pools[g].refs
                alone = {i for i in alone if refs[column[i]] == 1}
        return alone

    def _handles(self, columns: list[tuple[int, ...]]) -> None:
        """Every handle belongs to one block of the cache."""
        for g, pool in enumerate(self.pools):
            if isinstance(pool, WindowPool):
                names = columns[self.per_token.index(g)]
                assert len(set(names)) == len(names), f"group {g}: two blocks have one handle"
                lost = pool.alive().keys() - set(names)
                assert not lost, f"group {g}: handles {lost} are alive, but no block of the prefix cache has them"

    def _sequence(self, seq: Seq, cached: list[set[int]]) -> None:
        if not seq.tables and (self.groups or seq.node is None):  # without groups who runs has a cursor alone
            assert seq.node is None, f"{seq} owns no memory but has a cursor"
            assert seq.num_computed == 0, f"{seq} owns no memory but has computed tokens"
            return
        assert len(seq.tables) == len(self.groups), f"{seq} has {len(seq.tables)} tables"
        full = seq.num_computed // self.block_size
        for g, table in enumerate(seq.tables):
            if g in self.slots:
                assert len(table.ids) == 1, f"{seq} has {len(table.ids)} slots in group {g}"
                assert table.layers is None, f"{seq}: slots of group {g} are ragged"
            else:
                self._capacity(seq, g, table)
                tail = set(table.ids[max(full, table.base) :]) & cached[g]
                assert not tail, f"{seq} may write slabs {tail} of group {g}, which the prefix cache keeps"
            self.slabs[g].update(table.held)
            self.slabs[g].update(table.spare)
            self.slabs[g].update(slab for slab in table.aside if slab >= 0)
            assert not table.spare or seq.num_inflight, f"{seq} has set memory aside, and no step works on it"
            for pages in table.held_pages:
                self.pages[g].update(pages)
        cursor: PrefixCursor = seq.node
        assert cursor is not None, f"{seq} owns memory but has no cursor"
        if cursor.staged is not None:
            self._count(self.slots, [(slab,) for slab in cursor.staged[1]])
        if cursor.holding and cursor.generation == self.generation:
            self.held.append(cursor.entry)
            self._path(seq, cursor)

    def _capacity(self, seq: Seq, g: int, table: BlockTable) -> None:
        lines = [table.ids] if table.layers is None else table.layers
        for line, gone in zip(lines, table.dropped or [0] * len(lines), strict=True):
            slots = seq.num_computed - gone
            assert slots > 0 or not table.dropped, f"{seq}: a line of group {g} has nothing left"
            assert len(line) * self.block_size >= slots, f"{seq}: table of group {g} is too short"
        assert not table.dropped or seq.taint_start is not None, f"{seq} has dropped tokens and is not lossy"
        load = self.loads.get(seq.load)
        coming = seq.num_computed if load is None else load.copy.num_tokens
        base = self.groups[g].spec.first_block(coming, self.block_size)
        assert table.base == base, f"{seq}: {table.base} blocks of group {g} are given up, {base} cannot be seen"
        for line in (table.ids,) if table.layers is None else table.layers:
            assert line[:base] == [GONE] * base, f"{seq}: group {g} still names blocks that are given up"
            assert GONE not in line[base:], f"{seq}: group {g} gave up blocks that can be seen"
        if table.layers is None:
            assert len(set(table.held)) == len(table.held), f"{seq}: a slab stands twice in the table of group {g}"
            return
        assert not table.ids, f"{seq}: the ragged table of group {g} still has slabs"
        assert len(table.layers) == self.groups[g].pages_per_slab, f"{seq}: group {g} misses layers"
        flat = [page for pages in table.held_pages for page in pages]
        assert len(set(flat)) == len(flat), f"{seq}: a page stands twice in the table of group {g}"
        if not table.dropped:
            assert len({len(pages) for pages in table.layers}) == 1, f"{seq}: layers of group {g} differ in length"

    def _path(self, seq: Seq, cursor: PrefixCursor) -> None:
        """A sequence's table begins with the slabs of the entry it stands on."""
        path = self.cache.path(cursor.entry)
        if self.cache.name != "none":
            assert len(path) == cursor.num_blocks, f"{seq} stands at block {len(path)}, not {cursor.num_blocks}"
        assert len(path) * self.block_size <= seq.num_computed, f"{seq} put blocks into the cache before computing them"
        for j, g in enumerate(self.per_token):
            table = seq.tables[g]
            if table.layers is None:
                theirs = list(self._found(g, [block[j] for block in path[table.base :]]))
                mine = table.ids[table.base : len(path)]
                assert not table.dropped, f"{seq} has dropped tokens of group {g} and stands in the prefix cache"
                assert mine == theirs, f"{seq}: the table of group {g} left the prefix cache's path"

    def _references(self) -> None:
        for g, pool in enumerate(self.pools):
            held = self.slabs[g]
            counted = {slab: count for slab, count in enumerate(pool.refs) if count not in (0, BROKEN)}
            for slab in () if counted == held else sorted(counted.keys() | held.keys()):
                count, holders = counted.get(slab, 0), held[slab]
                assert count == holders, f"group {g}: slab {slab} has {count} references and {holders} holders"
            assert dict(self.pages[g]) == pool.page_refs, (
                f"group {g}: pages have references {pool.page_refs} and holders {dict(self.pages[g])}"
            )
