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
from penstock.core.page_ops import STATE
from penstock.core.sequence import LOST_LOAD, NEVER, NO_LOAD
from penstock.core.step_shape import shape_of
from penstock.kv.ahead import BlocksAhead
from penstock.kv.block_names import BlockNames, root_of
from penstock.kv.cursor import PrefixCursor
from penstock.kv.events import MEDIA, EventRecorder, EventSettings
from penstock.kv.load_rates import Choice, LoadRates, Places
from penstock.kv.named_tier import NamedTier
from penstock.kv.outbox import Outbox
from penstock.kv.store_index import FoundBlock, StoreIndex, names_after, root_name
from penstock.kv.store_load import BothEnds
from penstock.kv.swap import Swapped, Swaps

if TYPE_CHECKING:
    from array import array

    from penstock.core.batch import SchedulerOutput, StepOutput
    from penstock.core.request import Request
    from penstock.core.sequence import Sequence as Seq


class StoreSettings(NamedTuple):
    """What the books of a store need to know. `secret`: of the names. `fingerprint`: of the model, and of all else
    that decides bytes of keys and values. `limits`: bytes that each tier may take, by its number. `block_bytes`,
    `state_bytes`: of a block, and of a state, there. `both_ends`: texts can be computed while they are read
    (`store_load`): there are full groups alone. `load`: one of LOAD_POLICIES. `order`: one of STORE_ORDERS.
    `ahead_bytes`: of host memory, for blocks that are read for those who wait to be admitted. `num_groups`: the first
    ones, which are the model's own; draft models' groups, behind them, are not stored. None:
    there are no others."""

    secret: bytes
    fingerprint: str
    limits: Mapping[int, int]
    block_bytes: int
    state_bytes: int = 0
    both_ends: bool = False
    load: str = "wait"
    order: str = "lru"
    num_groups: int | None = None
    ahead_bytes: int = 0


class StoreClaim(NamedTuple):
    """What a sequence could go on with from the store: its tokens up to `num_tokens`, behind the first `first` blocks,
    which the device has; how is its `choice`. `state`: where that of its slots is, if it has any. `load`: another's,
    which reads these blocks from its block `offset` on."""

    num_tokens: int
    first: int
    choice: Choice
    state: str = ""
    load: int = NO_LOAD
    offset: int = 0


