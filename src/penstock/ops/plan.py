"""What every op of one step may look at: planned once per step, read once per layer.

Shape letters: T tokens, B sequences, R logit rows, S block size, M blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.ops.tree import U64, check_mask

I32 = npt.NDArray[np.int32]
_NONE: I32 = np.zeros(0, np.int32)
Planes = dict[str, npt.NDArray[Any]]
"""Plane name -> storage of one cache group: paged [num_pages, S, heads, dim]; slot [num_pages, heads, dim]."""


@dataclass(frozen=True)
class GroupPlan:
    """Where the sequences of a step keep one cache group.

    A *line* is what has pages of its own: lane j of the group's i-th layer is line i * lanes + j, and there are
    `num_layers` of them (without lanes: as many as layers). `tables[b]` has shape [1, M] for a shared table (ids are
    slabs: line i reads page id * num_layers + i) or [num_layers, M] for a ragged one (ids are that line's pages).
    Blocks that lie wholly before the window of the sequence's first token may be gone: their ids, and so their pages,
    are negative and must not be looked up.

    `dropped[b]` is None, or [num_layers]: how many tokens before this step each line has forgotten. The
    token at position p is in *slot* p - dropped of the line, and sees slots 0 ... p - dropped: what is kept stands
    together, in order, with the keys as they were rotated when they came. None for all: `dropped` is None.

    `low[b]` is None, or [num_layers]: how many of a line's first pages have two tokens in each slot, at half the bits
    (`ops.ref.codecs.halves`). They are as many slots as any page, and `dropped` counts slots.

    `held[b]`, where blocks lie on one of several ranks each: int32 [M + 1], how many of the first blocks are here.
    `tables[b]` then begins with those that are, in order, and means nothing behind them. None: all are here.
    """

    num_layers: int
    block_size: int
    tables: tuple[I32, ...]
    lanes: int = 1
    dropped: tuple[I32 | None, ...] | None = None
    low: tuple[I32 | None, ...] | None = None
    held: tuple[I32, ...] | None = None

    def pages(self, b: int, layer: int, lane: int = 0) -> I32:
        """Pages [M] of sequence `b` for a lane of the `layer`-th layer of the group."""
        table, line = self.tables[b], layer * self.lanes + lane
        pages: I32 = table[0] * np.int32(self.num_layers) + np.int32(line) if table.shape[0] == 1 else table[line]
        return pages

    def num_dropped(self, b: int, layer: int, lane: int = 0) -> int:
        """Tokens that a lane of sequence `b` has forgotten."""
        gone = None if self.dropped is None else self.dropped[b]
        return 0 if gone is None else int(gone[layer * self.lanes + lane])

    def num_low(self, b: int, layer: int, lane: int = 0) -> int:
        """Pages at the front of a lane of sequence `b` that are at half the bits."""
        low = None if self.low is None else self.low[b]
        return 0 if low is None else int(low[layer * self.lanes + lane])


@dataclass(frozen=True)
class Taken:
    """Token ids that the host has not read: those of the step's tokens `targets` [n] are `tokens[sources]`, where
    `tokens` is a device's own array of whole numbers, as `ops.draws.StartedDraws.tokens` is."""

    tokens: Any
    sources: I32
    targets: I32


@dataclass(frozen=True)
class StepPlan:
    """One step's batch: token-major, unpadded.

    Shapes: token_ids, positions [T]; query_start_loc [B+1] (sequence b runs tokens query_start_loc[b] ...
    query_start_loc[b+1] at consecutive positions); seq_lens [B] (tokens cached once this step is done); logits_indices
    [R] (rows of the T tokens whose logits are wanted, ascending); hidden_indices [P] (those whose hidden state is);
    mask [T] or None (trees of drafts, whose nodes may share positions but no slots: see `ops.tree`);
    choose_from [B] or None: the position from which on a sequence's tokens read chosen pages only, where a model's
    attention does so (`core.selection.PageReads`). None: those do that are their sequence's only one in the step.
    taken: for models that take token ids from a device; `token_ids` has stand-ins in their places.
    adapters: [B] or None: the number of each sequence's adapter, -1: it has none. None: nobody has one.

    Raises: ValueError for a mask that is none.
    """

    token_ids: I32
    positions: I32
    query_start_loc: I32
    seq_lens: I32
    logits_indices: I32
    groups: tuple[GroupPlan, ...]
    hidden_indices: I32 = field(default_factory=lambda: _NONE)
    mask: U64 | None = None
    choose_from: I32 | None = None
    taken: Taken | None = None
    adapters: I32 | None = None

    def __post_init__(self) -> None:
        if self.mask is not None:
            check_mask(self.mask, self.positions, self.query_start_loc)
