"""Adapters in blocks of the KV pool: one budget for both, given to whichever is used.

An adapter has whole blocks, a slab of every full group each, and nobody else has a reference to them. Those of
sequences with memory stay. One that nobody has may be given up like a block of the prefix cache: of both, what the
eviction policy names goes first, so few adapters leave room for texts, and many take it.
Source: Sheng et al., S-LoRA, arXiv 2311.03285, section 5.1 (unified paging); prefetching: section 5.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.page_ops import AdapterOp
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.prefix.node import PLAIN
from penstock.kv.prefix.queue import EvictionQueue
from penstock.kv.room import Want

if TYPE_CHECKING:
    from penstock.core.adapter import AdapterRef
    from penstock.core.protocols import EvictionPolicy
    from penstock.core.sequence import Sequence as Seq
    from penstock.kv.block_pool import BlockPool
    from penstock.kv.leaving import Leaving
    from penstock.kv.outbox import Outbox
    from penstock.kv.room import Room

Block = tuple[int, ...]


class AdapterLimits(NamedTuple):
    """`units`: of adapters' numbers that a block holds; `most`: adapters that a rank has places for."""

    units: int
    most: int


def blocks_of(ref: AdapterRef, units: int) -> int:
    """Blocks of so many units that an adapter takes."""
    return max(1, -(-ref.num_units // units))


class PagedAdapter:
    """One that has blocks. `num_users`: sequences with memory; `seen`: the last step that may look at it once these
    have gone. `rank`, `tick`, `queued`: see `EvictionQueue`."""

    __slots__ = ("blocks", "num_users", "queued", "ref", "seen", "tick")
    rank = PLAIN

    def __init__(self, ref: AdapterRef, blocks: list[Block]) -> None:
        self.ref, self.blocks = ref, blocks
        self.num_users = self.queued = 0
        self.seen = -1
        self.tick: Any = 0


class AdapterPages:
    """A part of the KV manager; integers only.

    Attributes:
        num_blocks: that adapters have; num_idle: those of adapters that can be given up now.
    """

    def __init__(
        self, allowed: AdapterLimits, full: Sequence[int], pools: Sequence[BlockPool], room: Room,
        policy: EvictionPolicy, outbox: Outbox, steps: Leaving,
    ) -> None:  # fmt: skip
        """`full`: indices of the full groups; `policy`: that of the prefix cache; `steps`: knows those in flight."""
        self._allowed, self._full, self._pools, self._room = allowed, tuple(full), pools, room
        self._cache, self._policy, self._outbox, self._steps = room.cache, policy, outbox, steps
        self._held: dict[bytes, PagedAdapter] = {}
        self._idle = EvictionQueue(policy)
        self._leaving: deque[tuple[int, PagedAdapter]] = deque()
        self.num_blocks = self.num_idle = 0

    @property
    def held(self) -> list[PagedAdapter]:
        return list(self._held.values())

    def has(self, key: bytes) -> bool:
        """Whether the adapter with this hash has blocks."""
        return key in self._held

    @property
    def leaving(self) -> bool:
        """Some can be given up once steps in flight have retired."""
        return any(not held.num_users and not held.queued for _, held in self._leaving)

    # -- sequences -----------------------------------------------------------------------------------------------

    def wanted(self, ref: AdapterRef | None) -> tuple[int, int] | None:
        """For one more sequence with it: blocks that it takes from the pool, and idle ones that will not be idle then.
        None: there is no place for it now."""
        if ref is None:
            return 0, 0
        held = self._held.get(ref.hash)
        if held is not None:
            return 0, len(held.blocks) if held.queued else 0
        if len(self._held) >= self._allowed.most and not len(self._idle):
            return None
        return blocks_of(ref, self._allowed.units), 0

    def with_one_more(self, seq: Seq, need: int, room: int) -> tuple[int, int]:
        """Blocks that a sequence needs, and that can be given up, with its adapter; no room if that has no place."""
        wanted = self.wanted(seq.request.rules.adapter)
        return (need, -1 << 40) if wanted is None else (need + wanted[0], room - wanted[1])

    def enter(self, ref: AdapterRef | None) -> None:
        """One more sequence has it. `wanted` has looked. Mutates: self, the pools."""
        if ref is None:
            return
        held = self._held.get(ref.hash)
        if held is None:
            held = self._take(ref)
            assert held is not None, "a sequence was admitted without room for its adapter"
        else:
            self._policy.on_hit(held, self._cache.tick())
        if held.queued:
            self._idle.discard(held)
            self.num_idle -= len(held.blocks)
        held.num_users += 1

    def leave(self, ref: AdapterRef | None) -> None:
        """One less. What steps in flight see of it stays until they have retired."""
        if ref is None:
            return
        held = self._held[ref.hash]
        held.num_users -= 1
        assert held.num_users >= 0, "an adapter is left more often than it was entered"
        if held.num_users:
            return
        if self._steps.submitted > self._steps.retired:
            held.seen = self._steps.submitted
            self._leaving.append((held.seen, held))
        else:
            self._rest(held)

    def retired(self, step: int) -> None:
        while self._leaving and self._leaving[0][0] <= step:
            seen, held = self._leaving.popleft()
            if not held.num_users and not held.queued and held.seen == seen:
                self._rest(held)

    def _rest(self, held: PagedAdapter) -> None:
        self._policy.on_hit(held, self._cache.tick())  # it was in use until now
        self._idle.push(held)
        self.num_idle += len(held.blocks)

    # -- those who wait ------------------------------------------------------------------------------------------

    def ahead(self, refs: Sequence[AdapterRef]) -> list[AdapterRef]:
        """Those whose requests wait, the first in the queue first, are read into blocks that are free or may be given
        up, but not into one another's. Returns those that have blocks now."""
        own = [held for ref in refs if (held := self._held.get(ref.hash)) is not None]
        for held in reversed(own):  # what comes first goes last
            if held.queued:
                self._policy.on_hit(held, self._cache.tick())
                self._idle.push(held)
        kept = sum(len(held.blocks) for held in own if held.queued)
        places = self._allowed.most - len(self._held) + len(self._idle) - sum(bool(held.queued) for held in own)
        found = []
        for ref in refs:
            if ref.hash not in self._held:
                num_blocks = blocks_of(ref, self._allowed.units)
                if places <= 0 or num_blocks > self._room.num_within_reach - kept:
                    break
                taken = self._take(ref)
                if taken is None:
                    break
                self._rest(taken)
                kept, places = kept + num_blocks, places - 1
            found.append(ref)
        return found

    # -- blocks --------------------------------------------------------------------------------------------------

    def _take(self, ref: AdapterRef) -> PagedAdapter | None:
        """Blocks for it, at the cost of others that are idle; None, if there are too few."""
        num_blocks = blocks_of(ref, self._allowed.units)
        if len(self._held) >= self._allowed.most and not self.give_up():
            return None
        if not self._room.reserve([Want(g, num_blocks, 0) for g in self._full]):
            return None
        columns = [self._pools[g].alloc_slabs(num_blocks) or [] for g in self._full]
        held = self._held[ref.hash] = PagedAdapter(ref, list(zip(*columns, strict=True)))
        self.num_blocks += num_blocks
        self._policy.on_insert(held, self._cache.tick())
        self._outbox.add(AdapterOp(ref, blocks=tuple(held.blocks)))
        return held

    def first_key(self) -> tuple[int, Any] | None:
        """As `PrefixCache.first_key`, of the adapter that goes first."""
        return self._idle.first_key()

    def give_up(self) -> int:
        """The adapter that goes first loses its blocks, which no step in flight sees: how many. 0: all are in use."""
        held: PagedAdapter | None = self._idle.pop()
        if held is None:
            return 0
        del self._held[held.ref.hash]
        for g, slabs in zip(self._full, zip(*held.blocks, strict=True), strict=True):
            self._pools[g].unref_slabs(slabs, unseen=True)
        self.num_idle -= len(held.blocks)
        self.num_blocks -= len(held.blocks)
        self._outbox.add(AdapterOp(held.ref, blocks=()))
        return len(held.blocks)

    def give_up_all(self) -> None:
        """All that nobody has."""
        while self.give_up():
            pass

    # -- laws ----------------------------------------------------------------------------------------------------

    def check_invariants(self, users: dict[bytes, int]) -> None:
        """`users`: sequences with memory by the hash of their adapter. Raises AssertionError."""
        held = {key: one.num_users for key, one in self._held.items()}
        assert {key: n for key, n in held.items() if n} == users, f"adapters {held} have the users {users}"
        assert len(held) <= self._allowed.most, f"{len(held)} adapters have {self._allowed.most} places"
        idle = {id(one) for one in self._idle.entries()}
        leaving = {id(one) for seen, one in self._leaving if one.seen == seen}
        for one in self._held.values():
            states = (one.num_users > 0) + (id(one) in idle)
            assert states == 1 or (states == 0 and id(one) in leaving), f"adapter {one.ref.path} is lost"
            assert len(one.blocks) == blocks_of(one.ref, self._allowed.units), "an adapter has too few blocks"
        assert len(idle) == len(self._idle), "an adapter that has gone is still idle"
        sizes = [(len(one.blocks), id(one) in idle) for one in self._held.values()]
        assert self.num_blocks == sum(n for n, _ in sizes), "blocks of adapters are miscounted"
        assert self.num_idle == sum(n for n, rests in sizes if rests), "idle blocks of adapters are miscounted"


def pages_of(
    allowed: AdapterLimits | None, full: Sequence[int], pools: Sequence[BlockPool], room: Room,
    policy: EvictionPolicy | None, outbox: Outbox, steps: Leaving,
) -> AdapterPages | None:  # fmt: skip
    """Those of a manager whose parts these are, which hear of them. None: adapters have memory of their own."""
    if allowed is None:
        return None
    assert full, "there are no blocks for adapters"
    order = policy or EVICTION_POLICIES.get("lru")()
    found = room.adapters = steps.adapters = AdapterPages(allowed, full, pools, room, order, outbox, steps)
    return found
