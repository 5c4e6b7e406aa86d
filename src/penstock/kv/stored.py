"""Blocks in a store outside this process: who is admitted may go on with them, and what is computed goes there.

Blocks are written behind the computation, when they are full, and read back beside it: a load is late
(`core.page_ops.LoadOp`), and one that fails is computed. A block's file has what the groups with tokens hold of it; of
windows only what is seen from the text's end is read. States of slots are files of their own.
Sources: LMCache and vLLM's offloading connector (names); CachedAttention, arXiv 2403.19708, section 3.2 (write behind).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.base.errors import EngineError
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import StoreNews
from penstock.core.page_ops import STATE, DropOp, GetOp, PutOp
from penstock.core.sequence import LOST_LOAD
from penstock.kv.block_names import BlockNames
from penstock.kv.cursor import PrefixCursor
from penstock.kv.events import EventRecorder, EventSettings
from penstock.kv.outbox import Outbox
from penstock.kv.store_index import FoundBlock, StoreIndex, root_name
from penstock.kv.store_load import BothEnds
from penstock.kv.swap import Swapped, Swaps

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq


class StoreSettings(NamedTuple):
    """What the books of a store need to know. `secret`: of the folder. `fingerprint`: of the model, and of all else
    that decides bytes of keys and values. `block_bytes`, `state_bytes`: of a block, and of a state, there. `both_ends`:
    texts are computed while they are read (`store_load`); with full groups alone."""

    secret: bytes
    fingerprint: str
    limit_bytes: int
    block_bytes: int
    state_bytes: int = 0
    both_ends: bool = False


class StoreClaim(NamedTuple):
    """What a sequence could go on with from the store: its tokens up to `num_tokens`, behind the first `first` blocks,
    which the device has. `state`: where that of its slots is, if it has any."""

    num_tokens: int
    first: int
    state: str = ""


class StoredBlocks:
    """A part of the KV manager.

    Attributes:
        index: what the store holds.
        names: of its blocks.
        num_stored, num_loaded: blocks (and states) that were written, and that were read, since start.
        num_refused: those that found no room, or could not be written.
        num_lost: those that could not be read.
        written_bytes, read_bytes: of those that were.
        num_query_tokens, num_hit_tokens: tokens of prompts that were looked up here, behind those that the prefix cache
            had, and that were there.
    """

    def __init__(
        self,
        settings: StoreSettings,
        swaps: Swaps,
        groups: Sequence[CacheGroup],
        outbox: Outbox,
        block_size: int,
    ) -> None:
        self.index = StoreIndex(settings.limit_bytes)
        self.names = BlockNames(settings.secret, settings.fingerprint, block_size)
        self.num_stored = self.num_loaded = self.num_refused = self.num_lost = 0
        self.written_bytes = self.read_bytes = 0
        self.num_query_tokens = self.num_hit_tokens = 0
        self.waiting = 0
        """Orders that wait in the outbox for a step to carry them."""
        self._settings = settings
        self._swaps = swaps
        self._groups = tuple(groups)
        self._slots = tuple(g.index for g in groups if not g.spec.per_token)
        self._has_blocks = len(self._slots) < len(self._groups)
        self._outbox = outbox
        self._block_size = block_size
        self._puts: dict[int, str] = {}
        self._gets: dict[int, str] = {}
        self._loads: dict[int, int] = {}  # blocks and states by move
        self._fronts: dict[int, tuple[BothEnds, int]] = {}  # by the move of a block

    # -- names ---------------------------------------------------------------------------------------------------

    def paths(self, seq: Seq, first: int, end: int) -> list[str]:
        """Where blocks `first` to `end` of `seq` are, or would be. Mutates: seq.names."""
        known, settings = self.names.of(seq, end), self._settings
        place = f"{settings.fingerprint}/{space_of(settings.secret, seq.request.tenant)}"
        return [f"{place}/{name.hex()}-{n:x}" for n, name in enumerate(known[first:end], first)]

    # -- in ------------------------------------------------------------------------------------------------------

    def offer(self, seq: Seq, first: int, end: int) -> None:
        """Blocks `first` to `end` of `seq` are full, and in the prefix cache: what is not in the store goes there."""
        if end <= first or not self._has_blocks:
            return
        for n, path in enumerate(self.paths(seq, first, end), first):
            if self.index.wants(path):
                pages = self._pages(seq, n)
                if all(page >= 0 for g, page in enumerate(pages) if g not in self._slots):
                    self._put(seq, path, pages, self._settings.block_bytes)

    def offer_state(self, seq: Seq, num_blocks: int, slabs: Sequence[int]) -> None:
        """The prefix cache has a checkpoint behind so many blocks of `seq`, in `slabs` of each slot group."""
        (path,) = self.paths(seq, num_blocks - 1, num_blocks)
        if self.index.wants(path + STATE):
            pages = [-1] * len(self._groups)
            for g, slab in zip(self._slots, slabs, strict=True):
                pages[g] = slab * self._groups[g].pages_per_slab
            self._put(seq, path + STATE, tuple(pages), self._settings.state_bytes)

    def _put(self, seq: Seq, path: str, pages: tuple[int, ...], num_bytes: int) -> None:
        cursor: PrefixCursor = seq.node
        if not cursor.tick:
            cursor.tick = self.index.next_tick()
        wanted, gone = self.index.prepare_store(path, num_bytes, cursor.tick)
        if gone:
            self._outbox.add(DropOp(tuple(gone)))
        if not wanted:
            self.num_refused += 1
            return
        move = self._swaps.next_move()
        self._puts[move] = path
        self._outbox.add(PutOp(path, pages, move))
        self.waiting += 1

    # -- out -----------------------------------------------------------------------------------------------------

    def claim(self, seq: Seq, first: int, limit: int) -> StoreClaim | None:
        """What is in the store behind the `first` blocks of `seq`, up to block `limit`. With slots a text goes on where
        there is a state."""
        if limit <= first or seq.load == LOST_LOAD or seq.swapped is not None:
            return None
        paths = self.paths(seq, first, limit)
        num = self.index.lookup(paths) if self._has_blocks else len(paths)
        if not self._slots:
            return StoreClaim((first + num) * self._block_size, first) if num else None
        states = (n for n in range(num, 0, -1) if paths[n - 1] + STATE in self.index)
        found = next(states, 0)
        return StoreClaim((first + found) * self._block_size, first, paths[found - 1] + STATE) if found else None

    def begin(self, seq: Seq, limit: int, grow: Callable[[Seq, int], bool]) -> bool:
        """Straight after admission: what `seq` has claimed is read into its tables.

        `limit`: blocks that it could have had. False: it is on its way (`seq.load`). Mutates: seq.
        """
        claim: StoreClaim | None = seq.claim
        first = seq.num_computed // self._block_size
        seq.claim = None
        self.num_query_tokens += max(0, limit - first) * self._block_size
        if claim is None:
            self.offer(seq, 0, first)
            return True
        assert claim.first == first, f"{seq} claimed what follows {claim.first} blocks and has {first}"
        if self._has_blocks and not grow(seq, claim.num_tokens):
            raise EngineError(f"{seq} was admitted without room for what the store has of it")
        end = claim.num_tokens // self._block_size
        cursor: PrefixCursor = seq.node
        cursor.tick = self.index.next_tick()
        paths = self.paths(seq, 0, end)
        wanted = ((path, self._pages(seq, n)) for n, path in enumerate(paths[first:], first) if self._has_blocks)
        orders = [(path, pages) for path, pages in wanted if max(pages) >= 0]
        if claim.state:
            orders.append((claim.state, self._pages_of_slots(seq)))
        self.index.touch([*paths, claim.state], cursor.tick)
        self.index.prepare_load([path for path, _ in orders])
        self.offer(seq, 0, first)  # room for these is made of what is not held
        move = self._swaps.next_move()
        self._loads[move] = len(orders)
        front = BothEnds(seq, first, end, self._block_size) if self._settings.both_ends else None
        numbered = list(enumerate(orders, first))
        for n, (path, pages) in numbered if front is None else reversed(numbered):
            block = self._swaps.next_move()
            self._gets[block] = path
            self._outbox.add(GetOp(path, pages, move, block))
            if front is not None:
                self._fronts[block] = front, n
        slabs = [
            table.ids[max(first, table.base) : end] if group.spec.per_token else table.ids
            for group, table in zip(self._groups, seq.tables, strict=True)
        ]
        copy = Swapped(claim.num_tokens, [[] for _ in slabs], cursor.generation, first)
        self._swaps.expect(move, copy, slabs)
        if front is not None:
            cursor.front, cursor.reading = front, move
            return True
        self.num_hit_tokens += claim.num_tokens - first * self._block_size
        seq.load, seq.writable, seq.num_cached = move, 0, claim.num_tokens
        return False

    def ended(self, move: int, *, good: bool) -> None:
        """A step has reported move `move`. What cannot be read leaves the store."""
        if (path := self._puts.pop(move, None)) is not None:
            self.index.complete_store(path, good=good)
            self.num_stored += good
            self.num_refused += not good
            self.written_bytes += self._num_bytes(path) * good
        elif (path := self._gets.pop(move, None)) is not None:
            self.index.complete_load([path], good=good)
            self.read_bytes += self._num_bytes(path) * good
            front, n = self._fronts.pop(move, (None, 0))
            if front is not None and good:
                front.came(n)
                self.meet(front.seq, front)
            if not good:
                self.num_lost += 1
                self._outbox.add(DropOp((path,)))
        elif (num := self._loads.pop(move, None)) is not None:
            self.num_loaded += num * good

    def meet(self, seq: Seq, front: BothEnds) -> None:
        """More of `seq` was computed, or has come: if both have met, it goes on behind what came. Mutates: seq."""
        if seq.node is not front.cursor or front.cursor.front is not front or seq.num_inflight:
            return
        num_tokens = front.computed()
        if num_tokens >= front.end * self._block_size:
            assert num_tokens == seq.num_computed or front.holds(seq.num_computed // self._block_size), (
                f"{seq} goes on with blocks that were read into memory which it has not"
            )
            saved = num_tokens - seq.num_computed
            seq.num_computed, front.cursor.front = num_tokens, None
            seq.num_cached += saved
            self.num_hit_tokens += saved
            if seq.num_preemptions == 0 and seq.num_generated == 0:
                seq.first_cached = seq.num_cached

    def _num_bytes(self, path: str) -> int:
        return self._settings.state_bytes if path.endswith(STATE) else self._settings.block_bytes

    def reads(self, move: int) -> bool:
        """Whether this load is on its way from the store. If it fails, what was lost is known: the rest can be read."""
        return move in self._loads

    def heard(self, news: StoreNews) -> None:
        """Others have changed what is there."""
        if news.evicts is not None:
            self.index.evicts = news.evicts
        self.index.found([FoundBlock(*found) for found in news.found], news.gone)

    def _pages(self, seq: Seq, block: int) -> tuple[int, ...]:
        """First pages of a block; -1 where a group has none of it."""
        return tuple(
            table.ids[block] * group.pages_per_slab if group.spec.per_token and block >= table.base else -1
            for group, table in zip(self._groups, seq.tables, strict=True)
        )

    def _pages_of_slots(self, seq: Seq) -> tuple[int, ...]:
        return tuple(
            -1 if group.spec.per_token else table.ids[0] * group.pages_per_slab
            for group, table in zip(self._groups, seq.tables, strict=True)
        )


def space_of(secret: bytes, tenant: str) -> str:
    """Where the blocks of a tenant are: all of one stand together, so that they can be deleted together."""
    return root_name(secret, "tenant", tenant.encode())[:8].hex()


def recorder_of(settings: EventSettings, stored: StoredBlocks | None, block_size: int) -> EventRecorder:
    """With the names of the store, if there is one."""
    names = BlockNames(settings.secret, "", block_size) if stored is None else stored.names
    index = None if stored is None else stored.index
    return EventRecorder(names, include_token_ids=settings.include_token_ids, store=index)
