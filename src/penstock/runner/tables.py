"""One row's block table in one cache group: a growable array that can turn from shared to ragged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.batch import GONE
from penstock.ops.plan import I32


class RowTable:
    """Ids of a row's blocks.

    Shapes: shared [1, M], ids are slabs; ragged [num_layers, M], ids are pages. A group of one layer has no difference
    between the two (slab = page), so its table always has one line. With lanes a line is one of them: `num_layers` is
    the number of pages in a slab.

    `dropped`: None, or int32 [num_layers]: tokens that each line has forgotten (`ops.plan.GroupPlan`); `low`: pages of
    each that are at half the bits.

    Entries from before a rollback stay behind the end of the sequence; nobody reads them, because a plan sees only the
    blocks that the tokens need. With `window` blocks may be GONE.
    """

    __slots__ = ("_ids", "_least", "_lengths", "_unmoved", "_view", "dropped", "low", "num_layers", "num_slabs")

    def __init__(self, num_layers: int, num_slabs: int, *, window: bool = False) -> None:
        self.num_layers = num_layers
        self.num_slabs = num_slabs
        self._least = GONE if window else 0
        self._ids: I32 = np.zeros((1, 8), np.int32)
        self._view: I32 = self._ids[:, :0]
        self._lengths = [0]
        self._unmoved: set[int] = set()
        self.dropped: I32 | None = None
        self.low: I32 | None = None

    @property
    def ragged(self) -> bool:
        return len(self._ids) > 1

    @property
    def num_blocks(self) -> int:
        """Blocks that every line has; where lines have dropped tokens, those of the longest."""
        return min(self._lengths) if self.dropped is None else max(self._lengths)

    def line_blocks(self, line: int) -> int:
        """Blocks that one line has."""
        return self._lengths[line if self.ragged else 0]

    def slots(self, num_tokens: int) -> int:
        """Slots of the longest line once the sequence has so many tokens."""
        return num_tokens if self.dropped is None else num_tokens - int(self.dropped.min())

    def update(self, start: int, ids: Sequence[int], layer: int, dropped: int = -1) -> None:
        """Blocks start, start+1, ... are now `ids`: slabs (`layer` < 0) or pages of one layer. Mutates: self.

        `dropped` >= 0: these are all blocks of the line (of a shared table: of all); it has forgotten so many tokens.

        The first ragged update of a layer replaces everything from `start` on; below it the shared blocks stay, now
        named by their pages. Ids that are not in the pool, or that would leave a hole, are our own bug
        (AssertionError).
        """
        assert layer < self.num_layers, f"layer {layer} of a group of {self.num_layers}"
        pool = self.num_slabs if layer < 0 else self.num_slabs * self.num_layers
        assert not ids or self._least <= min(ids) <= max(ids) < pool, (
            f"ids {list(ids)} are not all among the {pool} of the pool"
        )
        if layer < 0 or self.num_layers == 1:
            assert not self.ragged, "a ragged table cannot become shared again"
            line = 0
        else:
            if not self.ragged:
                self._spread()
            line = layer
            if line in self._unmoved:
                assert start <= self._lengths[line], f"hole before block {start}"
                self._unmoved.discard(line)
                self._lengths[line] = start
        if dropped >= 0:
            assert start == 0, "what begins anew begins with its first block"
            gone = np.zeros(self.num_layers, np.int32) if self.dropped is None else self.dropped.copy()
            gone[slice(None) if layer < 0 else layer] = dropped
            self.dropped = gone  # a plan in use keeps the old ones
            self._lengths[line] = 0
        length = self._lengths[line]
        end = start + len(ids)
        assert 0 <= start <= length, f"blocks {start}... would leave a hole after block {length}"
        self._reserve(end)
        self._ids[line, start:end] = ids
        self._lengths[line] = max(length, end)

    def settle(self) -> None:
        """After a step's updates: a table that became ragged has been given every layer (else AssertionError)."""
        assert not self._unmoved, f"layers {sorted(self._unmoved)} got no ragged ids"

    def view(self, num_blocks: int) -> I32:
        """The first `num_blocks` blocks, [1, M] or [num_layers, M], without a copy: later updates show through.

        The same object as long as it is the same memory, so that whoever looked it up need not do so again.
        """
        view = self._view
        if view.shape[1] != num_blocks or view.base is not self._ids:
            assert num_blocks <= self.num_blocks, f"{num_blocks} blocks wanted, {self.num_blocks} in the table"
            view = self._view = self._ids[:, :num_blocks]
        return view

    def pages(self, first: int, last: int) -> I32:
        """Page ids of blocks [first, last) in all layers, flat; negative for those that are GONE."""
        ids = self._ids[:, first:last]
        if not self.ragged:
            ids = ids * np.int32(self.num_layers) + np.arange(self.num_layers, dtype=np.int32)[:, None]
        return ids.ravel()

    def pages_of(self, line: int, first: int, last: int) -> I32:
        """Page ids of blocks [first, last) of one line."""
        if self.ragged:
            return self._ids[line, first:last].copy()
        ids: I32 = self._ids[0, first:last] * np.int32(self.num_layers) + np.int32(line)
        return ids

    def _spread(self) -> None:
        layers = np.arange(self.num_layers, dtype=np.int32)[:, None]
        self._ids = self._ids * np.int32(self.num_layers) + layers
        self._lengths = self._lengths * self.num_layers
        self._unmoved = set(range(self.num_layers))

    def _reserve(self, num_blocks: int) -> None:
        lines, capacity = self._ids.shape
        if num_blocks > capacity:
            grown = np.zeros((lines, max(num_blocks, 2 * capacity)), np.int32)
            grown[:, :capacity] = self._ids
            self._ids = grown
