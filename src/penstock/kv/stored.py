"""Blocks in a store outside this process: who is admitted may go on with them, and what is computed goes there.

Blocks are written behind the computation, when they are full, and read back beside it: a load is late
(`core.page_ops.LoadOp`), and one that fails is computed. A block's file has what the groups with tokens hold of it; of
windows only what is seen from the text's end is read. States of slots are files of their own.
Sources: LMCache and vLLM's offloading connector (names); CachedAttention, arXiv 2403.19708, section 3.2 (write behind).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.base.errors import EngineError
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import StoreNews
from penstock.core.page_ops import DISK, STATE
from penstock.core.sequence import LOST_LOAD
from penstock.kv.block_names import BlockNames
from penstock.kv.cursor import PrefixCursor
from penstock.kv.events import EventRecorder, EventSettings
from penstock.kv.named_tier import NamedTier
from penstock.kv.outbox import Outbox
from penstock.kv.store_index import FoundBlock, root_name
from penstock.kv.store_load import BothEnds
from penstock.kv.swap import Swapped, Swaps

if TYPE_CHECKING:
    from penstock.core.sequence import Sequence as Seq


class StoreSettings(NamedTuple):
    """What the books of a store need to know. `secret`: of the names. `fingerprint`: of the model, and of all else
    that decides bytes of keys and values. `limits`: bytes that each tier may take, by its number. `block_bytes`,
    `state_bytes`: of a block, and of a state, there. `both_ends`: texts are computed while they are read
    (`store_load`); with full groups alone. `num_groups`: the first ones, which are the model's own; draft models'
    groups, behind them, are not stored. None: there are no others."""

    secret: bytes
    fingerprint: str
    limits: Mapping[int, int]
    block_bytes: int
    state_bytes: int = 0
    both_ends: bool = False
    num_groups: int | None = None


class StoreClaim(NamedTuple):
    """What a sequence could go on with from the store: its tokens up to `num_tokens`, behind the first `first` blocks,
    which the device has. `state`: where that of its slots is, if it has any."""

    num_tokens: int
    first: int
    state: str = ""


class StoredBlocks:
    """A part of the KV manager. It writes to every tier, and reads from the nearest that has a block.

    Attributes:
        tiers: nearest first.
        names: of the blocks.
        misses: blocks that could not be read, by tier and reason ("remote:slow"), as ranks said.
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
        numbers = sorted(settings.limits)
        self.misses: Counter[str] = Counter()
        self.tiers = [NamedTier(n, settings.limits[n], outbox, swaps.next_move) for n in numbers]
        self.names = BlockNames(settings.secret, settings.fingerprint, block_size)
        self.num_query_tokens = self.num_hit_tokens = 0
        self._settings = settings
        self._swaps = swaps
        self._groups = tuple(groups)
        self._slots = tuple(g.index for g in groups if not g.spec.per_token)
        self._num_own = len(self._groups) if settings.num_groups is None else settings.num_groups
        self._has_blocks = len(self._slots) < self._num_own
        self._block_size = block_size
        self._loads: set[int] = set()
        self._tick = 0
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
            if self._wanting(path):
                pages = self._pages(seq, n)
                if all(page >= 0 for g, page in enumerate(pages[: self._num_own]) if g not in self._slots):
                    self._put(seq, path, pages)

    def offer_state(self, seq: Seq, num_blocks: int, slabs: Sequence[int]) -> None:
        """The prefix cache has a checkpoint behind so many blocks of `seq`, in `slabs` of each slot group."""
        (path,) = self.paths(seq, num_blocks - 1, num_blocks)
        if self._wanting(path + STATE):
            pages = [-1] * len(self._groups)
            for g, slab in zip(self._slots, slabs, strict=True):
                pages[g] = slab * self._groups[g].pages_per_slab
            self._put(seq, path + STATE, tuple(pages))

    def _wanting(self, path: str) -> list[NamedTier]:
        """Tiers in which a block neither is nor is about to be."""
        return [tier for tier in self.tiers if tier.index.wants(path)]

    def _put(self, seq: Seq, path: str, pages: tuple[int, ...]) -> None:
        cursor: PrefixCursor = seq.node
        if not cursor.tick:
            cursor.tick = self._next_tick()
        for tier in self._wanting(path):
            tier.prepare_store(path, pages, self._num_bytes(path), cursor.tick)

    def _next_tick(self) -> int:
        """Later than everything so far, in all tiers. One for all blocks of a text keeps its beginning longer than its
        end."""
        self._tick = max(self._tick, *(tier.index.tick for tier in self.tiers)) + 1
        for tier in self.tiers:
            tier.index.tick = self._tick
        return self._tick

    # -- out -----------------------------------------------------------------------------------------------------

    def claim(self, seq: Seq, first: int, limit: int) -> StoreClaim | None:
        """What is in the store behind the `first` blocks of `seq`, up to block `limit`. With slots a text goes on where
        there is a state."""
        if limit <= first or seq.load == LOST_LOAD or seq.swapped is not None:
            return None
        paths = self.paths(seq, first, limit)
        num = self._lookup(paths) if self._has_blocks else len(paths)
        if not self._slots:
            return StoreClaim((first + num) * self._block_size, first) if num else None
        states = (n for n in range(num, 0, -1) if self._nearest(paths[n - 1] + STATE) is not None)
        found = next(states, 0)
        return StoreClaim((first + found) * self._block_size, first, paths[found - 1] + STATE) if found else None

    def _lookup(self, paths: Sequence[str]) -> int:
        """How many of the first of these are in some tier, without a gap."""
        num = 0
        while num < len(paths) and (more := max(tier.lookup(paths[num:]) for tier in self.tiers)):
            num += more
        return num

    def _nearest(self, path: str) -> NamedTier | None:
        return next((tier for tier in self.tiers if path in tier.index), None)

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
        cursor.tick = self._next_tick()
        paths = self.paths(seq, 0, end)
        wanted = ((path, self._pages(seq, n)) for n, path in enumerate(paths[first:], first) if self._has_blocks)
        orders = [(path, pages) for path, pages in wanted if max(pages) >= 0]
        if claim.state:
            orders.append((claim.state, self._pages_of_slots(seq)))
        sources = []
        for path, _ in orders:
            tier = self._nearest(path)
            assert tier is not None, f"{path} was claimed, and is in no tier"
            tier.prepare_load((path,))
            sources.append(tier)
        for tier in self.tiers:
            tier.touch([*paths, claim.state], cursor.tick)
        self.offer(seq, 0, first)  # room for these is made of what is not held
        move = self._swaps.next_move()
        self._loads.add(move)
        front = BothEnds(seq, first, end, self._block_size) if self._settings.both_ends else None
        numbered = list(zip(range(first, first + len(orders)), orders, sources, strict=True))
        for n, (path, pages), tier in numbered if front is None else reversed(numbered):
            block = tier.load(path, pages, self._num_bytes(path), move)
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
        """A step has reported move `move`."""
        self._loads.discard(move)
        for tier in self.tiers:
            tier.ended(move, good=good)
        front, n = self._fronts.pop(move, (None, 0))
        if front is not None and good:
            front.came(n)
            self.meet(front.seq, front)

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
        tier = next(tier for tier in self.tiers if tier.number == news.tier)
        if news.evicts is not None:
            tier.index.evicts = news.evicts
        tier.index.found([FoundBlock(*found) for found in news.found], news.gone)

    @property
    def version(self) -> int:
        """Changes whenever something is forgotten."""
        return sum(tier.index.version for tier in self.tiers)

    def take_waiting(self) -> None:
        """A step carries what was planned."""
        for tier in self.tiers:
            tier.waiting = 0

    @property
    def waits(self) -> bool:
        """Whether blocks are to be written, and no step has carried the order yet."""
        return any(tier.waiting for tier in self.tiers)

    def _pages(self, seq: Seq, block: int) -> tuple[int, ...]:
        """First pages of a block; -1 where a group has none of it, or is a draft model's."""
        own = self._num_own
        return tuple(
            table.ids[block] * g.pages_per_slab if g.spec.per_token and block >= table.base and g.index < own else -1
            for g, table in zip(self._groups, seq.tables, strict=True)
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
    disk = next((t for t in stored.tiers if t.number == DISK), None) if stored is not None else None
    index = None if disk is None else disk.index  # what a remote holds, all have
    return EventRecorder(names, include_token_ids=settings.include_token_ids, store=index)
