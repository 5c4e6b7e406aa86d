"""A row with drafts: where they stand in a step's batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from penstock.core.batch import ScheduledRow
from penstock.core.draft import NO_DRAFT, ROOT, DraftTree
from penstock.core.sampling import TokenRules
from penstock.ops.plan import I32
from penstock.ops.tree import U64, tree_mask
from penstock.runner.rows import Row


class DraftedRow(NamedTuple):
    """What the verifier owes one scheduled row.

    Attributes:
        position: index of the token that follows the newest known one; a draft at depth d is tried at position + d.
        row: row of the logits [R, V] of the newest known token; those of the drafts follow, in their order.
        start: position of that token, and so its slot; draft i is kept in slot start + 1 + i.
    """

    seq_id: int
    rules: TokenRules
    sample_index: int
    position: int
    row: int
    start: int
    tree: DraftTree


class TreeMask:
    """The mask of a step of at most `num_tokens` tokens; there is none until a tree branches."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._mask: U64 | None = None

    def put(self, t: int, tree: DraftTree) -> I32:
        """A tree whose root is token `t`. Returns the depths of root and drafts [1 + K]."""
        if self._mask is None:
            self._mask = np.zeros(self._num_tokens, np.uint64)
        bits, depths = tree_mask([ROOT, *(parent + 1 for parent in tree.parents)])
        self._mask[t : t + len(bits)] = bits
        return depths

    def upto(self, num_tokens: int) -> U64 | None:
        return None if self._mask is None else self._mask[:num_tokens].copy()


def drafts_of(
    job: ScheduledRow, row: Row, trees: Mapping[int, DraftTree] | None, r: int, mask: TreeMask,
    arrays: tuple[I32, I32], t: int,
) -> tuple[DraftedRow, int]:  # fmt: skip
    """The drafts of a row whose newest known token is the batch's token `t`, with `r` as its row of the logits.

    Writes them behind it into `arrays` (tokens and positions), and into `mask` if they branch. Returns how many tokens
    the row runs, too. A row that drafts otherwise than the scheduler may ask for is our own bug (AssertionError).
    """
    tree = NO_DRAFT if trees is None else trees.get(job.seq_id, NO_DRAFT)
    start, count = job.start, len(tree.token_ids)
    assert job.num_tokens == 1, f"{job}: drafts follow a single token"
    assert start + 1 == row.num_tokens, f"{job}: drafts before its {row.num_tokens} known tokens have run"
    assert count <= job.num_drafts, f"{job}: {count} drafts"
    tokens, positions = arrays
    tokens[t + 1 : t + 1 + count] = tree.token_ids
    depths = np.arange(1 + count, dtype=np.int32) if tree.is_chain else mask.put(t, tree)
    positions[t : t + 1 + count] = start + depths
    return DraftedRow(job.seq_id, row.rules, row.sample_index, start + 1, r, start, tree), 1 + count
