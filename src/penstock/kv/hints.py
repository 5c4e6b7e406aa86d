"""What hints do to the prefix cache: blocks that stay longer, blocks that stay, blocks that go first.

A hint is heeded when its sequence lets go of its blocks: until then they are held anyway. Times are the beginnings of
steps on the engine's clock, which a run's log has. Only trees heed hints; other caches ignore them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.base.hashing import digest
from penstock.core.kv_hints import WHOLE, KVHint
from penstock.core.protocols import EvictionPolicy
from penstock.kv.block_pool import BlockPool
from penstock.kv.prefix.node import Owner
from penstock.kv.prefix.tree import PrefixTree

if TYPE_CHECKING:
    from penstock.core.protocols import PrefixCache
    from penstock.core.request import Request
    from penstock.core.sequence import Sequence as Seq
    from penstock.kv.cursor import PrefixCursor
    from penstock.kv.leaving import Leaving
    from penstock.kv.prefix.node import PrefixNode
    from penstock.kv.room import Room
    from penstock.kv.stored import StoredBlocks

MAX_PINS = 256
MOVED_PER_STEP = 64
"""Blocks that leave for a lower tier, because a hint said so, between two steps: a step does not wait for more."""


class Pin(NamedTuple):
    """A hold on an entry until a time."""

    until_s: float
    tenant: str
    entry: PrefixNode


class Hints:
    """A part of the KV manager.

    Args:
        stored: where blocks are outside this process, if anywhere.
        pool: whose blocks are counted, if there are blocks.
        pin_share: the part of these that pins may hold, of which a tenant has its own part.
        moves: there is a tier below, for what is demoted to go to.

    Attributes:
        now_s: when the step began that is being planned.
        counts: what was done, by action: "retain", "pin", "demote" (sequences), "refused_pin" (beyond a share),
            "gave_way" (pins that were dropped so that somebody could run), and what became of conversations that wait
            for a tool: "pause_preserve", "pause_swap", "pause_discard" (`sched.pauses`).
        moves: as given.
        num_pinned: blocks that pins hold.
    """

    def __init__(
        self, cache: PrefixCache, eviction: EvictionPolicy | None, room: Room, leaving: Leaving, pool: BlockPool | None,
        stored: StoredBlocks | None, *, block_size: int, pin_share: float, moves: bool,
    ) -> None:  # fmt: skip
        self.now_s = 0.0
        self.num_pinned = 0
        self.others: Callable[[], bool] | None = None
        self.counts: Counter[str] = Counter()
        self.pins: list[Pin] = []
        self._tree = cache if isinstance(cache, PrefixTree) else None
        self._eviction = eviction
        self._room = room
        self._leaving = leaving
        self._pool = pool
        self._stored = stored
        self._block_size = block_size
        self._pin_share = pin_share
        self.moves = moves
        self._demoted = False

    def entries(self) -> list[Any]:
        """Those that pins hold, and those that only steps in flight or loads do."""
        return [*self._leaving.entries(), *(pin.entry for pin in self.pins)]

    def begin_step(self, now_s: float) -> None:
        """What has had its time is like any other; what was demoted goes down a tier, if there is one."""
        self.now_s = now_s
        if self._stored is not None:
            self._stored.expire(now_s)
        if self._tree is None:
            return
        self._tree.now_s = now_s
        if self._tree.retained.ends:
            self._tree.expire(now_s)
        if self.pins and min(pin.until_s for pin in self.pins) <= now_s:
            over = [pin for pin in self.pins if pin.until_s <= now_s]
            self._set([pin for pin in self.pins if pin.until_s > now_s], over)
        if self._demoted:
            self._demoted = self._room.evict(MOVED_PER_STEP, demoted=True) > 0

    def asked_by(self, request: Request) -> None:
        """The cache's next entries are of this request: what the eviction policy and `shares` need to know of it."""
        if self._eviction is not None:
            self._eviction.request_priority = request.priority
        if self._tree is None:
            return
        name = self._tree.tenant = request.keeper or request.tenant
        if not request.kv_share:
            return
        owner = self._tree.owners.get(name)
        if owner is None:
            owner = self._tree.owners[name] = Owner(name)
        owner.share = request.kv_share
        self._tree.owner = owner

    def leave(self, seq: Seq) -> None:
        """`seq` lets go of its entry. Mutates: seq.node, the cache."""
        if seq.request.hints:
            self._heed(seq)
        self._leaving.leave(seq.node)

    def _heed(self, seq: Seq) -> None:
        cursor: PrefixCursor = seq.node
        if self._tree is None or not cursor.holding or cursor.generation != self._leaving.generation:
            return
        for hint in seq.request.hints:
            blocks = cursor.num_blocks
            if hint.num_tokens != WHOLE:
                blocks = min(blocks, hint.num_tokens // self._block_size)
            if hint.action == "demote":
                self._keep_outside(seq, blocks, cursor.num_blocks, 0.0)
                if blocks and cursor.entry.end > blocks:
                    self._tree.at(cursor.entry, blocks)  # cut there
                self._demote(_way(cursor.entry), blocks, moves=self.moves)
                self.counts["demote"] += 1
            elif blocks and hint.action in ("retain", "pin"):
                self._keep_outside(seq, 0, blocks, hint.ttl_s)
                self._keep(hint, seq.request, self._tree.at(cursor.entry, blocks))

    def demote(self, seq: Seq) -> None:
        """All blocks that `seq` stands on go before others, unless somebody finds them first."""
        cursor: PrefixCursor = seq.node
        if self._tree is not None and cursor.holding and cursor.generation == self._leaving.generation:
            self._demote(_way(cursor.entry), 0, moves=False)

    def evict(self, tenant: str | None, unused_s: float) -> None:
        """An order: blocks that nobody uses, and nobody has for so long, leave the device and the tier below."""
        if self._tree is not None:
            num = self._tree.demote_all(tenant, self.now_s - unused_s)
            self._room.evict(num, demoted=True)
            self._tree.drop_copies(num, demoted=True)

    def admitted(self, seq: Seq) -> None:
        """For the first time, with what was found of it."""
        if self._tree is not None:
            self._tree.insight.admitted(seq)

    def give_way(self) -> bool:
        """Nobody can run: the pin that would end first is dropped, or `others` give way. False: nobody does."""
        if self.others is not None and self.others():
            return True
        if not self.pins or self._tree is None:
            return False
        first = min(self.pins, key=lambda pin: pin.until_s)
        self._set([pin for pin in self.pins if pin is not first], [first])
        self.counts["gave_way"] += 1
        return True

    def reset(self) -> None:
        """The cache was emptied."""
        self.pins.clear()
        self.num_pinned = 0
        self._demoted = False
        self._leaving.reset()

    def _keep_outside(self, seq: Seq, first: int, end: int, ttl_s: float) -> None:
        if self._stored is not None and end > first:
            share = self._pin_share * (seq.request.kv_share or 1.0)
            self._stored.keep(seq, first, end, self.now_s + ttl_s, self.now_s, share)

    # -- inside --------------------------------------------------------------------------------------------------

    def _keep(self, hint: KVHint, request: Request, entry: PrefixNode) -> None:
        assert self._tree is not None
        until_s = self.now_s + hint.ttl_s
        for node in _way(entry):
            self._tree.retained.retain(node, until_s)
        if hint.action == "pin" and not self._pin(request, entry, until_s):
            self.counts["refused_pin"] += 1
            return
        self.counts[hint.action] += 1

    def _pin(self, request: Request, entry: PrefixNode, until_s: float) -> bool:
        """False, and nothing changed: more than the share. A pin of the same tenant on the way to `entry` that ends
        sooner is not needed any more."""
        assert self._tree is not None
        way, tenant = set(_way(entry)), request.tenant
        if any(pin.entry is entry and pin.tenant == tenant and pin.until_s >= until_s for pin in self.pins):
            return True
        gone = [p for p in self.pins if p.tenant == tenant and p.until_s <= until_s and p.entry in way]
        kept = [pin for pin in self.pins if pin not in gone]
        made = [*kept, Pin(until_s, tenant, entry)]
        most = self.most_pinned
        own = num_held(pin.entry for pin in made if pin.tenant == tenant)
        if own > most * (request.kv_share or 1.0) or num_held(p.entry for p in made) > most or len(made) > MAX_PINS:
            return False
        self._tree.share(entry)
        self._set(made, gone)
        return True

    @property
    def most_pinned(self) -> int:
        """Blocks that pins may hold."""
        return 0 if self._pool is None else int((self._pool.num_slabs - self._pool.num_kept_back) * self._pin_share)

    def _set(self, pins: list[Pin], gone: list[Pin]) -> None:
        assert self._tree is not None
        self.pins = pins
        for pin in gone:
            self._tree.release(pin.entry)
        self.num_pinned = num_held(pin.entry for pin in pins)

    def _demote(self, nodes: Iterable[PrefixNode], first: int, *, moves: bool) -> None:
        """Those behind the first `first` blocks go before all others, unless somebody finds them first."""
        assert self._tree is not None
        for node in takewhile(lambda node: node.start >= first, nodes):
            self._tree.retained.demote(node)
            self._tree.ranked(node)
        self._demoted |= moves

    # -- conversations that wait for a tool ----------------------------------------------------------------------

    def find(self, namespace: bytes, tokens: list[int]) -> PrefixNode | None:
        """Where the blocks of a text end on the device that nobody stands on. None: there are none."""
        if self._tree is None:
            return None
        node = self._tree.reach(digest(namespace, b""), array("i", tokens).tobytes())
        return None if node is None or node.parent is None or node.locks else node

    def num_alone(self, entry: PrefixNode) -> int:
        """Blocks up to the end of `entry` from which no other text goes on."""
        return sum(node.end - node.start for node in _alone(entry))

    def wait(self, entry: PrefixNode, kept_s: float | None, *, moves: bool) -> None:
        """Those blocks are retained for so long; None: they go first, and (`moves`) at once to the tier below."""
        assert self._tree is not None
        if kept_s is None:
            self._demote(_alone(entry), 0, moves=moves)
        else:
            for node in _way(entry):
                self._tree.retained.retain(node, self.now_s + kept_s)
                self._tree.ranked(node)


def _alone(entry: PrefixNode) -> Iterator[PrefixNode]:
    """`entry`, and the nodes before it that nothing else follows."""
    for node in _way(entry):
        if node.locks or len(node.children) > (node is not entry):
            break
        yield node


def _way(entry: PrefixNode) -> Iterator[PrefixNode]:
    """`entry`, and the nodes before it; no root."""
    node = entry
    while node.parent is not None:
        yield node
        node = node.parent


def num_held(entries: Iterable[PrefixNode]) -> int:
    """Blocks up to the ends of `entries`, each counted once."""
    nodes: set[PrefixNode] = set()
    for entry in entries:
        for node in _way(entry):
            if node in nodes:
                break
            nodes.add(node)
    return sum(node.end - node.start for node in nodes)
