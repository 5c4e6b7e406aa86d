"""Who owns which block: admission, growth, prefix reuse, forks and release, for all cache groups at once.

Integers only. Decisions leave through `drain` as table updates and page operations; the runner carries them out.
Sources: vLLM, arXiv 2309.06180, section 4; SGLang, arXiv 2312.07104, section 3; Mistral, arXiv 2310.06825, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from penstock.base.errors import EngineError
from penstock.base.hashing import digest
from penstock.config.selection import Keeping
from penstock.core.batch import SchedulerOutput, StepOutput, TableUpdate
from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import AnyPageOp
from penstock.core.protocols import EvictionPolicy, PrefixCache
from penstock.core.sequence import NEVER, NO_LOAD, Sequence
from penstock.kv.adapter_pages import AdapterLimits, pages_of
from penstock.kv.aside import selections_of
from penstock.kv.audit import Audit
from penstock.kv.backing import Backing
from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.checkpoints import CHECKPOINT_RULES, Checkpoints
from penstock.kv.cursor import PrefixCursor, PrefixMatch
from penstock.kv.events import EventRecorder, EventSettings
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.growth import apply_growth, make_ragged, plan_growth
from penstock.kv.hints import Hints
from penstock.kv.leaving import Leaving
from penstock.kv.outbox import Outbox
from penstock.kv.prefix import PREFIX_CACHES
from penstock.kv.room import Room, Want
from penstock.kv.selection import KeepAll
from penstock.kv.sharing import Sharing
from penstock.kv.stats import KVStats, kv_stats
from penstock.kv.stored import StoredBlocks, StoreSettings, recorder_of
from penstock.kv.swap import Swaps
from penstock.kv.tiers import BLOCK_TIERS
from penstock.kv.window_pool import WindowPool
from penstock.kv.windows import Windows


class KVManager:
    """The only one who changes block tables.

    Args:
        groups: cache groups in index order.
        num_slabs: slabs of each group's pool.
        block_size: S, tokens per block.
        prefix_cache: a name in PREFIX_CACHES, or a cache made for this block size.
        eviction: a name in EVICTION_POLICIES.
        host_slabs: blocks of each group that fit into `tier`, for preemption by swap; none by default.
        tier: a name in BLOCK_TIERS.
        offload: evicted blocks of the prefix cache wait in `tier`, too, unless sequences need the room. Only with
            a tree for a cache, full groups alone, and no `keeping`.
        store: a store of blocks outside this process, from which prompts go on and into which full blocks are written;
            no `keeping` with it.
        pin_share: the part of the memory that hints may pin.
        events: what enters and leaves the prefix cache is recorded; only with groups of blocks.
        slot_checkpoint_tokens: distance of slot checkpoints; rounded down to blocks, at least one block.
        slot_checkpoint_rule: where they stand (`checkpoints.CHECKPOINT_RULES`).
        adapters: adapters lie in blocks of the full groups, too; None: they have memory of their own.
        step_tokens: tokens of one sequence that steps in flight, and the one being planned, may have between them;
            None: any number. It bounds what a sequence needs of a window group, however long it is.
        keeping: what sequences give up of their caches; only where there is one full group and no other.

    Raises ConfigError for unknown names.

    The scheduler calls `drain` and then `submitted` for every step, with nothing in between.
    """

    def __init__(
        self,
        groups: Seq[CacheGroup],
        num_slabs: Seq[int],
        block_size: int,
        *,
        prefix_cache: str | PrefixCache = "radix",
        eviction: str = "lru",
        slot_checkpoint_tokens: int = 512,
        slot_checkpoint_rule: str = "distance",
        host_slabs: Seq[int] | None = None,
        tier: str = "host",
        offload: bool = False,
        step_tokens: int | None = None,
        keeping: Keeping | None = None,
        store: StoreSettings | None = None,
        events: EventSettings | None = None,
        pin_share: float = 0.0,
        adapters: AdapterLimits | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.pools = [self._new_pool(g, n) for g, n in zip(self.groups, num_slabs, strict=True)]
        if isinstance(prefix_cache, str):
            policy: EvictionPolicy | None = EVICTION_POLICIES.get(eviction)()
            self.cache: PrefixCache = PREFIX_CACHES.get(prefix_cache)(block_size, policy)
        else:
            policy, self.cache = None, prefix_cache
        self._paged = tuple(g.index for g in self.groups if g.spec.per_token)
        self._full = tuple(g.index for g in self.groups if g.spec.kind == "paged")
        self._slots = tuple(g.index for g in self.groups if g.spec.kind == "slot")
        self._refs = [pool.refs for pool in self.pools]
        self.backing = Backing(self.groups, self.pools, block_size)
        self.outbox = Outbox(self.pools)
        self._room = Room(self._paged, self._slots, self.pools, self.cache)
        distance = max(block_size, slot_checkpoint_tokens // block_size * block_size)
        rule = CHECKPOINT_RULES.get(slot_checkpoint_rule)(distance, block_size)
        self._windows = Windows(self.groups, self.pools, block_size, step_tokens, self.outbox)
        self._sharing = Sharing(self._paged, self.pools, self._windows, self.cache, self.outbox, block_size)
        self._states = Checkpoints(self._slots, self.pools, self.cache, self.outbox, block_size, rule)
        outside = BLOCK_TIERS.get(tier)(self.groups, host_slabs or [0] * len(self.groups), self.outbox)
        self.swaps = Swaps(outside, self.groups, self.pools, block_size)
        if offload:
            assert keeping is None, "selections take blocks back from the prefix cache"
            self.swaps.offload_from(self.cache)
        self.measures: list[Callable[[SchedulerOutput, StepOutput], int]] = []  # of each step: tokens found in it
        self.stored: StoredBlocks | None = None
        if store is not None:
            assert keeping is None, "what selections leave is no whole block"
            self.stored = StoredBlocks(store, self.swaps, self.groups, self.outbox, block_size)
            self.measures.append(self.stored.stepped)
        self.events: EventRecorder | None = None
        """What has changed in the prefix cache, its tier and the store. None: nobody asks."""
        if events is not None:
            assert self._paged, "there are no blocks"
            self.events = recorder_of(events, self.stored, block_size)
            self._sharing.events = self._room.events = self.events
            self.swaps.tell(self.events)
        self.selections = KeepAll(block_size)
        if keeping is not None:
            assert len(self.groups) == len(self._full) == 1, "selections are for one full group"
            self.selections = selections_of(
                keeping, self.pools[0], self._room, self.outbox, block_size, self._withdraw, self.swaps.tier,
                lambda seq: self._leaving.leave(seq.node),
            )  # fmt: skip
        self._leaving = Leaving(self.cache, self._room, self.swaps, bounded=not self._full)
        self.adapters = pages_of(adapters, self._full, self.pools, self._room, policy, self.outbox, self._leaving)
        self.hints = Hints(
            self.cache, policy, self._room, self._leaving, self.pools[self._paged[0]] if self._paged else None,
            self.stored, block_size=block_size, pin_share=pin_share, moves=offload or store is not None,
        )  # fmt: skip
        self._num_cow_copies = 0

    def _new_pool(self, group: CacheGroup, num_slabs: int) -> BlockPool:
        return (BlockPool if group.spec.window is None else WindowPool)(num_slabs, group.pages_per_slab)

    # -- admission -----------------------------------------------------------------------------------------------

    def match(self, seq: Sequence) -> PrefixMatch:
        """Longest reusable prefix of what is known of `seq`, in whole blocks.

        Mutates only the memos `seq.block_keys`, `names` and `claim`.

        At least one known token stays to be computed; a lossy tail (`taint_start`) is never taken from the cache; a
        request for prompt logprobs or for a pooled vector reads no cache; with slot groups the prefix ends at a
        checkpoint; of window groups all that the next token can see must still be there.
        """
        namespace = digest(seq.request.namespace, seq.request.taint.encode())
        version = self._version
        limit = self._reusable(seq)
        seq.claim = None
        if limit == 0:
            return PrefixMatch(0, namespace, None, version)
        entry, num_blocks, tails = self._windows.match(
            self.cache, namespace, seq.token_ids, limit, seq.block_keys, bool(self._slots)
        )
        if self.stored is not None:
            seq.claim = self.stored.claim(seq, num_blocks, limit)
        return PrefixMatch(num_blocks * self.block_size, namespace, entry, version, tails)

    def _reusable(self, seq: Sequence) -> int:
        """The most blocks that `seq` may take from the prefix cache."""
        if not seq.request.reads_cache:
            return 0
        limit = seq.num_known - 1
        if seq.taint_start is not None:
            limit = min(limit, seq.taint_start)
        return self.selections.limit(seq, limit) // self.block_size

    @property
    def _version(self) -> int:
        """Changes whenever something that could be matched is forgotten."""
        store = 0 if self.stored is None else self.stored.version
        return self.cache.version + self._windows.num_hollowed + store

    def _fresh(self, seq: Sequence, match: PrefixMatch) -> PrefixMatch:
        return match if match.version == self._version else self.match(seq)

    def can_admit(self, seq: Sequence, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether `admit` and then `grow` to `num_tokens` would succeed now, with nobody preempted.

        Of window groups only what `seq` can hold at one time has to be there: it gives up blocks as it goes on.
        """
        match = self._fresh(seq, match)
        num_blocks = match.num_tokens // self.block_size
        need = self.selections.blocks_to_admit(seq, num_tokens) - num_blocks
        # What is matched stops being evictable the moment it is admitted.
        room = self._room.num_evictable - self.cache.num_idle(match.entry, num_blocks)
        need, room = self._leaving.with_one_more(seq, need, room)
        if any(need > self.pools[g].num_free + room for g in self._full):
            return False
        has_slot = not self._slots or self._states.room(reserved=1 if num_blocks else 0) > 0
        return has_slot and self._windows.can_admit(seq, match, num_tokens)

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """Give `seq` its tables: the matched blocks, and a slot in every slot group (the checkpoint's copy, or zeros).

        Of window groups it gets what it will see from where it goes on: behind the match, or where `restore` brings it.
        Mutates: seq.tables, node, num_computed, num_cached. Raises EngineError if there is no slot (see `can_admit`).
        """
        assert not seq.tables, f"{seq} is admitted twice"
        match = self._fresh(seq, match)
        num_blocks = match.num_tokens // self.block_size
        asked = seq.num_known if seq.request.reads_cache else 0
        branch = self._states.branch(seq, match, self._reusable)
        self.hints.asked_by(seq.request)
        entry, blocks = self.cache.acquire(match.namespace, match.entry, num_blocks, asked)
        slots = self._states.take(keep=entry)
        if slots is None:
            self.cache.release(entry)
            raise EngineError(f"{seq} was admitted although no slot is free")
        self._leaving.enter(seq)
        seq.tables = [BlockTable() for _ in self.groups]
        self._sharing.enter(seq, blocks)
        for j, g in enumerate(self._slots):
            seq.tables[g].ids = [slots[j]]
        self._states.fill(slots, self.cache.checkpoint(entry) if num_blocks else None)
        for g, table in enumerate(seq.tables):
            self.outbox.whole_table(seq.seq_id, g, table)
        seq.num_computed = seq.num_cached = num_blocks * self.block_size
        seq.node = PrefixCursor(entry, num_blocks, seq.num_computed + self.block_size, self._leaving.generation, branch)
        seq.node.next_slide = self._windows.next_slide(seq.tables)
        seq.block_keys.clear()  # only `match` needs them
        self.selections.enter(seq)

    # -- preemption by swap -------------------------------------------------------------------------------------------

    def swap_out(self, seq: Sequence) -> bool:
        """Copy what `seq` has computed to the tier and release its device memory. False, and nothing changed: no room.

        Mutates: seq.swapped, and what `release` does.
        """
        assert seq.num_inflight == 0, f"{seq} is swapped out while a step works on it"
        if not seq.num_computed or not self.swaps.out(seq):
            return False
        self.release(seq)
        return True

    def restore(self, seq: Sequence) -> bool:
        """Straight after `admit`: bring back what waits in the tier, beyond what the prefix cache had on the device.

        False: it is on its way, and `seq` cannot run before a step reports load `seq.load` (`Swaps.ended`).
        Mutates: seq.
        """
        self.swaps.find(seq, self._reusable)
        if seq.swapped is None:
            return self.stored is None or self.stored.begin(seq, self._reusable(seq), self.grow)
        if seq.swapped.num_tokens <= seq.num_computed:
            self.swaps.drop(seq)
            return True
        if not self.grow(seq, seq.swapped.num_tokens):
            raise EngineError(f"{seq} was admitted without room for what it had swapped out")
        if seq.swapped.generation != self._leaving.generation:
            self._stop_following(seq.node)
        return self.swaps.back(seq) and (
            self.stored is None or self.stored.goes_on(seq, self._reusable(seq), self.grow)
        )

    def ended(self, move: int, *, good: bool) -> int:
        """A step has reported move `move`: nothing reads or writes for it any more.

        Returns the tokens that whoever waited for it has now; 0 if nobody had to wait.
        """
        if self.stored is not None:
            self.stored.ended(move, good=good)
        num_tokens = self.swaps.ended(move, good=good)
        self._leaving.ended(move)
        return num_tokens

    # -- growth --------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make tokens [num_computed + num_inflight, num_tokens) writable: all or nothing. False: no memory.

        New blocks are zeroed, shared ones that will be written are copied first. Evicts from the prefix cache as
        needed, and only if that is enough.
        """
        start = seq.num_computed + seq.num_inflight
        if seq.next_selection != NEVER:
            return self.selections.grow(seq, start, num_tokens)
        first = start // self.block_size
        end = -(-num_tokens // self.block_size)
        tables = seq.tables
        for g in self._paged:
            ids = tables[g].ids
            # The common case, a token more in a block of one's own, must cost next to nothing.
            if end > len(ids) or end != first + 1 or self._refs[g][ids[first]] > 1:
                if not self._grow(seq, first, end):
                    return False
                break
        if not self._slots:
            seq.writable = end * self.block_size
        elif seq.num_inflight:
            self._states.stage(seq, start)
        return True

    def _grow(self, seq: Sequence, first: int, end: int) -> bool:
        plans = [(g, plan_growth(seq.tables[g], self.pools[g], first, end)) for g in self._paged]
        if not self._room.reserve([Want(g, plan.num_slabs, plan.num_pages) for g, plan in plans]):
            return False
        for g, plan in plans:
            if plan.num_slabs or plan.num_pages:
                apply_growth(seq.tables[g], self.pools[g], plan, seq.seq_id, g, self.outbox)
                self._num_cow_copies += len(plan.copies)
        return True

    # -- following a sequence ------------------------------------------------------------------------------------

    def cut(self, seq: Sequence, start: int, n: int) -> int:
        """Shorten a chunk of `n` tokens from `start` so that it ends at the next checkpoint of slots or selection, and
        before what has come from a store.

        At least 1; 0 while a step in flight reaches a selection, or that.
        """
        if seq.node is not None and seq.node.front is not None:
            n = max(0, min(n, seq.node.front.most(start)))
        return n if n <= 0 else min(self._states.cut(seq, start, n), seq.next_selection - start)

    def select(self, seq: Sequence, counts: Seq[int]) -> None:
        """The rank has chosen `counts` tokens per line. Behind `commit`. Mutates: seq, pools."""
        if seq.tables:
            self.selections.cut(seq, counts)
            self._lost(seq)

    def _lost(self, seq: Sequence) -> None:
        """`seq` has given up a part of its cache: what it computes from now on is lossy."""
        if seq.taint_start is None:
            seq.taint_start = seq.num_computed
        cursor: PrefixCursor = seq.node
        self._stop_following(cursor)
        if not self.selections.stays:
            self._leaving.leave(cursor)

    def _withdraw(self, seq: Sequence) -> None:
        """Nothing more of `seq` enters the prefix cache, and what only it uses of what is there leaves it.

        Mutates: seq.node.
        """
        cursor: PrefixCursor = seq.node
        self._stop_following(cursor)
        self._room.evict(self.cache.num_evictable)  # what goes on from its blocks, and nobody stands on
        if cursor.holding and cursor.generation == self._leaving.generation:
            cursor.entry, blocks = self.cache.withdraw(cursor.entry)
            cursor.num_blocks -= len(blocks)
            self._room.drop(blocks, [], unseen=False)

    def commit(self, seq: Sequence) -> None:
        """`seq.num_computed` has advanced: put new full blocks, and a slot checkpoint where one is due, in the cache.

        Where the cache has a block already, the sequence goes over to it and drops its own. Then give up the blocks
        that lie before a window: no step from now on looks there, and none in flight does (it began at `num_computed`
        or later).
        """
        cursor: PrefixCursor | None = seq.node
        if cursor is None:
            return
        if cursor.front is not None and self.stored is not None:
            self.stored.meet(seq, cursor.front)
        if seq.num_computed >= cursor.next_commit:
            self._follow(seq, cursor)
        if seq.num_computed >= cursor.next_slide:
            cursor.next_slide = self._windows.slide(seq)
        if seq.num_computed >= seq.next_selection and self.selections.passed(seq):
            self._lost(seq)

    def _follow(self, seq: Sequence, cursor: PrefixCursor) -> None:
        if cursor.generation != self._leaving.generation:
            self._stop_following(cursor)  # what follows blocks of before the reset must not be found after it
            return
        end = seq.num_computed // self.block_size
        if seq.taint_start is not None:
            end = min(end, seq.taint_start // self.block_size)
        if end > cursor.num_blocks:
            self.hints.asked_by(seq.request)
            first = cursor.num_blocks
            self._sharing.insert(seq, cursor, end)
            if self.stored is not None:
                self.stored.offer(seq, first, cursor.num_blocks)
        if end > cursor.num_blocks or end < seq.num_computed // self.block_size:
            self._stop_following(cursor)  # refused (a hash collision), or lossy from here on
            return
        cursor.next_commit = (cursor.num_blocks + 1) * self.block_size
        if self._slots:
            slabs = self._states.attach(seq, cursor)
            if slabs is not None and self.stored is not None:
                self.stored.offer_state(seq, cursor.num_blocks, slabs)

    def _stop_following(self, cursor: PrefixCursor) -> None:
        cursor.next_commit = NEVER
        self._states.drop_staged(cursor)

    # -- forks, raggedness, release ------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """`child` shares the parent's committed blocks, the partial tail too, and gets copies of its slots.

        False, and nothing changed, if there is no slot. Whoever writes the shared tail first copies it (`grow`).
        Mutates: child.tables, node, num_computed, num_cached, block_keys, taint_start.
        """
        assert parent.tables, f"{parent} owns nothing to fork"
        assert not child.tables, f"{child} owns memory already"
        assert parent.num_inflight == 0, f"{parent} is forked while a step works on it"
        self.commit(parent)
        slots = self._states.copy(parent)
        if slots is None:
            return False
        self._leaving.enter(child)
        for g, table in enumerate(parent.tables):
            if g in self._slots:
                copy = BlockTable([slots[self._slots.index(g)]])
            else:
                copy = self.selections.share(table, self.pools[g], parent, child)
            child.tables.append(copy)
            self.outbox.whole_table(child.seq_id, g, copy)
        cursor: PrefixCursor = parent.node
        child.node = cursor.copy()
        if cursor.holding and cursor.generation == self._leaving.generation:
            self.cache.share(cursor.entry)
        parent.writable = child.writable = 0  # their tail is shared now
        child.num_computed = parent.num_computed
        child.num_cached = 0
        child.block_keys = list(parent.block_keys)
        child.taint_start = parent.taint_start
        child.next_selection = parent.next_selection
        return True

    def make_ragged(self, seq: Sequence, group_index: int) -> bool:
        """Give every layer of a group with blocks private pages. False if there are too few, or the group has slots.

        From now on nothing of `seq` enters the prefix cache. Mutates: seq.tables[group_index].
        """
        if group_index in self._slots:
            return False
        table: BlockTable = seq.tables[group_index]
        pool = self.pools[group_index]
        if table.layers is not None:
            return True
        if not self._room.reserve([Want(group_index, 0, len(table.held) * pool.pages_per_slab)]):
            return False
        make_ragged(table, pool, seq.seq_id, group_index, self.outbox)
        cursor: PrefixCursor = seq.node
        cursor.front = None  # what is read goes to the slabs that it had
        self._stop_following(cursor)
        if all(seq.tables[g].layers is not None for g in self._paged):
            self._leaving.leave(cursor)
        return True

    def release(self, seq: Sequence) -> None:
        """Drop everything `seq` holds (end, abort, preemption) and forget its table updates. Keeps its tokens.

        What steps in flight saw of it becomes free, or evictable, when they have retired.
        """
        self.outbox.discard(seq.seq_id)
        self._leaving.gone(seq)
        for g, table in enumerate(seq.tables):
            self.selections.release(seq, table, self.pools[g])
        if seq.node is not None:
            self._states.drop_staged(seq.node)
            self.hints.leave(seq)
        seq.tables, seq.node = [], None
        seq.block_keys.clear()
        seq.num_computed = seq.num_inflight = seq.num_cached = seq.writable = 0
        seq.next_selection = NEVER
        seq.load = NO_LOAD

    def reset_prefix_cache(self) -> None:
        """Forget all blocks and checkpoints. What runs, or is swapped out, goes on, and enters the cache no more."""
        if self.events is not None:
            self.events.emptied()
        blocks, checkpoints = self.cache.reset()
        self._room.drop(blocks, checkpoints, unseen=False)
        self.hints.reset()

    # -- steps ---------------------------------------------------------------------------------------------------

    def drain(self) -> tuple[list[TableUpdate], list[AnyPageOp]]:
        """What the next step has to carry out first: table updates and page operations, in order of planning."""
        if self.stored is not None:
            self.stored.take_waiting()
        return self.outbox.drain()

    @property
    def orders_wait(self) -> bool:
        """Blocks are to be written: a step without rows is due if there is no other, for then nobody else is slowed."""
        return self.stored is not None and self.stored.waits

    def submitted(self, step: int) -> None:
        """`step`, with what was drained last, was handed to the executor."""
        self._leaving.submitted = step
        for pool in self.pools:
            pool.submitted(step)

    def retired(self, step: int) -> None:
        """`step` is done: what waited for it becomes free or evictable."""
        for pool in self.pools:
            pool.retired(step)
        self._leaving.retire(step)

    @property
    def reclaiming(self) -> bool:
        """Memory is on its way: some becomes free or evictable when a step in flight retires, or a load ends, for whom
        somebody may have waited who is gone. Preempting can wait. Windows slide at almost every step; that helps nobody
        as long as their pool is not what is short.
        """
        return bool(self._leaving or self.swaps.loads) or any(
            pool.waiting and not (isinstance(pool, WindowPool) and pool.num_free + pool.num_idle) for pool in self.pools
        )

    def stats(self) -> KVStats:
        return kv_stats(
            self.groups, self.pools, self.cache, self._room, self.swaps, self.stored, self.selections,
            self.adapters, num_cow_copies=self._num_cow_copies,
        )  # fmt: skip

    @property
    def main_group(self) -> int | None:
        """The group that speaks for all in statistics: the first full one, else the first window; None: only slots."""
        return next(iter(self._full or self._paged), None)

    def num_held(self, seq: Sequence) -> int:
        """Blocks that the tables of `seq` cover, shared ones, and those that left a window, included."""
        return seq.tables[self._paged[0]].num_blocks if seq.tables and self._paged else 0

    def num_stranded(self, seq: Sequence) -> int:
        """Free blocks that a waiting `seq` cannot use because they do not lie together: none, any block serves here."""
        return 0

    def check_invariants(self, live: Iterable[Sequence]) -> None:
        """Raises AssertionError, with what is wrong, unless the books are right. `live`: all sequences with memory."""
        live = list(live)
        self.swaps.check_invariants(live)
        audit = Audit(self.groups, self.pools, self.cache, self.block_size, self._leaving.generation, self.adapters)
        audit.run(live, self.hints.entries(), self.outbox.pending(), self.swaps.loads)
