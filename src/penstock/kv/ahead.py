"""Blocks that were read from tiers into host memory, before whoever needs them is admitted. Names only, no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.core.page_ops import FetchOp
from penstock.kv.named_tier import NamedTier
from penstock.kv.outbox import Outbox


class BlocksAhead:
    """What is wanted is held in its tier until it is not.

    Attributes:
        limit_bytes: that all may take, those on their way included.
        there: paths of blocks that have come.
        num_fetched: blocks that have, since start.
    """

    def __init__(self, limit_bytes: int, outbox: Outbox, next_move: Callable[[], int]) -> None:
        self.limit_bytes = limit_bytes
        self.there: set[str] = set()
        self.num_fetched = 0
        self._outbox, self._next_move = outbox, next_move
        self._wanted: dict[str, tuple[NamedTier, int, int]] = {}  # with the move that brings it
        self._moves: dict[int, str] = {}

    def want(self, blocks: Iterable[tuple[str, NamedTier, int]]) -> None:
        """These (path, tier, bytes), the most urgent first, as far as there is room, and no others."""
        room, wanted = self.limit_bytes, dict[str, tuple[NamedTier, int]]()
        for path, tier, num_bytes in blocks:
            if path not in wanted and num_bytes <= room:
                room -= num_bytes
                wanted[path] = tier, num_bytes
        for path in [path for path in self._wanted if path not in wanted]:
            self._drop(path, good=True)
        for path, (tier, num_bytes) in wanted.items():
            if path not in self._wanted:
                move = self._next_move()
                self._wanted[path], self._moves[move] = (tier, num_bytes, move), path
                tier.prepare_load((path,))
                self._outbox.add(FetchOp(path, move, tier.number))

    def _drop(self, path: str, *, good: bool) -> None:
        tier, _, _ = self._wanted.pop(path)
        self.there.discard(path)
        self._outbox.add(FetchOp(path, -1, tier.number))
        tier.complete_load((path,), good=good)

    def ended(self, move: int, *, good: bool) -> None:
        """A step has reported this; it may be another's, or of what is not wanted any more."""
        path = self._moves.pop(move, "")
        if path not in self._wanted or self._wanted[path][2] != move:
            return
        if good:
            self.there.add(path)
            self.num_fetched += 1
        else:
            self._drop(path, good=False)

    def where(self, path: str) -> NamedTier | None:
        """The tier from which a block was read that has come, if it is there still."""
        found = self._wanted.get(path) if path in self.there else None
        return found[0] if found is not None and path in found[0].index else None

    def check_invariants(self) -> None:
        """AssertionError unless all is bounded, and wanted."""
        num_bytes = sum(num for _, num, _ in self._wanted.values())
        assert num_bytes <= self.limit_bytes, f"{num_bytes} bytes are read ahead, and {self.limit_bytes} may be"
        assert self.there <= self._wanted.keys(), "something is kept that nobody wants"