class StoredBlocks:
    """A part of the KV manager. It writes to every tier, and reads from the nearest that has a block.

    Attributes:
        tiers: nearest first.
        names: of the blocks.
        misses: blocks that could not be read, by tier and reason ("remote:slow"), as ranks said.
        rates: of reading and of computing.
        choices: how often what was done (`load_rates.Choice.kind`).
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
        self.tiers = [NamedTier(n, settings.limits[n], outbox, swaps.next_move, settings.order) for n in numbers]
        self.names = BlockNames(settings.secret, settings.fingerprint, block_size)
        self.num_query_tokens = self.num_hit_tokens = 0
        self.rates = LoadRates()
        self.choices = dict.fromkeys(("none", "wait", "split", "cake", "share"), 0)
        self._declined, self._met = False, 0
        self.ahead = BlocksAhead(settings.ahead_bytes, outbox, swaps.next_move)
        self.look: Callable[[Request], None] | None = None
        """Looks for blocks of a request that others may just have written, beside the steps. None: nobody does."""
        self.reported: Callable[[int], None] = lambda move: None
        """Called with each move that a step has reported."""
        self._told_kept: list[tuple[StoreIndex, str, float]] = []
        self._outbox = outbox
        self._settings = settings
        self._swaps = swaps
        self._groups = tuple(groups)
        self._slots = tuple(g.index for g in groups if not g.spec.per_token)
        self._num_own = len(self._groups) if settings.num_groups is None else settings.num_groups
        self._kept = [group for group in self._groups[: self._num_own] if group.spec.per_token]
        self._has_blocks = bool(self._kept)
        self._block_size = block_size
        self._loads: dict[int, int] = {}  # tokens that were found, if they come
        self._tick = 0
        self._fronts: dict[int, tuple[BothEnds, int]] = {}  # by the move of a block
        self._reading: dict[str, tuple[int, int]] = {}  # (load, which of its blocks), of loads that are waited for
        self._read_by: dict[int, tuple[Seq, list[str]]] = {}  # by load: who waits, the keys of that
        self._sharers: dict[int, list[tuple[int, Seq]]] = {}  # by the load that they share: their own moves
        self._texts: dict[int, BothEnds] = {}  # by the move of the load

    # -- names ---------------------------------------------------------------------------------------------------

    def renamed(self, fingerprint: str) -> None:
        """Keys and values are those of other weights from now on; what sequences know of names is void."""
        self._settings = self._settings._replace(fingerprint=fingerprint)
        self.names.fingerprint = fingerprint

    @property
    def block_bytes(self) -> int:
        """Of a block there."""
        return self._settings.block_bytes

    def paths(self, seq: Seq, first: int, end: int) -> list[str]:
        """Where blocks `first` to `end` of `seq` are, or would be. Mutates: seq.names."""
        known, settings = self.names.of(seq, end), self._settings
        if (num := len(known.paths)) < end:
            space = space_of(settings.secret, seq.request.keeper or seq.request.tenant)
            if seq.request.kv_share:
                for tier in self.tiers:
                    tier.index.share(space, seq.request.kv_share)
            known.paths += paths_in(f"{settings.fingerprint}/{space}", known[num:end], num)
        return known.paths[first:end]

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

    def keep(self, seq: Seq, first: int, end: int, until_s: float, now_s: float, share: float) -> None:
        """Blocks `first` to `end` of `seq` leave the folder after all others until then, of a `share` of it; before all
        others, if then is now."""
        paths = self.paths(seq, first, end)
        for tier in self.tiers:
            most_bytes = share * tier.index.limit_bytes
            tier.keep([name for path in paths for name in (path, path + STATE)], until_s, now_s, most_bytes)

    def expire(self, now_s: float) -> None:
        """What was kept until now is like any other; and from now on count the times that others have told."""
        for index, path, seconds in self._told_kept:
            index.keep([path], now_s + seconds)
        self._told_kept.clear()
        for tier in self.tiers:
            tier.index.expire(now_s)

    # -- out -----------------------------------------------------------------------------------------------------

    def claim(self, seq: Seq, first: int, limit: int) -> StoreClaim | None:
        """What is in the store behind the `first` blocks of `seq`, up to block `limit`. With slots a text goes on where
        there is a state."""
        self._declined = False
        if limit <= first or seq.load == LOST_LOAD or seq.swapped is not None:
            return None
        paths = self.paths(seq, first, limit)
        num = self._lookup(paths) if self._has_blocks else len(paths)
        if not self._slots:
            if (claim := self._shared(paths, first, num)) is not None:
                return claim
            lead, end = 0, num
            if self._settings.both_ends and self._policy(seq) != "wait" and num < len(paths):
                lead, end = self._last_run(paths, num)
            return self._claim(seq, paths[lead:end], first, first + lead, first + end) if end else None
        states = (n for n in range(num, 0, -1) if self._nearest(paths[n - 1] + STATE) is not None)
        if not (found := next(states, 0)):
            return None
        state = paths[found - 1] + STATE
        return self._claim(seq, paths[:found], first, first, first + found, state)

    def _shared(self, paths: Sequence[str], first: int, num: int) -> StoreClaim | None:
        """What is being read for somebody else comes for both: if that is most of the `num` blocks that are there."""
        load, offset = self._reading.get(paths[0], (NO_LOAD, 0))
        if load == NO_LOAD:
            return None
        same = next((n for n in range(num) if self._reading.get(paths[n]) != (load, offset + n)), num)
        if 2 * same <= num:
            return None
        return StoreClaim((first + same) * self._block_size, first, Choice("share"), "", load, offset)

    def _policy(self, seq: Seq) -> str:
        """Who only brings blocks computes none."""
        return "wait" if seq.request.prefetches else self._settings.load

    def _claim(
        self, seq: Seq, paths: Sequence[str], first: int, lead: int, end: int, state: str = ""
    ) -> StoreClaim | None:
        """Blocks `lead` to `end`, which are `paths`, are in the store, and `first` are on the device. None if computing
        takes less."""
        seen, there = self._seen_from(end), self.ahead.there
        tiers = [self._nearest(path) if n >= seen and path not in there else None for n, path in enumerate(paths, lead)]
        places = self._places(tiers, lead, state)
        policy, both = self._policy(seq), self._settings.both_ends
        choice = self.rates.choose(policy, first, places, self._block_size, both=both)
        self._declined = choice.kind == "none"
        return None if self._declined else StoreClaim(end * self._block_size, first, choice, state)

    def _places(self, tiers: Sequence[NamedTier | None], lead: int, state: str = "") -> Places:
        """Of blocks from `lead` on, and of a state."""
        numbers = [-1 if tier is None else tier.number for tier in tiers]
        queued = {tier.number: tier.queued_bytes for tier in self.tiers}
        holder = self._nearest(state) if state else None
        besides = {} if holder is None else {holder.number: self._settings.state_bytes}
        return Places(self.rates, lead, numbers, self._settings.block_bytes, queued, besides)

    def _lookup(self, paths: Sequence[str]) -> int:
        """How many of the first of these are in some tier, without a gap."""
        num = 0
        while num < len(paths) and (more := max(tier.lookup(paths[num:]) for tier in self.tiers)):
            num += more
        return num

    def _last_run(self, paths: Sequence[str], num: int) -> tuple[int, int]:
        """Of these, of which the first `num` are there and the next is not: [start, end) of the last that are there in
        a row, if they are more than the first; else [0, num)."""
        end = len(paths)
        while end > num and self._nearest(paths[end - 1]) is None:
            end -= 1
        start = end
        while start > num and self._nearest(paths[start - 1]) is not None:
            start -= 1
        return (start, end) if end - start > num else (0, num)

    def needs(self, seq: Seq) -> list[str]:
        """What would be read for `seq` as it is claimed now, were it admitted; of a text that is computed meanwhile
        the front, too."""
        claim: StoreClaim | None = seq.claim
        if claim is None or claim.load != NO_LOAD:
            return []
        end = claim.num_tokens // self._block_size
        first = max(claim.first, self._seen_from(end))
        return [*self.paths(seq, first, end), *filter(None, [claim.state])]

    def fetch(self, texts: Sequence[Sequence[str]]) -> None:
        """Those who wait will need these, in this order, and nothing else that was read ahead. Whether there is room
        or not, all count as used now, the first ones last."""
        for paths in reversed(texts):
            tick = self._next_tick()
            for tier in self.tiers:
                tier.touch(paths, tick)
        found = ((path, self._nearest(path)) for paths in texts for path in paths)
        self.ahead.want((path, tier, self._num_bytes(path)) for path, tier in found if tier is not None)

    def _seen_from(self, end: int) -> int:
        """The first block that is seen from behind block `end`."""
        return min((g.spec.first_block(end * self._block_size, self._block_size) for g in self._kept), default=end)

    def _nearest(self, path: str) -> NamedTier | None:
        if (tier := self.ahead.where(path)) is not None:
            return tier
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
            if self._declined:
                self.choices["none"] += 1
                self.rates.declined()
            self.offer(seq, 0, first)
            return True
        assert claim.first == first, f"{seq} claimed what follows {claim.first} blocks and has {first}"
        end = claim.num_tokens // self._block_size
        choice = claim.choice
        self.choices[choice.kind] += 1
        if claim.load != NO_LOAD:
            self._share(seq, claim, end)
            return False
        if self._has_blocks and not grow(seq, claim.num_tokens):
            raise EngineError(f"{seq} was admitted without room for what the store has of it")
        begin = first if choice.kind == "wait" else max(first, choice.goal)
        cursor: PrefixCursor = seq.node
        cursor.tick = self._next_tick()
        paths = self.paths(seq, 0, end)
        wanted = ((path, self._pages(seq, n)) for n, path in enumerate(paths[begin:], begin) if self._has_blocks)
        orders = [(path, pages) for path, pages in wanted if max(pages) >= 0]
        if claim.state:
            orders.append((claim.state, self._pages_of_slots(seq)))
        sources: list[NamedTier] = []
        for path, _ in orders:
            tier = self._nearest(path)
            assert tier is not None, f"{path} was claimed, and is in no tier"
            tier.prepare_load((path,))
            sources.append(tier)
        for tier in self.tiers:
            tier.touch([*paths, claim.state], cursor.tick)
        self.offer(seq, 0, first)  # room for these is made of what is not held
        move = self._swaps.next_move()
        self._loads[move] = 0
        front = None
        if choice.kind != "wait":
            goal = choice.goal if choice.kind == "split" else 0
            places = self._places(sources, begin)
            front = self._texts[move] = BothEnds(
                seq, first, end, self._block_size, goal=goal, rates=self.rates, places=places
            )
        numbered = list(zip(range(begin, begin + len(orders)), orders, sources, strict=True))
        for n, (path, pages), tier in numbered if front is None else reversed(numbered):
            block = tier.load(path, pages, self._num_bytes(path), move)
            if front is not None:
                self._fronts[block] = front, n
        slabs = [
            table.ids[max(begin, table.base) : end] if group.spec.per_token else table.ids
            for group, table in zip(self._groups, seq.tables, strict=True)
        ]
        copy = Swapped(claim.num_tokens, [[] for _ in slabs], cursor.generation, first)
        self._swaps.expect(move, copy, slabs)
        if front is not None:
            cursor.front, cursor.reading = front, move
            return True
        if not self._slots and self._settings.both_ends:
            self._reading |= {path: (move, n) for n, path in enumerate(paths[first:])}
            self._read_by[move] = seq, paths[first:]
        self._loads[move] = claim.num_tokens - first * self._block_size
        seq.load, seq.writable, seq.num_cached = move, 0, claim.num_tokens
        return False

    def goes_on(self, seq: Seq, limit: int, grow: Callable[[Seq, int], bool]) -> bool:
        """As `begin`, behind what the prefix cache had on the host, if that is how `seq` came by all that it has."""
        if seq.num_computed != seq.num_cached:
            return True
        seq.claim = self.claim(seq, seq.num_computed // self._block_size, limit)
        return self.begin(seq, limit, grow)

    def _share(self, seq: Seq, claim: StoreClaim, end: int) -> None:
        """`seq` gets the very memory to which another's load writes, and waits for that. Mutates: seq."""
        num = end - claim.first
        slabs = [ids[claim.offset : claim.offset + num] for ids in self._swaps.loads[claim.load].slabs]
        self._swaps.give(seq, slabs)
        for g, ids in enumerate(slabs):
            self._outbox.table(seq.seq_id, g, claim.first, ids)
        cursor: PrefixCursor = seq.node
        cursor.tick = self._next_tick()
        for tier in self.tiers:
            tier.touch(self.paths(seq, 0, end), cursor.tick)
        self.offer(seq, 0, claim.first)
        move = self._swaps.next_move()
        self._loads[move] = num * self._block_size
        self._sharers.setdefault(claim.load, []).append((move, seq))
        self._swaps.expect(move, Swapped(claim.num_tokens, [[] for _ in slabs], cursor.generation, claim.first), slabs)
        seq.load, seq.writable, seq.num_cached = move, 0, claim.num_tokens

    def all_of(self, moves: Mapping[int, bool]) -> Mapping[int, bool]:
        """With those that ended because they shared one of these.

        Who has memory that the prefix cache has must stand there, or it would look evictable: so who may not enter it,
        or began before its last reset, goes without what was read, and so do all others if that is who reads.
        """
        if not self._sharers:
            return moves
        more: dict[int, bool] = {}
        for move, good in moves.items():
            sharers = self._sharers.pop(move, [])
            reader = [seq for seq in (self._read_by[move][0],) if seq.load == move] if sharers else []
            there = [*reader, *(seq for own, seq in sharers if seq.load == own)]
            newest = max((seq.node.generation for seq in there if _enters(seq)), default=-1)
            fine = [seq for seq in there if _enters(seq) and seq.node.generation == newest]
            for own, seq in sharers:
                more[own] = good and seq in fine and all(r in fine for r in reader)
        return {**moves, **more}

    def ended(self, move: int, *, good: bool) -> None:
        """A step has reported move `move`."""
        if move in self._loads:
            self.num_hit_tokens += self._loads.pop(move) * good
            for path in self._read_by.pop(move, (None, ()))[1]:
                if self._reading.get(path, (NO_LOAD, 0))[0] == move:
                    del self._reading[path]
            if (front := self._texts.pop(move, None)) is not None:
                front.over = True
        for tier in self.tiers:
            tier.ended(move, good=good)
        self.ahead.ended(move, good=good)
        self.reported(move)
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
            self._met += saved
            if front.is_first and seq.num_generated == 0:
                seq.first_cached = seq.num_cached

    def _num_bytes(self, path: str) -> int:
        return self._settings.state_bytes if path.endswith(STATE) else self._settings.block_bytes

    def reads(self, move: int) -> bool:
        """Whether this load is on its way from the store. If it fails, what was lost is known: the rest can be read."""
        return move in self._loads

    def stepped(self, output: SchedulerOutput, result: StepOutput) -> int:
        """A step has been done. Returns the tokens that were found since the last one by who computed meanwhile."""
        self.rates.stepped(shape_of(output.scheduled), result.duration_s)
        for tier, read in result.read.items():
            self.rates.read(tier, *read)
        met, self._met = self._met, 0
        return met

    def heard(self, news: StoreNews) -> None:
        """Others have changed what is there."""
        if news.read is not None:
            self.rates.read(news.tier, *news.read)
        tier = next(tier for tier in self.tiers if tier.number == news.tier)
        if news.evicts is not None:
            tier.index.evicts = news.evicts
        if news.pins is not None:
            tier.index.pin(news.pins)
        tier.index.found([FoundBlock(*found) for found in news.found], news.gone)
        self._told_kept += [(tier.index, path, seconds) for path, seconds in news.kept]

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
        """Whether blocks are to be written, and no step has carried the order yet; or somebody waits for that."""
        return self._swaps.stores_awaited or any(tier.waiting for tier in self.tiers)

    @property
    def writing(self) -> list[int]:
        """Moves of blocks that are to be written, and of which no step has said what became of them."""
        return [move for tier in self.tiers for move in tier.writing]

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


