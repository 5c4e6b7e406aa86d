"""Which blocks a store outside this process holds: a folder, or a server of blocks. Names only, no bytes.

A block is named by a keyed hash of its tokens and of the name of the block before it, so a name stands for all of the
text up to its end: whoever has the same text finds the same names, whichever process wrote them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.base.hashing import digest
from penstock.core.page_ops import STATE
from penstock.kv.eviction.leading import order_of
from penstock.kv.prefix.insight import Ages

NAME_BYTES = 16
NO_LIMIT = 1 << 62
"""Of what somebody else bounds, in bytes."""


class FoundBlock(NamedTuple):
    """A block that a look at the store found. `path`: its place there. `tick`: orders by last use, oldest first."""

    path: str
    num_bytes: int
    tick: int


def root_name(secret: bytes, fingerprint: str, namespace: bytes) -> bytes:
    """What the first block of a text follows. `fingerprint`: of all that decides what keys and values are."""
    return digest(b"root", fingerprint.encode(), namespace, key=secret, size=NAME_BYTES)


def names_after(secret: bytes, name: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
    """Names of the blocks of `tokens` that follow the block `name`, one for each whole `block_bytes`."""
    out = []
    for at in range(0, len(tokens) - block_bytes + 1, block_bytes):
        name = digest(name, tokens[at : at + block_bytes], key=secret, size=NAME_BYTES)
        out.append(name)
    return out


def hash_of(name: bytes) -> int:
    """The name of a block as routers get it: its last 64 bits, as vLLM does."""
    return int.from_bytes(name[-8:], "big")


class _Entry:
    __slots__ = ("depth", "num_bytes", "tick", "used_s")

    def __init__(self, num_bytes: int, tick: int, depth: int, used_s: float | None = None) -> None:
        self.used_s = used_s  # None: not by this process
        self.num_bytes, self.tick, self.depth = num_bytes, tick, depth


_Queued = tuple[bool, tuple[float, int], str, int]
"""Whether it is pinned, its place in the order, its path, and when it was used."""


class StoreIndex:
    """What is there, what is on its way, and what goes when room is short: used longest ago, in `order`.

    The methods are those of a manager of offloaded blocks in vLLM: lookup, prepare and complete a load or a store,
    touch, and what has changed since (`take_changes`).

    Args:
        limit_bytes: what all blocks together may take.
        order: a name in STORE_ORDERS.
        evicts: whether this process may make room (`StoredBlocks.evicts`). Without, nothing enters a full store.
    """

    def __init__(self, limit_bytes: int, *, order: str = "lru", evicts: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.order = order
        self.evicts = evicts
        self.num_bytes = 0
        self.num_evicted = 0
        self.now_s: float | None = None
        """As `expire` was told last."""
        self.found_ages, self.left_ages = Ages(), Ages()
        """For how long blocks that this process had used were unused when they were used again, and when they left."""
        self.version = 0
        """Changes whenever something is forgotten."""
        self._entries: dict[str, _Entry] = {}
        self._coming: dict[str, _Entry] = {}
        self._told: set[str] = set()  # of those on their way, which a look found
        self._holds: dict[str, int] = {}  # loads by path: what they read may be forgotten, and known anew, meanwhile
        self.tick = 0
        """Of the last use of anything."""
        self._queues: dict[str, list[_Queued]] = {}
        self._shares: dict[str, float] = {}
        self._bytes: Counter[str] = Counter()
        self._pins: tuple[str, ...] = ()
        self._kept: dict[str, float] = {}  # until when; of what is there, or on its way
        self._first_end_s = float("inf")
        self.keeps_changes = False
        """Somebody asks for them again and again."""
        self._changes: list[tuple[str, bool]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, path: str) -> bool:
        return path in self._entries

    def wants(self, path: str) -> bool:
        """Whether a block is neither there nor on its way."""
        return path not in self._entries and path not in self._coming

    def size_of(self, path: str) -> int:
        """Bytes of a block that is there."""
        return self._entries[path].num_bytes

    def oldest_first(self) -> list[str]:
        """All that is there, by last use; of one text the end first."""
        return sorted(self._entries, key=lambda path: (self._entries[path].tick, -self._entries[path].depth))

    def share(self, space: str, share: float) -> None:
        """A tenant's part of the store, compared with others' only. From the first one on, whoever has most for its
        part makes room (as `prefix.shares`); of whom nothing is known has 1."""
        if self._shares.get(space) != share:
            sole, self._shares[space] = not self._shares, share
            if sole:
                self._queue_all()

    def pin(self, pins: Iterable[str]) -> None:
        """Blocks whose paths begin so leave after all others, until the next call."""
        self._pins = tuple(pins)
        self._queue_all()

    def keep(self, paths: Sequence[str], until_s: float, most_bytes: float = NO_LIMIT) -> list[str]:
        """Those of `paths` that are there, or on their way, leave after all others until then (`expire`), the first
        ones, as far as what is kept fits into `most_bytes`. Returns which are kept for longer than before."""
        there = {path: entry for path in self._kept if (entry := self._entry(path)) is not None}
        room, out = most_bytes - sum(entry.num_bytes for entry in there.values()), []
        for path in paths:
            entry = self._entry(path)
            if entry is None or self._kept.get(path, 0.0) >= until_s:
                continue
            room -= 0 if path in self._kept else entry.num_bytes
            if room < 0:
                break
            self._kept[path] = until_s
            self._first_end_s = min(self._first_end_s, until_s)
            if path in self._entries:
                self._push(path, entry)
            out.append(path)
        return out

    def demote(self, paths: Sequence[str]) -> list[str]:
        """They leave before all others, until they are used again. Returns those that are there, or on their way."""
        there = [path for path in paths if self._entry(path) is not None]
        for path in there:
            self._kept.pop(path, None)
            if path in self._coming:
                self._coming[path].tick = 0
            else:
                self._entries[path].tick = 0
                self._push(path, self._entries[path])
        return there

    def expire(self, now_s: float) -> None:
        """What was kept until now is like any other."""
        self.now_s = now_s
        if now_s < self._first_end_s:
            return
        for path in [path for path, until_s in self._kept.items() if until_s <= now_s]:
            del self._kept[path]
            if path in self._entries:
                self._push(path, self._entries[path])
        self._first_end_s = min(self._kept.values(), default=float("inf"))

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def _entry(self, path: str) -> _Entry | None:
        return self._entries.get(path) or self._coming.get(path)

    # -- what is there -------------------------------------------------------------------------------------------

    def found(self, blocks: Iterable[FoundBlock], gone: Iterable[str] = ()) -> None:
        """A look at the store: what others brought, and what they took away."""
        for path in gone:
            self._forget(path)
            self._told.discard(path)
        for block in sorted(blocks, key=lambda b: b.tick):
            known = self._entries.get(block.path) or self._coming.get(block.path)
            if known is not None:  # our own: a codec made less of it than was thought
                self._count(block.path, block.num_bytes - known.num_bytes)
                known.num_bytes = block.num_bytes
                if block.path in self._coming:
                    self._told.add(block.path)
            else:
                self.tick += 1
                self._enter(block.path, _Entry(block.num_bytes, self.tick, depth_of(block.path)))

    def lookup(self, paths: Sequence[str]) -> int:
        """How many of the first of these are there, without a gap."""
        entries = self._entries
        return next((n for n, path in enumerate(paths) if path not in entries), len(paths))

    def num_bytes_of(self, path: str) -> int:
        """What it takes there, as far as is known; 0 if it is not there."""
        entry = self._entries.get(path)
        return 0 if entry is None else entry.num_bytes

    def touch(self, paths: Iterable[str], tick: int) -> None:
        """They are of use now."""
        for path in paths:
            entry = self._entries.get(path)
            if entry is not None and entry.tick != tick:
                self._observe(self.found_ages, entry)
                entry.tick, entry.used_s = tick, self.now_s
                self._push(path, entry)

    # -- moves ---------------------------------------------------------------------------------------------------

    def prepare_load(self, paths: Iterable[str]) -> None:
        """Until `complete_load` they stay."""
        for path in paths:
            assert path in self._entries, f"{path} is to be read, and is not there"
            self._holds[path] = self._holds.get(path, 0) + 1

    def complete_load(self, paths: Iterable[str], *, good: bool) -> None:
        """What could not be read is forgotten at once, whoever else reads it: it may be stored anew, and nobody who
        comes after this waits for it."""
        for path in paths:
            self._holds[path] -= 1
            if not self._holds[path]:
                del self._holds[path]
            entry = self._entries.get(path)
            if entry is None:
                continue
            if not good:
                self._forget(path)
            elif path not in self._holds:
                self._push(path, entry)

    def prepare_store(self, path: str, num_bytes: int, tick: int) -> tuple[bool, list[str]]:
        """Room for a block: whether it shall be stored, and the paths that have to go for it, forgotten by now.

        Not if it is there, or on its way, or no room can be made.
        """
        gone: list[str] = []
        if not self.wants(path) or num_bytes > self.limit_bytes:
            return False, gone
        while self.num_bytes + num_bytes > self.limit_bytes:
            victim = self._victim() if self.evicts else None
            if victim is None:
                return False, gone
            gone.append(victim)
            self._observe(self.left_ages, self._entries[victim])
            self._forget(victim)
            self.num_evicted += 1
        self._coming[path] = _Entry(num_bytes, tick, depth_of(path), self.now_s)
        self._count(path, num_bytes)
        return True, gone

    def complete_store(self, path: str, *, good: bool) -> None:
        entry = self._coming.pop(path, None)
        if entry is None:
            return
        self._count(path, -entry.num_bytes)
        if not good:
            self._kept.pop(path, None)
        told = path in self._told
        self._told.discard(path)
        if (good or told) and path not in self._entries:  # what a look has found is there, whatever became of ours
            self._enter(path, entry)

    def take_changes(self) -> list[tuple[str, bool]]:
        """(path, whether it came or went) since this was last asked, in order, if `keeps_changes`."""
        changes, self._changes = self._changes, []
        return changes

    # -- inside --------------------------------------------------------------------------------------------------

    def _enter(self, path: str, entry: _Entry) -> None:
        self._entries[path] = entry
        self._count(path, entry.num_bytes)
        if self.keeps_changes:
            self._changes.append((path, True))
        self._push(path, entry)

    def _count(self, path: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes[space_in(path)] += num_bytes

    def _push(self, path: str, entry: _Entry) -> None:
        queue = self._queues.setdefault(space_in(path) if self._shares else "", [])
        heapq.heappush(queue, self._queued(path, entry))
        if len(queue) > 64 + 4 * len(self._entries):
            self._queue_all()

    def _queued(self, path: str, entry: _Entry) -> _Queued:
        return self._stays(path), order_of(self.order, entry.tick, entry.depth), path, entry.tick

    def _stays(self, path: str) -> bool:
        return path in self._kept or (bool(self._pins) and path.startswith(self._pins))

    def _queue_all(self) -> None:
        self._queues = {}
        for path, entry in self._entries.items():
            self._queues.setdefault(space_in(path) if self._shares else "", []).append(self._queued(path, entry))
        for queue in self._queues.values():
            heapq.heapify(queue)

    def _victim(self) -> str | None:
        spaces = sorted(self._queues, key=lambda s: -self._bytes[s] / self._shares.get(s, 1.0))
        for stays in (False, True):  # who has most gives up what stays after all others have given what does not
            for space in spaces:
                queue = self._queues[space]
                while queue and queue[0][0] <= stays:
                    *_, path, tick = queued = heapq.heappop(queue)
                    entry = self._entries.get(path)
                    if entry is None or entry.tick != tick or path in self._holds:
                        continue
                    if self._stays(path) == queued[0]:
                        return path
        return None

    def _observe(self, ages: Ages, entry: _Entry) -> None:
        if self.now_s is not None and entry.used_s is not None:
            ages.observe(self.now_s - entry.used_s, 1)

    def _forget(self, path: str) -> None:
        entry = self._entries.pop(path, None)
        if entry is not None:
            self._count(path, -entry.num_bytes)
            self.version += 1
            self._kept.pop(path, None)
            if self.keeps_changes:
                self._changes.append((path, False))

    def check_invariants(self) -> None:
        """Raises AssertionError unless bytes are counted and whatever may go can be found."""
        every = [*self._entries.values(), *self._coming.values()]
        assert self.num_bytes == sum(e.num_bytes for e in every), "bytes of the store are miscounted"
        assert all(num > 0 for num in self._holds.values()), "a block was let go more often than held"
        queued = {(path, tick, stays) for queue in self._queues.values() for stays, _, path, tick in queue}
        assert all(self._entry(path) is not None for path in self._kept), "what is not there is kept"
        assert sum(self._bytes.values()) == self.num_bytes, "tenants' are miscounted"
        for path, entry in self._entries.items():
            assert path in self._holds or (path, entry.tick, self._stays(path)) in queued, (
                f"{path} would never be evicted"
            )


def space_in(path: str) -> str:
    """Whose block it is: `MODEL/SPACE/NAME`."""
    parts = path.split("/", 2)
    return parts[1] if len(parts) == 3 else ""


def depth_of(path: str) -> int:
    """Which block of its text it is, by the end of its name; 0 if that says nothing."""
    try:
        return int(path.rpartition("-")[2].removesuffix(STATE), 16)
    except ValueError:
        return 0
