"""A tier whose blocks have names that say what they hold: a folder, or a server of blocks. Integers and names only.

What it decides leaves as orders in the list of page operations; what became of them comes back by number
(`StepOutput.moves`). Names of the calls: vLLM's manager of offloaded blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.core.page_ops import DISK, TIER_NAMES, DropOp, GetOp, KeepOp, PutOp
from penstock.kv.outbox import Outbox
from penstock.kv.store_index import StoreIndex


class NamedTier:
    """A `BlockTier`.

    Args:
        number: of the tier (`page_ops`).
        next_move: a number that no other move has.
        order: see `StoreIndex`.

    Attributes:
        index: what is there.
        waiting: orders to store that wait in the outbox for a step to carry them.
        num_stored, num_loaded: blocks (and states) that were written, and that were read, since start.
        num_refused: those that found no room, or could not be written.
        num_lost: those that could not be read.
        written_bytes, read_bytes: of those that were.
    """

    late = True

    def __init__(
        self, number: int, limit_bytes: int, outbox: Outbox, next_move: Callable[[], int], order: str = "lru"
    ) -> None:
        self.number, self.name = number, TIER_NAMES[number]
        self.index = StoreIndex(limit_bytes, order=order)
        self.waiting = 0
        self.num_stored = self.num_loaded = self.num_refused = self.num_lost = 0
        self.written_bytes = self.read_bytes = 0
        self._outbox = outbox
        self._next_move = next_move
        self._puts: dict[int, tuple[str, int]] = {}
        self._gets: dict[int, tuple[str, int]] = {}

    @property
    def queued_bytes(self) -> int:
        """Bytes that are being read."""
        return sum(num_bytes for _, num_bytes in self._gets.values())

    @property
    def writing(self) -> Iterable[int]:
        """Moves of what is to be written, and of which nothing has been reported."""
        return self._puts.keys()

    def lookup(self, keys: Sequence[str]) -> int:
        """How many of the first of these are there, without a gap."""
        return self.index.lookup(keys)

    def touch(self, keys: Sequence[str], tick: int) -> None:
        """They are of use now: later than all that was used at an earlier `tick`."""
        self.index.touch(keys, tick)

    def prepare_store(self, path: str, pages: tuple[int, ...], num_bytes: int, tick: int) -> None:
        """Plan to copy a block, if there is room, or can be made; `pages` as in `PutOp`."""
        wanted, gone = self.index.prepare_store(path, num_bytes, tick)
        if gone:
            self._outbox.add(DropOp(tuple(gone), self.number))
        if not wanted:
            self.num_refused += 1
            return
        move = self._next_move()
        self._puts[move] = path, num_bytes
        self._outbox.add(PutOp(path, pages, move, self.number))
        self.waiting += 1

    def complete_store(self, path: str, num_bytes: int, *, good: bool) -> None:
        self.index.complete_store(path, good=good)
        self.num_stored += good
        self.num_refused += not good
        self.written_bytes += num_bytes * good

    def prepare_load(self, keys: Sequence[str]) -> None:
        self.index.prepare_load(keys)

    def load(self, path: str, pages: tuple[int, ...], num_bytes: int, move: int) -> int:
        """Plan to bring a block back, as a part of load `move`. Returns a number of its own; pages as in `GetOp`."""
        block = self._next_move()
        self._gets[block] = path, num_bytes
        self._outbox.add(GetOp(path, pages, move, block, self.number))
        return block

    def complete_load(self, keys: Sequence[str], *, good: bool = True) -> None:
        """What could not be read leaves the tier."""
        self.index.complete_load(keys, good=good)
        if not good:
            self.num_lost += len(keys)
            self.evict(keys)

    def keep(self, paths: Sequence[str], until_s: float, now_s: float, most_bytes: float) -> int:
        """They leave after all others until then, as long as what is kept so has room in `most_bytes`; before all
        others, if then is now. Returns how many do. Servers of blocks decide by themselves."""
        if self.number != DISK:
            return 0
        kept = self.index.keep(paths, until_s, most_bytes) if until_s > now_s else self.index.demote(paths)
        if kept:
            self._outbox.add(KeepOp(tuple(kept), until_s - now_s, self.number))
            self.waiting += 1
        return len(kept)

    def evict(self, keys: Sequence[str]) -> None:
        self.index.found([], keys)
        self._outbox.add(DropOp(tuple(keys), self.number))

    def ended(self, move: int, *, good: bool) -> None:
        """A step has reported this; it may be another's."""
        if (put := self._puts.pop(move, None)) is not None:
            self.complete_store(*put, good=good)
        elif (get := self._gets.pop(move, None)) is not None:
            path, num_bytes = get
            self.num_loaded += good
            self.read_bytes += (self.index.num_bytes_of(path) or num_bytes) * good
            self.complete_load((path,), good=good)
