"""Entries of the prefix cache that nobody stands on any more, but that something still writes to, or looks at."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from penstock.core.adapter import AdapterRef
from penstock.core.protocols import PrefixCache
from penstock.core.sequence import Sequence
from penstock.kv.cursor import PrefixCursor
from penstock.kv.room import Room
from penstock.kv.swap import Swaps

MAX_IDLE_BLOCKS = 1 << 16
"""Blocks that the prefix cache may keep of models without full groups: no slab of theirs would ever run out."""


class LeftAdapters(Protocol):
    """Adapters as far as sequences come and go: see `kv.adapter_pages.AdapterPages`."""

    @property
    def leaving(self) -> bool: ...

    def with_one_more(self, seq: Sequence, need: int, room: int) -> tuple[int, int]: ...

    def enter(self, ref: AdapterRef | None) -> None: ...

    def leave(self, ref: AdapterRef | None) -> None: ...

    def retired(self, step: int) -> None: ...


class Leaving:
    """`bounded`: the cache is to be kept below MAX_IDLE_BLOCKS.

    Attributes:
        submitted, retired: the last step that was handed to the executor, and the last that is done.
        generation: number of the cache's last reset; entries of before are void.
    """

    def __init__(self, cache: PrefixCache, room: Room, swaps: Swaps, *, bounded: bool) -> None:
        self.submitted = self.retired = -1
        self.generation = 0
        self._cache, self._room, self._swaps = cache, room, swaps
        self._bounded = bounded
        self._seen: deque[tuple[int, Any]] = deque()  # by steps in flight that saw it
        self._read: dict[int, Any] = {}  # by a load that writes to its blocks

        self.adapters: LeftAdapters | None = None

    def __bool__(self) -> bool:
        """Whether something is given up when a step in flight retires."""
        return bool(self._seen) or (self.adapters is not None and self.adapters.leaving)

    def with_one_more(self, seq: Sequence, need: int, room: int) -> tuple[int, int]:
        """Blocks that it needs, and that can be given up for it, its adapter counted."""
        return (need, room) if self.adapters is None else self.adapters.with_one_more(seq, need, room)

    def enter(self, seq: Sequence) -> None:
        """It has memory, and with it its adapter has a user. Mutates: the adapters."""
        if self.adapters is not None:
            self.adapters.enter(seq.request.rules.adapter)

    def gone(self, seq: Sequence) -> None:
        """It is about to lose what memory it has. Mutates: the adapters."""
        if self.adapters is not None and seq.tables:
            self.adapters.leave(seq.request.rules.adapter)

    def leave(self, cursor: PrefixCursor) -> None:
        """Stop standing on the cursor's entry; only when steps in flight, and what reads to it, have ended."""
        if cursor.holding and cursor.generation == self.generation:
            if cursor.reading in self._swaps.loads:
                self._read[cursor.reading] = cursor.entry
            else:
                self._leave(cursor.entry)
        cursor.holding = False

    def ended(self, move: int) -> None:
        """A load has ended."""
        if move in self._read:
            self._leave(self._read.pop(move))

    def retire(self, step: int) -> None:
        """A step is done."""
        self.retired = max(self.retired, step)
        while self._seen and self._seen[0][0] <= step:
            self._release(self._seen.popleft()[1])
        if self.adapters is not None:
            self.adapters.retired(step)

    def reset(self) -> None:
        """The cache was emptied."""
        self._seen.clear()
        self._read.clear()
        self.generation += 1

    def entries(self) -> list[Any]:
        """Those that are still held."""
        return [*(entry for _, entry in self._seen), *self._read.values()]

    def _leave(self, entry: Any) -> None:
        if self.submitted > self.retired:
            self._seen.append((self.submitted, entry))
        else:
            self._release(entry)

    def _release(self, entry: Any) -> None:
        self._cache.release(entry)
        if self._bounded and self._cache.num_evictable > MAX_IDLE_BLOCKS:
            self._room.evict(self._cache.num_evictable - MAX_IDLE_BLOCKS)
