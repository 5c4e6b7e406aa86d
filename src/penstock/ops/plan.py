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

    `tables[b]` has shape [1, M] for a shared table (ids are slabs: layer i reads page id * num_layers + i) or
    [num_layers, M] for a ragged one (ids are that layer's pages). Blocks that lie wholly before the window of the
    sequence's first token may be gone: their ids, and so their pages, are negative and must not be looked up.
    """

    num_layers: int
    block_size: int
    tables: tuple[I32, ...]

    def pages(self, b: int, layer: int) -> I32:
        """Pages [M] of sequence `b` for the `layer`-th layer of the group."""
        table = self.tables[b]
        pages: I32 = table[0] * np.int32(self.num_layers) + np.int32(layer) if table.shape[0] == 1 else table[layer]
        return pages


@dataclass(frozen=True)
class StepPlan:
    """One step's batch: token-major, unpadded.

    Shapes: token_ids, positions [T]; query_start_loc [B+1] (sequence b runs tokens query_start_loc[b] ...
    query_start_loc[b+1] at consecutive positions); seq_lens [B] (tokens cached once this step is done); logits_indices
    [R] (rows of the T tokens whose logits are wanted, ascending); hidden_indices [P] (those whose hidden state is);
    mask [T] or None (trees of guesses, whose nodes may share positions but no slots: see `ops.tree`).

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

    def __post_init__(self) -> None:
        if self.mask is not None:
            check_mask(self.mask, self.positions, self.query_start_loc)
