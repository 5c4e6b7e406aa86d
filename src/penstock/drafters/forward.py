"""Running a model ahead of the verified text: what every drafter with a model of its own, or a part of one, needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.draft import ROOT
from penstock.model.forward import Forward, PoolingForward
from penstock.ops.plan import I32, GroupPlan, StepPlan
from penstock.ops.tree import tree_mask
from penstock.runner.rows import RowStore
from penstock.runner.storage import Storage

F32 = npt.NDArray[np.float32]


class Ahead(NamedTuple):
    """Tokens of one sequence to be run.

    Attributes:
        start: position of the first of `token_ids`, and its slot; all before it is in the cache.
        token_ids: what runs. The i-th is kept in slot start + i.
        parents: None for a chain. Else those of a tree (`core.draft.DraftTree`) below the first token: parents[i]
            belongs to token_ids[i + 1], and ROOT is the first token.
        num_wanted: logits of how many of the last tokens are wanted.
    """

    seq_id: int
    start: int
    token_ids: Sequence[int] | I32
    parents: Sequence[int] | None = None
    num_wanted: int = 1


class DraftForward:
    """One model, or a part of one, over the rank's rows. It writes cache entries of the groups it was built for.

    Entries in slots that are not verified yet are overwritten or zeroed by the step that verifies; a drafter with
    groups of its own finds there what was accepted, moved to the right slots (`runner.undo`).
    """

    def __init__(self, forward: Forward, rows: RowStore, storage: Storage) -> None:
        self._forward, self._rows, self._storage = forward, rows, storage
        self.num_tokens = 0

    def run(self, work: Sequence[Ahead]) -> list[F32]:
        """For each sequence the logits [num_wanted, V] of its last tokens: views, valid until the next run.

        The scheduler has seen to it that there is memory for one token and `DraftJob.num_nodes` behind it.
        """
        plan, ends = self._plan(work)
        logits = self._forward.run(plan, self._storage.planes)
        return [logits[end - item.num_wanted : end] for item, end in zip(work, ends, strict=True)]

    def states(self, work: Sequence[Ahead]) -> F32:
        """The hidden states [sum of num_wanted, E] behind the last tokens of each sequence; otherwise as `run`."""
        assert isinstance(self._forward, PoolingForward), "this model gives no hidden states"
        plan, _ = self._plan(work)
        wanted = replace(plan, logits_indices=plan.logits_indices[:0], hidden_indices=plan.logits_indices)
        return self._forward.run_pooling(wanted, self._storage.planes)[1]

    def _plan(self, work: Sequence[Ahead]) -> tuple[StepPlan, list[int]]:
        """Also where each sequence's wanted rows end."""
        counts = [len(item.token_ids) for item in work]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens = np.concatenate([np.asarray(item.token_ids, np.int32) for item in work])
        positions = np.concatenate([item.start + self._depths(item) for item in work]).astype(np.int32)
        wanted = [np.arange(end - item.num_wanted, end) for item, end in zip(work, starts[1:].tolist(), strict=True)]
        mask = None
        if any(item.parents is not None for item in work):
            parts = [
                np.zeros(count, np.uint64) if item.parents is None else self._tree(item)[0]
                for item, count in zip(work, counts, strict=True)
            ]
            mask = np.concatenate(parts)
        lens = np.array([item.start + count for item, count in zip(work, counts, strict=True)], np.int32)
        plan = StepPlan(
            tokens,
            positions,
            starts,
            lens,
            np.concatenate(wanted).astype(np.int32),
            self._groups(work, lens),
            mask=mask,
        )
        self.num_tokens += len(tokens)
        return plan, np.cumsum([item.num_wanted for item in work]).tolist()

    @staticmethod
    def _tree(item: Ahead) -> tuple[npt.NDArray[np.uint64], I32]:
        assert item.parents is not None
        return tree_mask([ROOT, *(parent + 1 for parent in item.parents)])

    def _depths(self, item: Ahead) -> I32:
        return np.arange(len(item.token_ids), dtype=np.int32) if item.parents is None else self._tree(item)[1]

    def _groups(self, work: Sequence[Ahead], lens: I32) -> tuple[GroupPlan, ...]:
        rows = self._rows
        chosen = [rows[item.seq_id] for item in work]
        return tuple(
            GroupPlan(
                group.pages_per_slab,
                rows.block_size,
                tuple(row.tables[g].view(rows.num_blocks(g, int(lens[b]))) for b, row in enumerate(chosen)),
            )
            for g, group in enumerate(rows.groups)
        )
