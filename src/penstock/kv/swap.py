"""Sequences that had to give up their device memory wait in a tier: swapped out whole, swapped in whole.

So do blocks that the prefix cache gave up, if it offloads: who is admitted and could go on with them has a copy there,
as if it had been swapped out. Sources: vLLM, arXiv 2309.06180, section 4.5 (swapping); FastServe, arXiv 2305.05920,
section 4.3 (proactive swapping).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.cache_spec import CacheGroup
from penstock.core.protocols import IdTier, PrefixCache
from penstock.core.sequence import LOST_LOAD, NEVER
from penstock.kv.block_pool import BlockPool
from penstock.kv.cursor import PrefixCursor
from penstock.kv.events import EventRecorder
from penstock.kv.kept_copies import KeptCopies
from penstock.kv.offload import PrefixOffload
from penstock.kv.prefix.tree import PrefixTree

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq


class Swapped(NamedTuple):
    """Where a sequence waits: `ids[g]` of the tier hold what is seen of `num_tokens` tokens, from block `first` on;
    `num_found` of them were the prefix cache's.

    `generation`: the prefix cache's into which its blocks may go; None: into none any more.
    """

    num_tokens: int
    ids: list[list[int]]
    generation: int | None
    first: int = 0
    num_found: int = 0


class SwapIn(NamedTuple):
    """On its way back: `copy` is being read, and the device's `slabs` of each group are being written.

    `seq_id`: whose copy it is, if it is a sequence's own.
    """

    copy: Swapped
    slabs: list[list[int]]
    seq_id: int = -1


class Swaps:
    """Attributes:
    tier: where sequences wait.
    homes: blocks there of sequences that run while layers of them are away, by sequence (`kv.layerkv`).
    loads: late loads that no step has reported yet, by number. Each has a reference on the slabs that it writes, so
        that nobody gets them if the sequence that waits for it goes.
    stores_awaited: somebody waits to hear that what is to be written is in the store: steps without rows are due.
    """

    def __init__(self, tier: IdTier, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], block_size: int) -> None:
        self.tier = tier
        self.homes: dict[int, list[int]] = {}
        self.kept = KeptCopies(tier, groups, block_size)
        self.loads: dict[int, SwapIn] = {}
        self.stores_awaited = False
        self._tree: PrefixTree | None = None
        self._offload: PrefixOffload | None = None
        self._next_move = 0
        self._groups = tuple(groups)
        self._pools = pools
        self._block_size = block_size

    def offload_from(self, cache: PrefixCache) -> None:
        """From now on blocks that a tree-shaped cache evicts wait in the tier, too, unless sequences need the room."""
        assert isinstance(cache, PrefixTree), f"prefix cache {cache.name} has nothing to offload"
        assert all(group.spec.kind == "paged" for group in self._groups), "only full groups can be offloaded"
        self._tree = cache
        self._offload = cache.offload = PrefixOffload(self.tier, len(self._groups))

    def tell(self, events: EventRecorder) -> None:
        """From now on what the prefix cache has in the tier is told, too."""
        if self._offload is not None:
            self._offload.events = events

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Blocks of the prefix cache that went to the tier, and that came back for somebody, since start."""
        return (0, 0) if self._offload is None else (self._offload.num_stored, self._offload.num_loaded)

    @property
    def block_bytes(self) -> int:
        """Of a block of the prefix cache."""
        return self.num_bytes(self._block_size)

    def need(self, group: CacheGroup, num_tokens: int) -> int:
        """Slabs of a group that a sequence of so many tokens takes; of a window group, those that it still sees."""
        if not group.spec.per_token:
            return 1
        return -(-num_tokens // self._block_size) - group.spec.first_block(num_tokens, self._block_size)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes that one way of the swap moves."""
        return sum(self.need(g, num_tokens) * g.slab_bytes(self._block_size) for g in self._groups)

    @property
    def page_bytes(self) -> list[int]:
        """Of a page of each group."""
        return [g.slab_bytes(self._block_size) // g.pages_per_slab for g in self._groups]

    def fits(self, num_tokens: int) -> bool:
        """Whether the tier has room for a sequence of so many tokens, copies that are only kept aside not counted."""
        return all(self.need(g, num_tokens) <= self.tier.num_free(g.index) for g in self._groups)

    def out(self, seq: Seq) -> bool:
        """Plan the copies of everything `seq` has computed. Mutates: seq.swapped.

        False, and nothing changed, if the tier lacks room, some of it was dropped, or some of it is still being loaded.
        """
        assert seq.swapped is None, f"{seq} waits in tier {self.tier.name} already"
        if seq.load in self.loads or any(table.layers is not None or table.dropped for table in seq.tables):
            return False
        needs = [self.need(g, seq.num_computed) for g in self._groups]
        kept = self.kept.take(seq.seq_id, seq.num_computed) or [[] for _ in needs]
        lacking = [need - len(column) for need, column in zip(needs, kept, strict=True)]
        if self._tree is not None and self._offload is not None:
            short = max(lacking) - self._offload.num_free
            self._tree.drop_copies(short if short <= self._offload.num_kept else 0)
        ids = self.kept.prepare_store(lacking)
        if ids is None:
            self.tier.evict(kept)
            return False
        for g, (column, taken) in enumerate(zip(kept, ids, strict=True)):
            self.tier.store(g, seq.tables[g].held[len(column) : needs[g]], taken)
        ids = [column + taken for column, taken in zip(kept, ids, strict=True)]
        self.kept.num_reused += len(kept[0])
        cursor: PrefixCursor = seq.node
        seq.swapped = Swapped(seq.num_computed, ids, None if cursor.next_commit == NEVER else cursor.generation)
        return True

    def find(self, seq: Seq, most_blocks: Callable[[Seq], int]) -> None:
        """What the prefix cache has in the tier behind the blocks that `seq` was admitted with is a copy of `seq`, too.

        At most `most_blocks(seq)` blocks, those it was admitted with included; not after a load that failed. Mutates:
        seq.swapped, num_cached.
        """
        if self._offload is None or self._tree is None or seq.swapped is not None or seq.load == LOST_LOAD:
            return
        cursor: PrefixCursor = seq.node
        copies = self._tree.stored(cursor.entry, seq.token_ids, most_blocks(seq))
        if copies:
            ids = [list(column) for column in zip(*copies, strict=True)]
            self.tier.prepare_load(ids)
            num_tokens = (cursor.num_blocks + len(copies)) * self._block_size
            seq.swapped = Swapped(num_tokens, ids, cursor.generation, cursor.num_blocks, len(copies))
            seq.num_cached = num_tokens

    def back(self, seq: Seq) -> bool:
        """Plan the copies back into the tables of `seq`, which have room, but for blocks that it has computed.

        True: it goes on as if it had computed them. False: it waits for load `seq.load`. Mutates: seq.num_computed,
        writable, swapped, load.
        """
        copy: Swapped = seq.swapped
        move = self.next_move()
        slabs: list[list[int]] = []
        for g, group in enumerate(self._groups):
            base = max(copy.first, group.spec.first_block(copy.num_tokens, self._block_size))
            first = max(base, seq.num_computed // self._block_size) if group.spec.per_token else 0
            ids = copy.ids[g][first - base :]
            slabs.append(seq.tables[g].ids[first : first + len(ids)])
            self.tier.load(g, ids, slabs[g], move)
        seq.swapped, seq.load = None, move
        self.kept.keep(seq.seq_id, copy.ids, copy.first, copy.num_tokens)
        if not self.tier.late:
            self.tier.complete_load(copy.ids)
            self._came(copy)
            seq.num_computed = copy.num_tokens
            return True
        self.expect(move, copy, slabs, seq.seq_id)
        seq.writable = 0
        return False

    def give(self, seq: Seq, slabs: list[list[int]]) -> None:
        """The tables of `seq` go on with these slabs of each group, which others have, too. Mutates: seq.tables."""
        for pool, table, ids in zip(self._pools, seq.tables, slabs, strict=True):
            pool.ref_slabs(ids)
            table.ids += ids

    def next_move(self) -> int:
        """A number that no other move has."""
        self._next_move += 1
        return self._next_move - 1

    def expect(self, move: int, copy: Swapped, slabs: list[list[int]], seq_id: int = -1) -> None:
        """Late load `move` was planned: its slabs are nobody else's until a step reports it."""
        for pool, targets in zip(self._pools, slabs, strict=True):
            pool.ref_slabs(targets)
        self.loads[move] = SwapIn(copy, slabs, seq_id)

    def ended(self, move: int, *, good: bool = True) -> int:
        """A step has reported load `move`: nothing reads or writes for it any more. What was not good is not kept.

        Returns the tokens that whoever waited for it has now; 0 if nobody had to wait.
        """
        load = self.loads.pop(move, None)
        if load is None:
            return 0
        self.tier.complete_load(load.copy.ids)
        if not good:
            self.kept.drop(load.seq_id)
        else:
            self._came(load.copy)
        for pool, slabs in zip(self._pools, load.slabs, strict=True):
            pool.unref_slabs(slabs)
        return load.copy.num_tokens

    def _came(self, copy: Swapped) -> None:
        """Counts what was found, now that it is there."""
        if copy.num_found and self._tree is not None and self._offload is not None:
            self._tree.num_hit_tokens += copy.num_found * self._block_size
            self._offload.num_loaded += copy.num_found

    def drop(self, seq: Seq) -> None:
        """Give up a sequence's copies, if it has any (they are not needed, or the sequence has ended)."""
        self.kept.drop(seq.seq_id)
        if seq.swapped is not None:
            self.tier.evict(seq.swapped.ids)
            seq.swapped = None

    def check_invariants(self, live: Iterable[Seq]) -> None:
        """AssertionError unless exactly what waits, and what is on its way, is held in the tier."""
        blocks = self._tree.copies() if self._tree is not None else []
        held: list[list[int]] = [[block[g] for block in blocks] for g, _ in enumerate(self._groups)]
        for kept in self.kept.contents():
            for g, column in enumerate(kept):
                held[g] += column
        for ids in self.homes.values():
            held[0] += ids
        copies = [load.copy for load in self.loads.values()]
        for seq in live:
            for g, table in enumerate(seq.tables):
                held[g] += [~slab for slab in table.aside if slab < 0]
            if seq.swapped is not None:
                assert not seq.tables, f"{seq} owns device memory and a copy in tier {self.tier.name}"
                copies.append(seq.swapped)
        for copy in copies:
            for g, ids in enumerate(copy.ids):
                held[g] += ids
        self.tier.check_invariants(held)
