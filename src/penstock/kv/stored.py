"""Blocks in a store outside this process: who is admitted may go on with them, and what is computed goes there.

For models whose layers all keep their whole context. Blocks are written behind the computation, when they are full, and
read back beside it: a load is late (`core.page_ops.LoadOp`), and one that fails is computed.
Sources: LMCache and vLLM's offloading connector (names); CachedAttention, arXiv 2403.19708, section 3.2 (write behind).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.cache_spec import CacheGroup
from penstock.core.events import StoreNews
from penstock.core.page_ops import DropOp, GetOp, PutOp
from penstock.core.sequence import LOST_LOAD
from penstock.kv.block_pool import BlockPool
from penstock.kv.cursor import PrefixCursor
from penstock.kv.outbox import Outbox
from penstock.kv.store_index import Kept, StoreIndex, names_after, root_name
from penstock.kv.swap import Swapped, Swaps

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq


class StoreSettings(NamedTuple):
    """What the books of a store need to know. `secret`: of the folder. `fingerprint`: of the model, and of all else
    that decides bytes of keys and values. `num_bytes`: of a block in the store. `least_blocks`: fewer are computed."""

    secret: bytes
    fingerprint: str
    limit_bytes: int
    num_bytes: int
    least_blocks: int = 1


class StoredBlocks:
    """A part of the KV manager.

    Attributes:
        index: what the store holds.
        num_stored, num_loaded: blocks that were written, and that were read, since start.
        num_refused: blocks that found no room, or could not be written.
        num_lost: blocks that could not be read.
        num_query_tokens, num_hit_tokens: tokens of prompts that were looked up here, behind those that the prefix cache
            had, and that were there.
    """

    def __init__(
        self,
        settings: StoreSettings,
        swaps: Swaps,
        groups: Sequence[CacheGroup],
        pools: Sequence[BlockPool],
        outbox: Outbox,
        block_size: int,
    ) -> None:
        assert all(group.spec.kind == "paged" for group in groups), "only full groups can be stored"
        self.index = StoreIndex(settings.limit_bytes)
        self.num_stored = self.num_loaded = self.num_refused = self.num_lost = 0
        self.num_query_tokens = self.num_hit_tokens = 0
        self.waiting = 0
        """Orders that wait in the outbox for a step to carry them."""
        self._settings = settings
        self._swaps = swaps
        self._widths = [group.pages_per_slab for group in groups]
        self._pools = pools
        self._outbox = outbox
        self._block_size = block_size
        self._block_bytes = 4 * block_size
        self._puts: dict[int, str] = {}
        self._gets: dict[int, str] = {}
        self._loads: dict[int, int] = {}  # blocks by move

    def paths(self, seq: Seq, end: int) -> list[str]:
        """Where the first `end` blocks of `seq` are, or would be. Mutates: the names that its cursor knows."""
        cursor: PrefixCursor = seq.node
        known, size, settings = cursor.names, self._block_size, self._settings
        if len(known) < end:
            request = seq.request
            if not known:
                cursor.space = f"{settings.fingerprint}/{space_of(settings.secret, request.tenant)}"
                tainted = request.namespace + b"\0" + request.taint.encode()
                last = root_name(settings.secret, settings.fingerprint, tainted)
            else:
                last = known[-1]
            tokens = seq.token_ids[len(known) * size : end * size].tobytes()
            known += names_after(settings.secret, last, tokens, self._block_bytes)
        return [f"{cursor.space}/{name.hex()}-{n:x}" for n, name in enumerate(known[:end])]

    def offer(self, seq: Seq, first: int, end: int) -> None:
        """Blocks `first` to `end` of `seq` are full, and in the prefix cache: what is not in the store goes there."""
        if end <= first:
            return
        cursor: PrefixCursor = seq.node
        if not cursor.tick:
            cursor.tick = self.index.next_tick()
        for n, path in enumerate(self.paths(seq, end)[first:], first):
            wanted, gone = self.index.prepare_store(path, self._settings.num_bytes, cursor.tick)
            if gone:
                self._outbox.add(DropOp(tuple(gone)))
            if not wanted:
                self.num_refused += path not in self.index
                continue
            move = self._swaps.next_move()
            self._puts[move] = path
            self._outbox.add(PutOp(path, self._pages(seq, n), move))
            self.waiting += 1

    def begin(self, seq: Seq, limit: int, grow: Callable[[Seq, int], bool]) -> bool:
        """Straight after admission: what goes on in the store behind the blocks that `seq` has, up to block `limit`.

        False: it is on its way (`seq.load`). Mutates: seq.
        """
        first = seq.num_computed // self._block_size
        if first:
            self.offer(seq, 0, first)
        if limit <= first or seq.load == LOST_LOAD:
            return True
        paths = self.paths(seq, limit)[first:]
        num = self.index.lookup(paths)
        self.num_query_tokens += len(paths) * self._block_size
        if num < max(1, self._settings.least_blocks) or not grow(seq, (first + num) * self._block_size):
            return True
        self.num_hit_tokens += num * self._block_size
        cursor: PrefixCursor = seq.node
        cursor.tick = self.index.next_tick()
        self.index.touch(self.paths(seq, first + num), cursor.tick)
        self.index.prepare_load(paths[:num])
        move = self._swaps.next_move()
        self._loads[move] = num
        for n, path in enumerate(paths[:num], first):
            block = self._swaps.next_move()
            self._gets[block] = path
            self._outbox.add(GetOp(path, self._pages(seq, n), move, block))
        slabs = [table.ids[first : first + num] for table in seq.tables]
        copy = Swapped((first + num) * self._block_size, [[] for _ in slabs], cursor.generation, first)
        self._swaps.expect(move, copy, slabs)
        seq.load, seq.writable, seq.num_cached = move, 0, copy.num_tokens
        return False

    def ended(self, move: int, *, good: bool) -> None:
        """A step has reported move `move`. What cannot be read leaves the store."""
        if (path := self._puts.pop(move, None)) is not None:
            self.index.complete_store(path, good=good)
            self.num_stored += good
            self.num_refused += not good
        elif (path := self._gets.pop(move, None)) is not None:
            self.index.complete_load([path], good=good)
            if not good:
                self.num_lost += 1
                self._outbox.add(DropOp((path,)))
        elif (num := self._loads.pop(move, None)) is not None:
            self.num_loaded += num * good

    def reads(self, move: int) -> bool:
        """Whether this load is on its way from the store. If it fails, what was lost is known: the rest can be read."""
        return move in self._loads

    def heard(self, news: StoreNews) -> None:
        """Others have changed what is there."""
        if news.evicts is not None:
            self.index.evicts = news.evicts
        self.index.found([Kept(*found) for found in news.found], news.gone)

    def _pages(self, seq: Seq, block: int) -> tuple[int, ...]:
        return tuple(table.ids[block] * width for table, width in zip(seq.tables, self._widths, strict=True))


def space_of(secret: bytes, tenant: str) -> str:
    """Where the blocks of a tenant are: all of one stand together, so that they can be deleted together."""
    return root_name(secret, "tenant", tenant.encode())[:8].hex()