def _enters(seq: Seq) -> bool:
    """Whether what `seq` computes enters the prefix cache."""
    return seq.taint_start is None and seq.node is not None and seq.node.next_commit != NEVER


def paths_in(place: str, names: Sequence[bytes], first: int = 0) -> list[str]:
    """Of the blocks of one text, from its block `first` on, at a model's and tenant's place."""
    return [f"{place}/{name.hex()}-{n:x}" for n, name in enumerate(names, first)]


def paths_of(settings: StoreSettings, request: Request, tokens: array[int], block_size: int) -> list[str]:
    """Where the whole blocks of `tokens`, a text of `request`, are or would be: as a sequence of it would name them."""
    root = root_name(settings.secret, settings.fingerprint, root_of(request.namespace, request.taint))
    place = f"{settings.fingerprint}/{space_of(settings.secret, request.keeper or request.tenant)}"
    return paths_in(place, names_after(settings.secret, root, tokens.tobytes(), 4 * block_size))


def space_of(secret: bytes, tenant: str) -> str:
    """Where the blocks of a tenant are: all of one stand together, so that they can be deleted together."""
    return root_name(secret, "tenant", tenant.encode())[:8].hex()


def recorder_of(settings: EventSettings, stored: StoredBlocks | None, block_size: int) -> EventRecorder:
    """With the names of the store, if there is one."""
    names = BlockNames(settings.secret, "", block_size) if stored is None else stored.names
    tiers = [] if stored is None else stored.tiers
    stores = {MEDIA[tier.number]: tier.index for tier in tiers}
    return EventRecorder(names, include_token_ids=settings.include_token_ids, stores=stores)
